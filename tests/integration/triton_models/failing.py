"""Runs inside Triton, and fails as words in the texts request.

poison: raises, so that the whole batch fails; reject: INVALID_ARG for its request; unavailable: UNAVAILABLE likewise;
nan: its row is NaN; crash: the process of the model exits.
"""

import os
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]


class TritonPythonModel:
    def execute(self, requests: Any) -> Any:
        return [answer(request) for request in requests]


def answer(request: Any) -> Any:
    texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[:, 0]
    joined = b" ".join(texts)
    if b"crash" in joined:
        os._exit(1)
    if b"poison" in joined:
        raise ValueError("this model was told to fail")
    for word, code in ((b"reject", "INVALID_ARG"), (b"unavailable", "UNAVAILABLE")):
        if word in joined:
            error = pb_utils.TritonError(f"the model said {code}", getattr(pb_utils.TritonError, code))
            return pb_utils.InferenceResponse([], error=error)
    vectors = np.ones((len(texts), 8), np.float32)
    vectors[[b"nan" in text for text in texts]] = np.nan
    return pb_utils.InferenceResponse([pb_utils.Tensor("embedding", vectors)])
