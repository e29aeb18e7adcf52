"""Runs inside Triton: a language model that costs next to nothing, with vLLM's inputs. Every active stream gets one
token in each step, as with in-flight batching; the model's parameter `pace_ms` is the time between two steps."""

import json
import threading
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
TOKENS = 100
FLAGS = ("finish_reason", "num_input_tokens", "num_output_tokens")
COUNTS = {"num_input_tokens": np.array([200], np.uint32), "num_output_tokens": np.array([1], np.uint32)}


class TritonPythonModel:
    def initialize(self, args: Any) -> None:
        config = json.loads(args["model_config"])
        self.pace = float(config["parameters"]["pace_ms"]["string_value"]) / 1000
        self.active: list[Stream] = []
        self.changed = threading.Condition()
        self.ended = False
        self.stepping = threading.Thread(target=self.steps)
        self.stepping.start()

    def execute(self, requests: Any) -> None:
        with self.changed:
            self.active += [Stream(request) for request in requests]
            self.changed.notify()

    def finalize(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify()
        self.stepping.join()

    def steps(self) -> None:
        due = 0.0
        while True:
            with self.changed:
                if not self.active:
                    self.changed.wait_for(lambda: self.active or self.ended)
                    due = time.perf_counter()
                if self.ended:
                    return
                now = list(self.active)
            due += self.pace
            time.sleep(max(0.0, due - time.perf_counter()))
            over = {id(stream) for stream in now if not stream.step()}
            if over:
                with self.changed:
                    self.active = [stream for stream in self.active if id(stream) not in over]


class Stream:
    def __init__(self, request: Any) -> None:
        self.request = request
        self.sender = request.get_response_sender()
        sampling = pb_utils.get_input_tensor_by_name(request, "sampling_parameters")
        self.total = (
            json.loads(sampling.as_numpy().flat[0]).get("max_tokens", TOKENS) if sampling is not None else TOKENS
        )
        self.done = 0
        self.wanted = [name for name in FLAGS if asked_for(request, f"return_{name}")]

    def step(self) -> bool:
        """Send one token; False when that was the last one, or nobody waits for more."""
        if self.request.is_cancelled():
            self.sender.send(flags=FINAL)
            return False
        text = np.array([f" word{self.done % 10}".encode()], dtype=object)
        self.done += 1
        over = self.done >= self.total
        tensors = [pb_utils.Tensor("text_output", text)]
        if "finish_reason" in self.wanted:
            tensors.append(pb_utils.Tensor("finish_reason", np.array([b"length" if over else b""], dtype=object)))
        tensors += [pb_utils.Tensor(name, count) for name, count in COUNTS.items() if name in self.wanted]
        self.sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL if over else 0)
        return not over


def asked_for(request: Any, flag: str) -> bool:
    tensor = pb_utils.get_input_tensor_by_name(request, flag)
    return tensor is not None and bool(tensor.as_numpy().flat[0])
