"""The rerank APIs of Jina and Voyage, which share their paths, and of NVIDIA NIM.

Cohere's second version has its own paths, in `cohere`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from shoal.core.protocols import Operation
from shoal.errors import ShoalError, Unsupported
from shoal.http.json import decoder
from shoal.http.request import JSON, Body, Options, Reply, Request
from shoal.surfaces.rerank import wire as wire
from shoal.surfaces.rerank.nim import RankingEndpoint
from shoal.surfaces.shared import batch_headers, default_models, ranking, truncation
from shoal.surfaces.shared.detail_errors import DetailError, render_detail
from shoal.surfaces.shared.task_runs import run_task
from shoal.surfaces.shared.wire_ranking import MaybeTop
from shoal.types import Rerank, Scored

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard

_ERRORS: dict[int, Any] = dict.fromkeys((400, 404, 422, 429, 500, 502, 503, 504), DetailError)
_QUESTION = "What is a shoal?"
_TEXTS = ["A group of fish.", "A kind of bread."]
_EXAMPLE = {"query": _QUESTION, "documents": _TEXTS}
_ANSWERS: Any = (wire.RerankResponse, wire.VoyageResponse)
_DESCRIPTION = "With `top_k`, even null, the response is Voyage's: `data`, with documents only if requested."


class RerankDocuments:
    """The surface of /rerank with `documents`. Another dialect shares the path: see `shared.rerank_path`."""

    name = "rerank"
    error = DetailError

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        return [_rerank_operation("/rerank", gateway, self._options)]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return render_detail(error)


class Ranking:
    """The surface of /v1/rerank, /v1/ranking and /ranking."""

    name = "ranking"
    error = DetailError

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        passages = {"query": {"text": _QUESTION}, "passages": [{"text": each} for each in _TEXTS]}
        ranking = RankingEndpoint(gateway, self._options.max_inputs)
        return [
            _rerank_operation("/v1/rerank", gateway, self._options),
            *(
                Operation(
                    method="POST",
                    path=path,
                    endpoint=ranking,
                    summary="Rank passages, with logits",
                    request=wire.RankingRequest,
                    response=wire.RankingResponse,
                    errors=_ERRORS,
                    headers=batch_headers.HEADER_DOCS,
                    example=passages,
                )
                for path in ("/v1/ranking", "/ranking")
            ),
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return render_detail(error)


def _rerank_operation(path: str, gateway: Gateway, options: Options) -> Operation:
    return Operation(
        method="POST",
        path=path,
        endpoint=RerankEndpoint(gateway, options.max_inputs, is_infinity=options.status_dialect == "infinity"),
        summary="Rank documents",
        request=wire.RerankRequest,
        response=_ANSWERS,
        errors=_ERRORS,
        headers=batch_headers.HEADER_DOCS,
        description=_DESCRIPTION,
        example=_EXAMPLE,
    )


class _RerankRequest(wire.RerankRequest, kw_only=True):
    """A null counts as absent, except that it still selects the dialect."""

    top_k: MaybeTop | msgspec.UnsetType = msgspec.UNSET  # type: ignore[assignment]
    raw_scores: bool | msgspec.UnsetType | None = msgspec.UNSET  # type: ignore[assignment]


class RerankEndpoint:
    """Ranks `documents`, and replies as Voyage if there is a `top_k`, else as Jina.

    Infinity's generated client always sends `raw_scores`, others need not. With it, or always if `is_infinity` (under
    Infinity's preset), documents in the reply are texts instead of objects, only appear if requested, and `object` is
    `rerank`.
    """

    def __init__(self, gateway: Gateway, limit: int, *, is_infinity: bool) -> None:
        self._gateway = gateway
        self._limit = limit
        self._is_infinity = is_infinity
        self._decode = decoder.Decoder(_RerankRequest, "rerank", limit)

    async def __call__(self, request: Request) -> Reply:
        payload = await self._decode.decode_async(request.body)
        voyage = payload.top_k is not msgspec.UNSET
        infinity = payload.raw_scores is not msgspec.UNSET or (self._is_infinity and not voyage)
        query = ranking.parse_query(payload.query)
        documents = ranking.parse_rank_texts(payload.documents, "documents", self._limit)
        _check_supported(payload)
        card = await default_models.find_default_model(self._gateway, request, payload.model, "rerank")
        result = await run_task(self._gateway, request, _build_task(payload, card, query, documents))
        shown = not (voyage or infinity) if payload.return_documents is None else payload.return_documents
        scores = result.scores[:, 0]
        limit = truncation.merge_fields(top_n=payload.top_n or None, top_k=(payload.top_k or None) if voyage else None)
        order = ranking.sort_descending(scores, cast(int | None, limit))

        def entry(place: int) -> dict[str, Any]:
            made = {"index": place, "relevance_score": scores[place]}
            if shown:
                made["document"] = documents[place] if voyage or infinity else {"text": documents[place]}
            return made

        listed = await ranking.encode_results(order, entry)
        if voyage:
            body = _as_voyage(listed, card.name, result)
        else:
            body = _as_jina(listed, card.name, result, request.id, "rerank" if infinity else "list")
        return Reply(200, [JSON, *batch_headers.batch_headers(request, result)], body)


def _check_supported(payload: wire.RerankRequest) -> None:
    if payload.rank_fields not in (None, [], ["text"]):
        raise Unsupported(
            "'rank_fields' can only be [\"text\"]: join the fields of a document into its 'text'.", param="rank_fields"
        )
    if payload.return_embeddings:
        raise Unsupported("'return_embeddings' is not supported: use POST /v1/embeddings.", param="return_embeddings")
    if payload.max_tokens_per_query:
        raise Unsupported(
            "'max_tokens_per_query' is not supported: omit it, or shorten the query.",
            param="max_tokens_per_query",
        )


def _build_task(payload: wire.RerankRequest, card: ModelCard, query: str, documents: list[str]) -> Rerank:
    whole = truncation.check_token_limit(card, payload.truncate_prompt_tokens, "truncate_prompt_tokens")
    mode = truncation.merge_truncate_fields(payload.truncate, payload.truncation)
    max_document_tokens = cast(
        int | None,
        truncation.merge_fields(
            max_tokens_per_doc=payload.max_tokens_per_doc or None, max_doc_length=payload.max_doc_length or None
        ),
    )
    return ranking.build_task(
        card,
        query,
        documents,
        raw=ranking.wants_raw_scores(
            payload.raw_scores if isinstance(payload.raw_scores, bool) else None, payload.use_activation
        ),
        cut=truncation.parse_truncation(whole if mode is None else mode),
        max_document_tokens=ranking.resolve_document_tokens(card, max_document_tokens),
        instruction=ranking.parse_instruction(payload),
    )


def _as_jina(listed: Body, model: str, result: Scored, request_id: str, kind: str) -> Body:
    """Build Jina's reply, with the `id` and `meta` that clients of Cohere's first version expect.

    `kind` is the value of `object`. Infinity's client raises ValueError unless it is `rerank`.
    """
    usage = ranking.count_usage(result)
    head = {"id": request_id, "object": kind, "model": model, "usage": usage}
    tail = {"meta": ranking.search_meta("1", len(result.tokens), usage["total_tokens"])}
    return ranking.wrap_body(ranking.open_object(head, "results"), listed, ranking.close_object(tail))


def _as_voyage(listed: Body, model: str, result: Scored) -> Body:
    tail = {"model": model, "usage": {"total_tokens": sum(result.tokens)}}
    return ranking.wrap_body(ranking.open_object({"object": "list"}, "data"), listed, ranking.close_object(tail))
