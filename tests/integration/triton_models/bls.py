"""Runs inside Triton: passes each request, with its id, on to the model named by the parameter
`tensorrt_llm_model_name`, and passes that model's responses back, as TensorRT-LLM's BLS does; like that one, it does
not notify the other model when a caller disconnects.

Several calls at once can hang or crash the process (2.51), so they take turns; but a call whose caller has left may
never end, so nobody waits for a turn longer than TURN_S.
"""

import json
import threading
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

TURN_S = 1.0
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args: Any) -> None:
        config = json.loads(args["model_config"])
        self.model = config["parameters"]["tensorrt_llm_model_name"]["string_value"]
        self.turn = threading.Lock()
        self.outputs = [each["name"] for each in config["output"]]

    def execute(self, requests: Any) -> None:
        for request in requests:
            threading.Thread(target=self.pass_on, args=(request, request.get_response_sender())).start()

    def pass_on(self, request: Any, sender: Any) -> None:
        turn = self.turn
        if not turn.acquire(timeout=TURN_S):
            turn = self.turn = threading.Lock()  # the call that has the old one may never end
            turn.acquire()
        try:
            self.call(request, sender)
        finally:
            turn.release()

    def call(self, request: Any, sender: Any) -> None:
        forwarded = pb_utils.InferenceRequest(
            model_name=self.model,
            request_id=request.request_id(),
            requested_output_names=self.outputs,
            inputs=request.inputs(),
        )
        for response in forwarded.exec(decoupled=True):
            if response.has_error():
                sender.send(pb_utils.InferenceResponse([], error=pb_utils.TritonError(response.error().message())))
            elif response.output_tensors():
                sender.send(pb_utils.InferenceResponse(response.output_tensors()))
        sender.send(flags=FINAL)
