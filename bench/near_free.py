"""Runs inside Triton: 1024 floats for a text, at next to no cost."""

import zlib
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

ROWS = np.random.default_rng(7).standard_normal((256, 1024), dtype=np.float32)
ROWS /= np.linalg.norm(ROWS, axis=1, keepdims=True)


class TritonPythonModel:
    def execute(self, requests: Any) -> Any:
        return [pb_utils.InferenceResponse([pb_utils.Tensor("embedding", rows(request))]) for request in requests]


def rows(request: Any) -> Any:
    texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
    return ROWS[[zlib.crc32(text) & 255 for text in texts[:, 0]]]
