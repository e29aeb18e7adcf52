"""JSON types of texts, images and token usage, shared by several embeddings dialects."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shoal.http.json.refused import UnreadField

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Bounded so that every id fits the integers that engines take; the vocabulary's own bound is the model's to check."""

ImageHeaders: TypeAlias = Annotated[
    UnreadField,
    Meta(
        description="Headers for fetching images by URL, sent only to hosts that the operator listed.",
        extra_json_schema={"type": ["object", "null"], "additionalProperties": {"type": "string"}},
    ),
]
"""Decoded only if there is an image to fetch, because a body may hold millions of headers."""


class ImageLink(msgspec.Struct, kw_only=True):
    url: str
    detail: Annotated[str, Meta(description="Accepted and ignored.")] | None = None


class InputObject(msgspec.Struct, kw_only=True):
    """A text or an image, in Jina's form or in the form of OpenAI's message parts."""

    type: Literal["text", "input_text", "image", "image_url", "input_image"] | None = None
    text: str | None = None
    image: str | ImageLink | None = None
    image_url: str | ImageLink | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(description="Accepted and ignored.")] = "user"
    content: str | list[InputObject]


Modality: TypeAlias = Literal["text", "image"]
Modalities: TypeAlias = Modality | list[Modality]


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: Annotated[int, Meta(description="Tokens that the model processed, special tokens included.")]
    total_tokens: int
