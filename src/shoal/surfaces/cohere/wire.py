"""JSON types of Cohere's rerank and embed, as its Python client, version 7, sends and reads them."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shoal.surfaces.shared.wire_inputs import InputObject
from shoal.surfaces.shared.wire_ranking import CohereMeta, MaybeDocumentTokens, MaybeModel, MaybeTop, RankText

EmbeddingType: TypeAlias = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
EmbeddingTypes: TypeAlias = (
    Annotated[
        list[EmbeddingType],
        Meta(
            description="Each type is returned under its name. base64 encodes little-endian float32.",
            examples=[["float"]],
        ),
    ]
    | None
)
MaybeTexts: TypeAlias = Annotated[list[str], Meta(description="Texts to embed.", examples=[["first", "second"]])] | None
MaybeRole: TypeAlias = (
    Annotated[
        Literal["search_document", "search_query", "classification", "clustering", "image"],
        Meta(description="The side of a search, or the name of one of the model's prompts; `image` for images."),
    ]
    | None
)
MaybeCut: TypeAlias = (
    Annotated[
        Literal["NONE", "START", "END"],
        Meta(description="Reject a text that is too long, or truncate it at this end. Default: the server's setting."),
    ]
    | None
)
MaybeImages: TypeAlias = (
    Annotated[
        list[str],
        Meta(description="Images instead of texts: data URIs, base64, or http(s) URLs if the operator allows them."),
    ]
    | None
)


class RelevantSpans(msgspec.Struct, kw_only=True):
    mode: str = "disabled"


class CohereRerankRequest(msgspec.Struct, kw_only=True):
    query: Annotated[str, Meta(examples=["What is a shoal?"])]
    documents: Annotated[
        list[str | RankText], Meta(description="Texts, or objects with a `text`.", examples=[["first", "second"]])
    ]
    model: MaybeModel = None
    top_n: MaybeTop = None
    max_tokens_per_doc: MaybeDocumentTokens = None
    return_documents: Annotated[bool, Meta(description="Return each document with its score, as in v1.")] | None = None
    relevant_spans: Annotated[RelevantSpans, Meta(description="`enabled` is rejected.")] | None = None
    priority: Annotated[int, Meta(description="Accepted and ignored.")] | None = None


class CohereText(msgspec.Struct, kw_only=True):
    text: str


class CohereResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: Annotated[int, Meta(description="Index of the document in the request.")]
    relevance_score: float
    document: CohereText | msgspec.UnsetType = msgspec.UNSET


class CohereRerankResponse(msgspec.Struct, kw_only=True):
    id: str
    results: Annotated[
        list[CohereResult], Meta(description="Sorted by descending score; ties keep the request's order.")
    ]
    meta: CohereMeta


class ContentInput(msgspec.Struct, kw_only=True):
    content: Annotated[list[InputObject], Meta(description="One text, or one image.")]


class CohereEmbedV1Request(msgspec.Struct, kw_only=True):
    texts: MaybeTexts = None
    images: MaybeImages = None
    model: Annotated[str, Meta(description="A served model. Default: the first one that can embed.")] | None = None
    input_type: MaybeRole = None
    embedding_types: EmbeddingTypes = None
    truncate: MaybeCut = None


class CohereEmbedRequest(CohereEmbedV1Request, kw_only=True):
    inputs: Annotated[list[ContentInput], Meta(description="Texts and images, instead of `texts`.")] | None = None
    output_dimension: (
        Annotated[int, Meta(ge=1, description="Truncate vectors to this length, then normalize them.")] | None
    ) = None
    max_tokens: (
        Annotated[int, Meta(ge=1, description="Truncate to this many tokens; rejected below the model's own maximum.")]
        | None
    ) = None
    priority: Annotated[int, Meta(description="Accepted and ignored.")] | None = None


class CohereVectors(msgspec.Struct, kw_only=True, omit_defaults=True, rename={"float_": "float"}):
    float_: list[list[float]] | msgspec.UnsetType = msgspec.UNSET
    int8: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    uint8: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    binary: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    ubinary: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    base64: list[str] | msgspec.UnsetType = msgspec.UNSET


class CohereEmbedResponse(msgspec.Struct, kw_only=True):
    id: str
    embeddings: CohereVectors
    texts: Annotated[list[str], Meta(description="The texts in the inputs.")]
    meta: CohereMeta
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"


class CohereEmbedV1Response(msgspec.Struct, kw_only=True):
    """The reply. Without `embedding_types`, `embeddings` are floats and `response_type` says so."""

    id: str
    embeddings: list[list[float]] | CohereVectors
    texts: list[str]
    meta: CohereMeta
    response_type: Literal["embeddings_floats", "embeddings_by_type"]
