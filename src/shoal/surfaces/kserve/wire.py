"""JSON types of the KServe v2 REST API with Triton's extensions."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shoal.kserve.codec import MAX_DIMENSIONS
from shoal.types import ModelStats

MAX_TENSORS = 64
MAX_PARAMETERS = 256
MAX_VALUES = 262_144
"""Values of a request in JSON, or numbers in typed contents: so many become arrays in about 50 ms."""

Parameters = Annotated[
    dict[str, bool | int | float | str],
    Meta(
        max_length=MAX_PARAMETERS,
        description="`priority` (1: interactive, above: bulk), `timeout` (microseconds), and for embedders `truncate`, "
        "`normalize`, `dimensions`, `prompt_name`, `input_type`.",
    ),
]
Version = Annotated[str, Meta(description="Always 1.")]


class InputTensor(msgspec.Struct, kw_only=True):
    """A tensor, in JSON (`data`) or in the binary part of the body (the parameter `binary_data_size`)."""

    name: str
    shape: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_DIMENSIONS)]
    datatype: Annotated[str, Meta(examples=["BYTES", "INT64"])]
    parameters: dict[str, bool | int | float | str] = {}
    data: Annotated[list[Any] | None, Meta(description="The elements, nested or flat, in row-major order.")] = None


class RequestedOutput(msgspec.Struct, kw_only=True):
    name: str
    parameters: Annotated[
        dict[str, bool | int | float | str],
        Meta(
            description="`binary_data`: return it in the binary part. `classification`: return so many of its largest "
            "elements, as texts `value:index:label`."
        ),
    ] = {}


class InferBody(msgspec.Struct, kw_only=True):
    """An inference request. `GET /v2/models/{id}` lists the tensors of a model."""

    id: str = ""
    parameters: Parameters = {}
    inputs: Annotated[list[InputTensor], Meta(max_length=MAX_TENSORS)]
    outputs: Annotated[list[RequestedOutput], Meta(max_length=MAX_TENSORS, description="Default: the main ones.")] = []


class OutputTensor(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, int] = {}
    data: Annotated[
        list[Any] | None, Meta(description="The elements, flat; absent if they are in the binary part.")
    ] = None


class InferReply(msgspec.Struct, kw_only=True, omit_defaults=True):
    model_name: str
    model_version: Version
    id: str = ""
    outputs: list[OutputTensor]


class GenerateBody(msgspec.Struct, kw_only=True):
    """The model's tensors by name, as values or lists: a language model has `text_input`. `parameters` are those of the
    request, for a language model the sampling fields of vLLM."""

    id: str = ""
    parameters: dict[str, Any] = {}


class TensorMetadata(msgspec.Struct, kw_only=True):
    name: str
    datatype: str
    shape: Annotated[list[int], Meta(description="-1: any length.")]


class ModelMetadata(msgspec.Struct, kw_only=True):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(msgspec.Struct, kw_only=True):
    name: str
    version: str
    extensions: list[str]


class Live(msgspec.Struct, kw_only=True):
    live: bool


class Ready(msgspec.Struct, kw_only=True):
    ready: bool


class IndexBody(msgspec.Struct, kw_only=True):
    ready: Annotated[bool, Meta(description="List only models that can answer.")] = False


class IndexEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    version: str = ""
    state: Annotated[str, Meta(examples=["READY", "LOADING", "UNAVAILABLE"])] = ""
    reason: str = ""


class Statistics(msgspec.Struct, kw_only=True):
    model_stats: list[ModelStats]


class LoadBody(msgspec.Struct, kw_only=True):
    """`parameters` of a load are refused, since they would replace a model's configuration or files; those of an unload
    are ignored."""

    parameters: dict[str, Any] = {}


class KServeError(msgspec.Struct, kw_only=True):
    error: str
