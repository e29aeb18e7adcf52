"""Runs inside Triton: the text says how many million bytes of float32 the answer has."""

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]


class TritonPythonModel:
    def execute(self, requests: Any) -> Any:
        return [answer(request) for request in requests]


def answer(request: Any) -> Any:
    size = int(pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[0])
    vector = np.arange(size * 250_000, dtype=np.float32)
    return pb_utils.InferenceResponse([pb_utils.Tensor("embedding", vector)])
