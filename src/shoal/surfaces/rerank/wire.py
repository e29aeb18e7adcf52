"""JSON types for ranking documents: Jina's, Voyage's and NVIDIA NIM's, with the fields of vLLM and Infinity."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shoal.surfaces.shared.wire_inputs import Usage
from shoal.surfaces.shared.wire_ranking import (
    CohereMeta,
    MaybeDocumentTokens,
    MaybeInstruct,
    MaybeInstruction,
    MaybeModel,
    MaybeTemplateFields,
    MaybeTop,
    RankText,
)

RankInput: TypeAlias = Annotated[str | RankText, Meta(examples=["What is a shoal?"])]


class RerankOptions(msgspec.Struct, kw_only=True):
    query: RankInput
    model: MaybeModel = None
    top_n: MaybeTop = None
    top_k: MaybeTop = None
    return_documents: (
        Annotated[
            bool, Meta(description="Return each document with its score. Default: true; in Voyage's form, false.")
        ]
        | None
    ) = None
    raw_scores: (
        Annotated[bool, Meta(description="Return the model's raw scores, without its sigmoid. (Infinity)")] | None
    ) = None
    use_activation: Annotated[bool, Meta(description="The opposite of `raw_scores`. (vLLM)")] | None = None
    truncation: (
        Annotated[
            bool,
            Meta(
                description="Truncate inputs that are too long for the model instead of rejecting them. (Voyage, Jina)"
            ),
        ]
        | None
    ) = None
    truncate: (
        Annotated[bool | Literal["NONE", "START", "END"], Meta(description="Same as `truncation`. (NIM)")] | None
    ) = None
    truncate_prompt_tokens: (
        Annotated[
            int, Meta(ge=-1, description="Truncate to this many tokens: -1, or at least the model's maximum. (vLLM)")
        ]
        | None
    ) = None
    max_tokens_per_doc: MaybeDocumentTokens = None
    max_doc_length: MaybeDocumentTokens = None
    max_tokens_per_query: Annotated[int, Meta(ge=0, description="Rejected above 0. (vLLM)")] | None = None
    max_chunks_per_doc: (
        Annotated[int, Meta(description="Accepted: documents are never split into chunks. (Cohere)")] | None
    ) = None
    rank_fields: Annotated[list[str], Meta(description="Fields of the documents: only `text`. (Cohere)")] | None = None
    return_embeddings: Annotated[bool, Meta(description="True is rejected. (Jina)")] | None = None
    instruction: MaybeInstruction = None
    instruct: MaybeInstruct = None
    chat_template_kwargs: MaybeTemplateFields = None
    user: Annotated[str, Meta(description="Accepted and ignored.")] | None = None
    priority: Annotated[int, Meta(description="Accepted and ignored.")] | None = None


class RerankRequest(RerankOptions, kw_only=True):
    """Documents to rank by relevance to a query. `top_k`, whatever its value, selects Voyage's reply."""

    documents: Annotated[
        list[str | RankText], Meta(description="Texts, or objects with a `text`.", examples=[["first", "second"]])
    ]


class AnyRerankRequest(RerankOptions, kw_only=True):
    """Either `documents`, as for /v1/rerank, or `texts`, as in text-embeddings-inference."""

    documents: Annotated[list[str | RankText], Meta(examples=[["first", "second"]])] | None = None
    texts: Annotated[list[str], Meta(examples=[["first", "second"]])] | None = None
    truncation_direction: (
        Annotated[Literal["right", "left", "Right", "Left"], Meta(description="With `texts`.")] | None
    ) = None
    return_text: Annotated[bool, Meta(description="With `texts`.")] | None = None


class RankedText(msgspec.Struct, kw_only=True):
    text: str


class RerankResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: Annotated[int, Meta(description="Index of the document in the request.")]
    relevance_score: float
    document: RankedText | msgspec.UnsetType = msgspec.UNSET


class RerankResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Annotated[Literal["list", "rerank"], Meta(description="`rerank` if the request has `raw_scores`.")] = "list"
    model: str
    usage: Usage
    results: Annotated[
        list[RerankResult], Meta(description="Sorted by descending score; ties keep the request's order.")
    ]
    meta: CohereMeta


class VoyageResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    relevance_score: float
    document: str | msgspec.UnsetType = msgspec.UNSET


class VoyageUsage(msgspec.Struct, kw_only=True):
    total_tokens: int


class VoyageResponse(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: Annotated[list[VoyageResult], Meta(description="Sorted by descending score; ties keep the request's order.")]
    model: str
    usage: VoyageUsage


class RankingRequest(msgspec.Struct, kw_only=True):
    """Passages to rank by relevance to a query, in NVIDIA NIM's form."""

    query: RankText
    passages: Annotated[list[RankText], Meta(examples=[[{"text": "first"}, {"text": "second"}]])]
    model: MaybeModel = None
    truncate: (
        Annotated[
            bool | Literal["NONE", "START", "END"],
            Meta(description="Truncate inputs that are too long instead of rejecting them."),
        ]
        | None
    ) = None


class Ranking(msgspec.Struct, kw_only=True):
    index: int
    logit: Annotated[float, Meta(description="The model's raw score, without an activation.")]


class RankingResponse(msgspec.Struct, kw_only=True):
    rankings: Annotated[list[Ranking], Meta(description="Sorted by descending score; ties keep the request's order.")]
    usage: Usage
