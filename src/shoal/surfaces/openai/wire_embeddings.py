"""JSON types of /v1/embeddings: OpenAI's, with the fields that NVIDIA NIM, Voyage, Jina and vLLM add."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shoal.surfaces.shared.default_models import NOT_SPECIFIED
from shoal.surfaces.shared.wire_inputs import InputMessage, InputObject, Modalities, PictureHeaders, TokenId, Usage

Precision: TypeAlias = Literal["float", "int8", "uint8", "binary", "ubinary"]

EmbeddingsInput: TypeAlias = Annotated[
    str | list[str | TokenId | list[TokenId] | InputObject],
    Meta(
        description="A text, a list of texts, one list of token ids, or a list of such lists. A text may also be "
        '`{"text": ...}`, a picture is `{"image": ...}` or `{"type": "image_url", "image_url": {"url": ...}}`. Token '
        "ids are those of the model itself. Texts and ids do not mix, pictures mix with both.",
        examples=["The food was delicious.", ["first text", "second text"], [101, 7592, 102]],
    ),
]


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """OpenAI's fields, then those of other dialects. Two names for the same field must agree."""

    model: Annotated[
        str,
        Meta(
            description="A served model, by name or alias; `-query` or `-passage` after it is its `input_type`.",
            examples=["all-MiniLM-L6-v2"],
        ),
    ]
    input: EmbeddingsInput | None = None
    encoding_format: (
        Annotated[
            Literal["float", "base64", "bytes_only"],
            Meta(
                description="JSON numbers, the base64 of little-endian numbers, or nothing but their bytes, as with "
                "`Accept: application/octet-stream`. Default: float."
            ),
        ]
        | None
    ) = None
    dimensions: (
        Annotated[
            int,
            Meta(
                ge=0,
                description="Cut vectors to this length, and normalize them again. 0 is refused, except with "
                "`modality`, where it means all of them. (Infinity)",
            ),
        ]
        | None
    ) = None
    user: Annotated[str, Meta(description="Accepted, and not used.")] | None = None
    input_type: (
        Annotated[
            str,
            Meta(
                description="The role of the texts, which picks the model's prompt: query, or document (passage).",
                examples=["query"],
            ),
        ]
        | None
    ) = None
    prompt_name: Annotated[str, Meta(description="A prompt of the model, put before every text.")] | None = None
    truncate: (
        Annotated[
            bool | Literal["NONE", "START", "END"],
            Meta(description="Cut a text that is too long (true or END: its end; START: its start), or refuse it."),
        ]
        | None
    ) = None
    normalize: Annotated[bool, Meta(description="Scale vectors to length one. Default: true.")] | None = None
    embedding_type: (
        Annotated[
            Precision | Literal["base64"] | list[Precision | Literal["base64"]],
            Meta(description="As `output_dtype`, or base64. A list may name one. (NIM, Jina)"),
        ]
        | None
    ) = None
    output_dtype: (
        Annotated[
            Precision,
            Meta(description="Numbers to answer; binary and ubinary hold eight dimensions each. Default: float."),
        ]
        | None
    ) = None
    output_dimension: Annotated[int, Meta(ge=1, description="As `dimensions`. (Voyage)")] | None = None
    truncation: Annotated[bool, Meta(description="As `truncate`. (Voyage)")] | None = None
    task: (
        Annotated[
            str,
            Meta(
                description="`retrieval.query` and `retrieval.passage` are roles; of any other the model's prompt of "
                "that name is used, where it has one. (Jina)",
                examples=["retrieval.query"],
            ),
        ]
        | None
    ) = None
    normalized: Annotated[bool, Meta(description="As `normalize`. (Jina)")] | None = None
    late_chunking: Annotated[bool, Meta(description="True is refused. (Jina)")] | None = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, description="-1, or no less than the model reads: cut there. (vLLM)")] | None
    ) = None
    truncation_side: (
        Annotated[Literal["left", "right"], Meta(description="Which end is cut. Default: right. (vLLM)")] | None
    ) = None
    truncation_direction: (
        Annotated[Literal["left", "right"], Meta(description="As `truncation_side`. (TEI)")] | None
    ) = None
    add_special_tokens: Annotated[bool, Meta(description="False is refused. (vLLM)")] | None = None
    use_activation: Annotated[bool, Meta(description="As `normalize`. (vLLM)")] | None = None
    embed_dtype: Annotated[Literal["float32", "float16"], Meta(description="Of base64 and of bytes. (vLLM)")] | None = (
        None
    )
    endianness: (
        Annotated[Literal["native", "little", "big"], Meta(description="Of base64 and of bytes. (vLLM)")] | None
    ) = None
    modality: (
        Annotated[
            Modalities,
            Meta(
                description="What the texts of `input` are: image makes each a picture, by its URL, data URI or "
                "base64. A list says it for each. Default: text. (Infinity, NIM)"
            ),
        ]
        | None
    ) = None
    messages: (
        Annotated[
            list[InputMessage],
            Meta(
                description="Instead of `input`: a conversation of one text or one picture, which is one input. (vLLM)"
            ),
        ]
        | None
    ) = None
    image_download_headers: PictureHeaders = msgspec.UNSET


AnyModel: TypeAlias = Annotated[
    str | None,
    Meta(
        description="A served model, by name or alias; `-query` or `-passage` after it is its `input_type`. Absent, or "
        "the name of none: the default model for embedding.",
        examples=["all-MiniLM-L6-v2"],
    ),
]


class AnyModelRequest(EmbeddingsRequest, kw_only=True):
    """The same for servers that accept any model name, as text-embeddings-inference does."""

    model: AnyModel = None  # type: ignore[assignment]  # wider than where it must be there


class ImageEmbeddingsRequest(AnyModelRequest, kw_only=True):
    """The same for /embeddings_image, whose inputs are pictures. (Infinity)"""

    model: AnyModel = NOT_SPECIFIED
    modality: Literal["image"] = "image"


class OpenAIEmbedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Annotated[
        list[float | list[float]] | str,
        Meta(description="Numbers, or their base64; of a model of late interaction a vector for each token."),
    ]


class EmbeddingsResponse(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: Annotated[list[OpenAIEmbedding], Meta(description="One entry an input, in the order of the inputs.")]
    model: str
    usage: Usage


BYTES: tuple[str, Any] = ("application/octet-stream", bytes)
