"""JSON types of the proxies that Shoal replaces: auto-batching-proxy, and the Triton proxy in Rust."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# auto-batching-proxy


class ProxyRequest(msgspec.Struct, kw_only=True):
    """The texts to embed. Other fields are ignored, as in the original."""

    inputs: Annotated[
        list[str], Meta(description="The texts, also if there is only one.", examples=[["Hello", "World"]])
    ]


class ProxyBatch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The largest batch that the request was part of."""

    batch_id: int
    batch_type: Annotated[
        Literal["max_batch_size", "max_wait_time_ms"],
        Meta(description="Why the batch was sent: it was full, or its wait time was over."),
    ]
    batch_size: Annotated[int, Meta(description="Requests in the batch.")]
    batch_wait_time_ms: Annotated[
        int | None, Meta(description="Time that the request waited, if the batch was not full.")
    ] = None
    inference_time_ms: Annotated[float, Meta(description="Duration of its call.")]


class ProxyResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    embeddings: Annotated[list[list[float]], Meta(description="One vector per text, in the same order.")]
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
