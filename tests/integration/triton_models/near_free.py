"""Runs inside Triton: rows of ones after a first number computed from the text, at next to no cost."""

import zlib
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]


class TritonPythonModel:
    def execute(self, requests: Any) -> Any:
        return [pb_utils.InferenceResponse([pb_utils.Tensor("embedding", rows(request))]) for request in requests]


def rows(request: Any) -> Any:
    texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[:, 0]
    made = np.ones((len(texts), 1024), np.float32)
    made[:, 0] = [zlib.crc32(text) % 1000 for text in texts]
    return made
