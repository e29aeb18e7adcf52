"""Triton's python backend from a model.py's view: its module, requests, and how it starts a model."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from shoal.backends.triton.repository_entry import TritonModel
from shoal.types import Array


class Tensor:
    def __init__(self, name: str, array: Array) -> None:
        self.name = name
        self.array = array

    def as_numpy(self) -> Array:
        return self.array


class TritonError:
    INTERNAL, INVALID_ARG, CANCELLED = "internal", "invalid", "cancelled"

    def __init__(self, message: str, code: str) -> None:
        assert message.isascii(), "the stub cannot log anything else"
        self.message = message
        self.code = code


class TritonModelException(Exception):
    pass


class InferenceResponse:
    def __init__(self, tensors: Sequence[Tensor], error: TritonError | None = None) -> None:
        self.outputs = {tensor.name: tensor.array for tensor in tensors}
        self.error = error


@dataclass
class Request:
    inputs: Mapping[str, Array]
    outputs: Sequence[str] = ()
    cancelled: bool = False

    def requested_output_names(self) -> list[str]:
        return list(self.outputs)

    def is_cancelled(self) -> bool:
        return self.cancelled


def backend() -> ModuleType:
    """Make the module `triton_python_backend_utils`."""
    module: Any = ModuleType("triton_python_backend_utils")
    module.Tensor, module.TritonError, module.InferenceResponse = Tensor, TritonError, InferenceResponse
    module.TritonModelException = TritonModelException
    module.get_input_tensor_by_name = lambda request, name: Tensor(name, request.inputs[name])
    found: ModuleType = module
    return found


def install(model: TritonModel, folder: Path) -> Path:
    """Write a model's files into `folder`, without a repository around it; return its model.py."""
    for name, content in model.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    return folder / "1" / "model.py"


def load(monkeypatch: pytest.MonkeyPatch, program: Path) -> Any:
    """Import a model.py."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend())
    spec = importlib.util.spec_from_file_location("model", program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(module: Any, model: TritonModel, *, instance: str = "CPU") -> Any:
    """Return a TritonPythonModel, initialized as Triton does."""
    started = module.TritonPythonModel()
    config = MessageToDict(model.config, preserving_proto_field_name=True)
    kind, device = "model_instance_kind", "model_instance_device_id"
    started.initialize({"model_config": json.dumps(config), kind: instance, device: "0"})
    return started
