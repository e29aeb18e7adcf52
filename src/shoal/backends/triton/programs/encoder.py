"""An encoder in Triton's python backend: the ONNX graph beside this file, run by ONNX Runtime.

Requests of one Triton batch share a run if their tensors have the same length and they ask for the same outputs.
Written by Shoal; needs numpy and onnxruntime in Triton's Python.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

LOG_FATAL_ONLY = 4


class TritonPythonModel:
    """One instance, in its own process, with its share of the cores."""

    def initialize(self, args: dict[str, str]) -> None:
        """Raises pb_utils.TritonModelException, which Triton shows as the reason why the model did not load."""
        config = json.loads(args["model_config"])
        instances = sum(group["count"] for group in config["instance_group"]) or 1
        kind = config["parameters"].get("shoal_kind", {}).get("string_value", "auto")
        onnxruntime = import_onnxruntime()
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = LOG_FATAL_ONLY
        settings.intra_op_num_threads = max(1, len(os.sched_getaffinity(0)) // instances)
        settings.inter_op_num_threads = 1
        # Threads that wait by spinning would take the cores of the other instances, and of Triton itself.
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        graph = Path(__file__).with_name("model.onnx")
        self.names = [one["name"] for one in config["input"]]
        self.session = onnxruntime.InferenceSession(
            str(graph),
            settings,
            providers=providers(kind, args["model_instance_kind"], args["model_instance_device_id"]),
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        answers: list[Any] = [None] * len(requests)
        groups: dict[Any, list[int]] = {}
        tensors = []
        for place, request in enumerate(requests):
            tensors.append([pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.names])
            if request.is_cancelled():
                answers[place] = failure("the client cancelled the request", pb_utils.TritonError.CANCELLED)
                continue
            shape = tuple(tensor.shape[1:] for tensor in tensors[place])
            groups.setdefault((shape, tuple(request.requested_output_names())), []).append(place)
        for (_, outputs), places in groups.items():
            run = self.run(outputs, [tensors[place] for place in places])
            for place, answer in zip(places, run, strict=True):
                answers[place] = answer
        return answers

    def run(self, outputs: tuple[str, ...], members: list[list[Any]]) -> list[Any]:
        """Return one response per request. If the joint run fails, run each alone, so that only bad ones fail."""
        feed = {name: np.concatenate(parts) for name, parts in zip(self.names, zip(*members, strict=True), strict=True)}
        try:
            results = self.session.run(list(outputs), feed)
        except Exception as error:  # ONNX Runtime's own exceptions share no base but Exception
            if len(members) > 1:
                return [self.run(outputs, [member])[0] for member in members]
            refused = type(error).__name__ == "InvalidArgument"
            code = pb_utils.TritonError.INVALID_ARG if refused else pb_utils.TritonError.INTERNAL
            return [failure(f"ONNX Runtime: {error}", code)]
        answers, start = [], 0
        for member in members:
            end = start + len(member[0])
            rows = [np.ascontiguousarray(result[start:end]) for result in results]
            answers.append(pb_utils.InferenceResponse([*map(pb_utils.Tensor, outputs, rows)]))
            start = end
        return answers


def import_onnxruntime() -> Any:
    """Import `onnxruntime` without telemetry, which only a variable set before the import turns off."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    import onnxruntime

    return onnxruntime


def providers(kind: str, instance: str, device: str) -> list[Any]:
    """Return the execution providers: the GPU that Triton chose, if `kind` allows one and ONNX Runtime has CUDA."""
    found = "CUDAExecutionProvider" in import_onnxruntime().get_available_providers()
    if kind == "gpu" and not found:
        raise pb_utils.TritonModelException(
            "the onnxruntime of Triton's Python has no CUDA: install onnxruntime-gpu there, or use triton_kind cpu"
        )
    if found and kind != "cpu" and instance == "GPU":
        return [("CUDAExecutionProvider", {"device_id": device}), "CPUExecutionProvider"]
    return ["CPUExecutionProvider"]


def failure(message: str, code: Any) -> Any:
    # Triton's stub writes messages to a log that may accept only ASCII.
    return pb_utils.InferenceResponse([], pb_utils.TritonError(ascii(message)[1:-1], code))
