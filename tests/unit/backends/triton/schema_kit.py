"""Model configurations as Triton reports them, and their detected schemas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import pytest

from shoal.backends.triton.schema import Embedder, TensorNames, detect_embedder
from shoal.backends.triton.tensors import DATATYPES
from shoal.errors import ConfigError
from shoal.kserve.protocol_pb2 import ModelConfig, ModelInput, ModelMetadataResponse, ModelOutput

NUMBERS = {name: number for number, name in DATATYPES.items()}
Tensor: TypeAlias = tuple[str, str, Sequence[int]]

TEXT: Tensor = ("text", "BYTES", [1])
IDS: Tensor = ("input_ids", "INT64", [-1])
MASK: Tensor = ("attention_mask", "INT64", [-1])
SENTENCE: Tensor = ("sentence_embedding", "FP32", [384])


def config(inputs: Iterable[Tensor], outputs: Iterable[Tensor], *, size: int = 32, **more: Any) -> ModelConfig:
    """Build a ModelConfig. `more`: its other fields; `optional`: names of optional inputs."""
    optional = more.pop("optional", ())
    return ModelConfig(
        name=more.pop("name", "m"),
        max_batch_size=size,
        input=[
            ModelInput(name=name, data_type=NUMBERS[kind], dims=dims, optional=name in optional)  # type: ignore[arg-type]
            for name, kind, dims in inputs
        ],
        output=[
            ModelOutput(name=name, data_type=NUMBERS[kind], dims=dims)  # type: ignore[arg-type]
            for name, kind, dims in outputs
        ],
        **more,
    )


def metadata(*versions: str, platform: str = "") -> ModelMetadataResponse:
    return ModelMetadataResponse(name="m", versions=versions or ("1",), platform=platform)


def found(
    inputs: Iterable[Tensor], outputs: Iterable[Tensor], names: TensorNames | None = None, **more: Any
) -> Embedder:
    return detect_embedder(config(inputs, outputs, **more), metadata(), names)


def refusal(inputs: Iterable[Tensor], outputs: Iterable[Tensor], names: TensorNames | None = None, **more: Any) -> str:
    with pytest.raises(ConfigError, match=r"^Triton's model 'm' ") as caught:
        found(inputs, outputs, names, **more)
    return caught.value.message


def sent(embedder: Embedder) -> dict[str, str]:
    return {port.canonical: port.name for port in embedder.inputs}


def read(embedder: Embedder) -> dict[str, str]:
    return {port.canonical: port.name for port in embedder.outputs}
