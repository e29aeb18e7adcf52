"""The JSON of the `infer` surface, which is that of the sentence-transformers inference server."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shoal.surfaces._wire_models import Backend, TextIn

Name = Annotated[str, Meta(description="The model. `name` is read as well.", examples=["intfloat/e5-small-v2"])]
Pretrained = Annotated[str, Meta(description="A checkpoint of a CLIP model; named in messages, and not used.")]
Texts = Annotated[str | list[str], Meta(description="A text or a list of texts.", examples=["a cat"])]
Dimensions = Annotated[int, Meta(ge=1, description="Cut vectors to this length, and normalise them again.")]
Milliseconds = Annotated[float, Meta(description="Time from the arrival of the request.")]


class LoadRequest(msgspec.Struct, kw_only=True):
    model_name: Name
    backend: Backend | None = None
    text_in: TextIn | None = None


class NamedRequest(msgspec.Struct, kw_only=True):
    model_name: Name
    pretrained: Pretrained | None = None


class InferTextRequest(msgspec.Struct, kw_only=True):
    model_name: Name
    text: Texts
    pretrained: Pretrained | None = None
    normalize: bool = True
    n_dims: Dimensions | None = None
    also_n_dims: Dimensions | None = msgspec.field(name="nDims", default=None)


class InferRequest(msgspec.Struct, kw_only=True):
    model_name: Name
    text: Texts | None = None
    image: Annotated[Any, Meta(description="Not served by this version: leave it out.")] = None
    pretrained: Pretrained | None = None
    normalize: bool = True
    n_dims: Dimensions | None = None
    also_n_dims: Dimensions | None = msgspec.field(name="nDims", default=None)


class Message(msgspec.Struct, kw_only=True):
    message: str


class LoadedModels(msgspec.Struct, kw_only=True):
    models: list[str]


class RepositoryModel(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    state: Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
    reason: Annotated[str, Meta(description="Why it is not ready.")] = ""
    managed: Annotated[bool, Meta(description="False: not made by Shoal, which does not delete it.")] = True


class RepositoryModels(msgspec.Struct, kw_only=True):
    models: list[RepositoryModel]


class TextEmbedding(msgspec.Struct, kw_only=True):
    embedding: list[list[float]]
    processing_ms: Milliseconds = msgspec.field(name="processingTimeMs")


class Embeddings(msgspec.Struct, kw_only=True):
    text_embeddings: list[list[float]]
    processing_ms: Milliseconds = msgspec.field(name="processingTimeMs")


class Detail(msgspec.Struct, kw_only=True):
    detail: str


class Problem(msgspec.Struct, kw_only=True):
    type: str
    loc: Annotated[list[str | int], Meta(description="Where in the request: `body`, then field and index.")]
    msg: str
    input: Annotated[Any, Meta(description="What was there; null where it is long.")]


class Problems(msgspec.Struct, kw_only=True):
    detail: list[Problem]
