"""JSON types for ranking documents: Jina's, Voyage's and NVIDIA NIM's, with the fields of vLLM and Infinity."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shoal.surfaces.shared.wire_inputs import Usage
from shoal.surfaces.shared.wire_ranking import CohereMeta, MaybeDocumentTokens, MaybeModel, MaybeTop, RankText

RankInput: TypeAlias = Annotated[str | RankText, Meta(examples=["What is a shoal?"])]


class RerankOptions(msgspec.Struct, kw_only=True):
    query: RankInput
    model: MaybeModel = None
    top_n: MaybeTop = None
    top_k: MaybeTop = None
    return_documents: (
        Annotated[bool, Meta(description="Repeat each document beside its score. Default: true; of Voyage false.")]
        | None
    ) = None
    raw_scores: (
        Annotated[bool, Meta(description="Scores as the model gives them, without its sigmoid. (Infinity)")] | None
    ) = None
    use_activation: Annotated[bool, Meta(description="The opposite of `raw_scores`. (vLLM)")] | None = None
    truncation: (
        Annotated[bool, Meta(description="Cut what is too long for the model, or refuse it. (Voyage, Jina)")] | None
    ) = None
    truncate: Annotated[bool | Literal["NONE", "START", "END"], Meta(description="The same. (NIM)")] | None = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, description="-1, or no less than the model reads: cut there. (vLLM)")] | None
    ) = None
    max_tokens_per_doc: MaybeDocumentTokens = None
    max_doc_length: MaybeDocumentTokens = None
    max_tokens_per_query: Annotated[int, Meta(ge=0, description="Above 0 it is refused. (vLLM)")] | None = None
    max_chunks_per_doc: (
        Annotated[int, Meta(description="Accepted: a document is never cut into chunks. (Cohere)")] | None
    ) = None
    rank_fields: (
        Annotated[list[str], Meta(description="Fields of the documents: nothing but `text`. (Cohere)")] | None
    ) = None
    return_embeddings: Annotated[bool, Meta(description="True is refused. (Jina)")] | None = None
    user: Annotated[str, Meta(description="Accepted, and not used.")] | None = None
    priority: Annotated[int, Meta(description="Accepted, and not used.")] | None = None


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
    index: Annotated[int, Meta(description="Place of the document in the request.")]
    relevance_score: float
    document: RankedText | msgspec.UnsetType = msgspec.UNSET


class RerankResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Annotated[Literal["list", "rerank"], Meta(description="`rerank` where the request has `raw_scores`.")] = (
        "list"
    )
    model: str
    usage: Usage
    results: Annotated[list[RerankResult], Meta(description="The best first; of equal scores the earlier document.")]
    meta: CohereMeta


class VoyageResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    relevance_score: float
    document: str | msgspec.UnsetType = msgspec.UNSET


class VoyageUsage(msgspec.Struct, kw_only=True):
    total_tokens: int


class VoyageResponse(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: Annotated[list[VoyageResult], Meta(description="The best first; of equal scores the earlier document.")]
    model: str
    usage: VoyageUsage


class RankingRequest(msgspec.Struct, kw_only=True):
    """Passages to rank by relevance to a query, in NVIDIA NIM's form."""

    query: RankText
    passages: Annotated[list[RankText], Meta(examples=[[{"text": "first"}, {"text": "second"}]])]
    model: MaybeModel = None
    truncate: (
        Annotated[bool | Literal["NONE", "START", "END"], Meta(description="Cut what is too long, or refuse it.")]
        | None
    ) = None


class Ranking(msgspec.Struct, kw_only=True):
    index: int
    logit: Annotated[float, Meta(description="As the model gives it, without an activation.")]


class RankingResponse(msgspec.Struct, kw_only=True):
    rankings: Annotated[list[Ranking], Meta(description="The best first; of equal scores the earlier passage.")]
    usage: Usage
