"""JSON types of /v1/embeddings: OpenAI's, with the fields that NVIDIA NIM, Voyage, Jina and vLLM add."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shoal.surfaces.shared.default_models import NOT_SPECIFIED
from shoal.surfaces.shared.wire_inputs import ImageHeaders, InputMessage, InputObject, Modalities, TokenId, Usage

Precision: TypeAlias = Literal["float", "int8", "uint8", "binary", "ubinary"]

EmbeddingsInput: TypeAlias = Annotated[
    str | list[str | TokenId | list[TokenId] | InputObject],
    Meta(
        description="A text, a list of texts, one list of token ids, or a list of such lists. A text may also be "
        '`{"text": ...}`; an image is `{"image": ...}` or `{"type": "image_url", "image_url": {"url": ...}}`. Token '
        "ids are the model's own. Texts and ids cannot be mixed; images can be mixed with both.",
        examples=["The food was delicious.", ["first text", "second text"], [101, 7592, 102]],
    ),
]


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """OpenAI's fields, then those of other dialects. Two names for the same field must agree."""

    model: Annotated[
        str,
        Meta(
            description="Name or alias of a served model; a suffix `-query` or `-passage` sets `input_type`.",
            examples=["all-MiniLM-L6-v2"],
        ),
    ]
    input: EmbeddingsInput | None = None
    encoding_format: (
        Annotated[
            Literal["float", "base64", "bytes_only"],
            Meta(
                description="JSON numbers, base64 of little-endian numbers, or raw bytes, as with `Accept: "
                "application/octet-stream`. Default: float."
            ),
        ]
        | None
    ) = None
    dimensions: (
        Annotated[
            int,
            Meta(
                ge=0,
                description="Truncate vectors to this length, then normalize them. 0 is rejected, except with "
                "`modality`, where it means the full length. (Infinity)",
            ),
        ]
        | None
    ) = None
    user: Annotated[str, Meta(description="Accepted and ignored.")] | None = None
    input_type: (
        Annotated[
            str,
            Meta(
                description="Role of the texts, which selects the model's prompt: query or document (passage).",
                examples=["query"],
            ),
        ]
        | None
    ) = None
    prompt_name: Annotated[str, Meta(description="Name of a prompt of the model, prepended to every text.")] | None = (
        None
    )
    truncate: (
        Annotated[
            bool | Literal["NONE", "START", "END"],
            Meta(
                description="Truncate texts that are too long (true or END: at the end; START: at the start) instead "
                "of rejecting them."
            ),
        ]
        | None
    ) = None
    normalize: Annotated[bool, Meta(description="Normalize vectors to unit length. Default: true.")] | None = None
    embedding_type: (
        Annotated[
            Precision | Literal["base64"] | list[Precision | Literal["base64"]],
            Meta(description="Same as `output_dtype`, or base64. A list may contain one type. (NIM, Jina)"),
        ]
        | None
    ) = None
    output_dtype: (
        Annotated[
            Precision,
            Meta(
                description="Type of the returned numbers; binary and ubinary pack eight dimensions into each. "
                "Default: float."
            ),
        ]
        | None
    ) = None
    output_dimension: Annotated[int, Meta(ge=1, description="Same as `dimensions`. (Voyage)")] | None = None
    truncation: Annotated[bool, Meta(description="Same as `truncate`. (Voyage)")] | None = None
    task: (
        Annotated[
            str,
            Meta(
                description="`retrieval.query` and `retrieval.passage` are roles; other values select the model's "
                "prompt or task of that name. A model that has tasks rejects others. (Jina)",
                examples=["retrieval.query"],
            ),
        ]
        | None
    ) = None
    normalized: Annotated[bool, Meta(description="Same as `normalize`. (Jina)")] | None = None
    late_chunking: Annotated[bool, Meta(description="True is rejected. (Jina)")] | None = None
    truncate_prompt_tokens: (
        Annotated[
            int, Meta(ge=-1, description="Truncate to this many tokens: -1, or at least the model's maximum. (vLLM)")
        ]
        | None
    ) = None
    truncation_side: (
        Annotated[Literal["left", "right"], Meta(description="End to truncate. Default: right. (vLLM)")] | None
    ) = None
    truncation_direction: (
        Annotated[Literal["left", "right"], Meta(description="Same as `truncation_side`. (TEI)")] | None
    ) = None
    add_special_tokens: Annotated[bool, Meta(description="False is rejected. (vLLM)")] | None = None
    use_activation: Annotated[bool, Meta(description="Same as `normalize`. (vLLM)")] | None = None
    embed_dtype: (
        Annotated[Literal["float32", "float16"], Meta(description="For base64 and binary responses. (vLLM)")] | None
    ) = None
    endianness: (
        Annotated[Literal["native", "little", "big"], Meta(description="For base64 and binary responses. (vLLM)")]
        | None
    ) = None
    modality: (
        Annotated[
            Modalities,
            Meta(
                description="Type of the texts in `input`: with image, each is the URL, data URI or base64 of "
                "an image. A list sets it for each input. Default: text. (Infinity, NIM)"
            ),
        ]
        | None
    ) = None
    messages: (
        Annotated[
            list[InputMessage],
            Meta(description="Instead of `input`: a conversation of one text or image, embedded as one input. (vLLM)"),
        ]
        | None
    ) = None
    image_download_headers: ImageHeaders = msgspec.UNSET


AnyModel: TypeAlias = Annotated[
    str | None,
    Meta(
        description="Name or alias of a served model; a suffix `-query` or `-passage` sets `input_type`. Absent or "
        "unknown: the default model for embedding.",
        examples=["all-MiniLM-L6-v2"],
    ),
]


class AnyModelRequest(EmbeddingsRequest, kw_only=True):
    """The same for servers that accept any model name, as text-embeddings-inference does."""

    model: AnyModel = None  # type: ignore[assignment]  # wider than where it must be there


class ImageEmbeddingsRequest(AnyModelRequest, kw_only=True):
    """The same for /embeddings_image, whose inputs are images. (Infinity)"""

    model: AnyModel = NOT_SPECIFIED
    modality: Literal["image"] = "image"


class OpenAIEmbedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Annotated[
        list[float | list[float]] | str,
        Meta(description="Numbers, or their base64; for a late-interaction model, one vector per token."),
    ]


class EmbeddingsResponse(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: Annotated[list[OpenAIEmbedding], Meta(description="One entry per input, in the order of the inputs.")]
    model: str
    usage: Usage


BYTES: tuple[str, Any] = ("application/octet-stream", bytes)
