"""Runs inside Triton: the text says how many responses the request gets; "-2" gives two, then an error."""

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests: Any) -> None:
        for request in requests:
            answer(request)


def answer(request: Any) -> None:
    sender = request.get_response_sender()
    count = int(pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[0])
    for number in range(abs(count)):
        if request.is_cancelled():
            break
        text = np.array([f"response {number}".encode()], dtype=object)
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]))
    if count < 0:
        sender.send(pb_utils.InferenceResponse([], error=pb_utils.TritonError("told to fail in the middle")))
    sender.send(flags=FINAL)
