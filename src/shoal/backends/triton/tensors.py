"""A model's inputs and outputs, combined from Triton's ModelConfig and ModelMetadata.

`dims` in a ModelConfig omit the batch axis if max_batch_size is above 0; shapes in ModelMetadata include it as a
leading -1. `reshape` applies between Triton and the model: clients send and receive `dims`.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.errors import ConfigError
from shoal.kserve.protocol_pb2 import ModelConfig, ModelMetadataResponse

DATATYPES = {
    1: "BOOL",
    2: "UINT8",
    3: "UINT16",
    4: "UINT32",
    5: "UINT64",
    6: "INT8",
    7: "INT16",
    8: "INT32",
    9: "INT64",
    10: "FP16",
    11: "FP32",
    12: "FP64",
    13: "BYTES",
    14: "BF16",
}
"""Numbers of ModelConfig's DataType to datatype names on the wire, where TYPE_STRING is BYTES."""


class Tensor(NamedTuple):
    """One tensor of the configuration: `dims` omit the batch axis if max_batch_size is above 0."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.datatype} {list(self.dims)})"


class Tensors(NamedTuple):
    """All inputs and outputs of a model. `max_batch_size` 0: Triton adds no batch axis to them."""

    name: str
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    max_batch_size: int

    def refuse(self, why: str) -> ConfigError:
        return ConfigError(f"Triton's model {self.name!r} {why}")


def read_tensors(config: ModelConfig, metadata: ModelMetadataResponse) -> Tensors:
    """Return the tensors of the configuration, or of the metadata if the server omits them from the configuration."""
    size = max(config.max_batch_size, 0)
    inputs = [
        Tensor(one.name, DATATYPES.get(one.data_type, "?"), tuple(one.dims), one.optional) for one in config.input
    ]
    outputs = [Tensor(one.name, DATATYPES.get(one.data_type, "?"), tuple(one.dims)) for one in config.output]
    batched = 1 if size else 0
    if not inputs:
        inputs = [Tensor(one.name, one.datatype, tuple(one.shape)[batched:]) for one in metadata.inputs]
    if not outputs:
        outputs = [Tensor(one.name, one.datatype, tuple(one.shape)[batched:]) for one in metadata.outputs]
    name = config.name or metadata.name
    return Tensors(name, {one.name: one for one in inputs}, {one.name: one for one in outputs}, size)


def detect_family(config: ModelConfig, metadata: ModelMetadataResponse, model: Tensors) -> str:
    """Return the text-generation convention that a model follows, "" for none."""
    has = model.inputs.keys()
    if "dynamo" in (config.platform, config.backend, metadata.platform):
        return "Dynamo"
    if "vllm" in (config.backend, config.platform, metadata.platform) or {"text_input", "sampling_parameters"} <= has:
        return "vLLM"
    if {"input_ids", "request_output_len"} <= has:
        return "TensorRT-LLM, token level"
    if "text_input" in has and ("streaming" in has or any(one.startswith("sampling_param_") for one in has)):
        return "TensorRT-LLM, LLM API"
    if {"text_input", "max_tokens"} <= has:
        return "TensorRT-LLM"
    text = model.outputs.get("text_output")
    return "text_output" if text is not None and text.datatype == "BYTES" else ""


def count_instances(config: ModelConfig) -> int:
    """Return the number of active instances, at least 1. `count` applies to each listed GPU."""
    groups = [group for group in config.instance_group if not group.passive]
    return max(1, sum(max(group.count, 1) * max(len(group.gpus), 1) for group in groups))


def newest_version(metadata: ModelMetadataResponse) -> str:
    """Return the newest loaded version, "" if the server reports none."""
    return max(metadata.versions, key=_version_order, default="")


def _version_order(version: str) -> tuple[int, str]:
    return (int(version), "") if version.isdecimal() else (-1, version)
