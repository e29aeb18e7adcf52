"""The two engines that read ONNX files, as plain functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shoal.backends.local.compile import has_bf16 as openvino_has_bf16
from shoal.backends.local.compile import import_openvino as openvino_runtime
from shoal.backends.local.onnxruntime import import_onnxruntime as onnx_runtime
from shoal.models.convert.verify import Run
from shoal.types import Array


def onnxruntime_run(path: Path) -> Run:
    onnxruntime = onnx_runtime()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(inputs: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        return dict(zip(outputs, session.run(list(outputs), inputs), strict=True))

    return run


def openvino_run(path: Path, precision: str = "f32") -> Run:
    model = openvino_runtime().Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": precision})

    def run(inputs: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        result = model(inputs)
        return {name: np.array(result[name]) for name in outputs}

    return run


RUNS = {"onnxruntime": onnxruntime_run, "openvino": openvino_run}


def has_bf16() -> bool:
    """Whether `precision` auto has a choice here: an engine held down to older instructions says no as well."""
    return openvino_has_bf16(openvino_runtime().Core())
