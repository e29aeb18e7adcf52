"""JSON types of the proxies that Shoal replaces: auto-batching-proxy, and the Triton proxy in Rust."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# auto-batching-proxy


class ProxyRequest(msgspec.Struct, kw_only=True):
    """The texts to embed. Other fields are ignored, as in the original."""

    inputs: Annotated[list[str], Meta(description="The texts, also where it is one.", examples=[["Hello", "World"]])]


class ProxyBatch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The largest batch that the request was part of."""

    batch_id: int
    batch_type: Annotated[
        Literal["max_batch_size", "max_wait_time_ms"],
        Meta(description="Why it left: it was full, or nobody else came while there was time."),
    ]
    batch_size: Annotated[int, Meta(description="Requests in it.")]
    batch_wait_time_ms: Annotated[int | None, Meta(description="What the request waited, where it was not full.")] = (
        None
    )
    inference_time_ms: Annotated[float, Meta(description="What its call took.")]


class ProxyResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    embeddings: Annotated[list[list[float]], Meta(description="One vector a text, in their order.")]
    batch_info: ProxyBatch | None = None


class ProxyError(msgspec.Struct, kw_only=True):
    error: str


# The Triton proxy


class Query(msgspec.Struct, kw_only=True):
    query: Annotated[str, Meta(description="The text to embed.", examples=["What is a shoal?"])]


class QueryEmbedding(msgspec.Struct, kw_only=True):
    embedding: list[float]


class HttpError(msgspec.Struct, kw_only=True):
    msg: str
