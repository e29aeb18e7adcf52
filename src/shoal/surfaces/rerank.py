"""The surface of reranking: Jina, Voyage and text-embeddings-inference on paths that they share, and NVIDIA NIM.

Cohere's second version has paths of its own, in `cohere`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from shoal.core.protocols import Operation
from shoal.errors import InvalidValue, ShoalError, Unsupported, WrongType
from shoal.surfaces import _cutting, _facts, _ranking, _tei_errors, _tei_replies, _wire, _wire_tei
from shoal.surfaces import _wire_rerank as wire
from shoal.surfaces._detail_errors import DetailError, render_detail
from shoal.surfaces._fields import Fields
from shoal.surfaces._passages import Passages
from shoal.surfaces._refused import Unread, is_there
from shoal.surfaces._request import JSON, Body, Options, Reply, Request
from shoal.surfaces._tei_rerank import TeiRerank
from shoal.types import Rerank as RerankTask
from shoal.types import Scored

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard

_ERRORS: dict[int, Any] = dict.fromkeys((400, 404, 422, 429, 500, 502, 503, 504), DetailError)
_SHARED: dict[int, Any] = {
    **_ERRORS,
    **dict.fromkeys((400, 422), (DetailError, _wire_tei.TeiError, str)),
    424: _wire_tei.TeiError,
    **dict.fromkeys((429, 500, 503, 504), (DetailError, _wire_tei.TeiError)),
}
_QUESTION = "What is a shoal?"
_TEXTS = ["A group of fish.", "A kind of bread."]
_BY_DOCUMENTS = {"query": _QUESTION, "documents": _TEXTS}
_ANSWERS: Any = (wire.RerankResponse, wire.VoyageResponse)
_VOYAGE = "With `top_k`, also null, the reply is Voyage's: `data`, and documents only where they are asked for."


class Rerank:
    """/rerank, which has two owners: until it is seen that a body has `documents`, errors are told as
    text-embeddings-inference does."""

    name = "rerank"
    error = _wire_tei.TeiError

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        documents = Documents(gateway, self._options.max_inputs)
        return [
            Operation(
                method="POST",
                path="/rerank",
                endpoint=_Either(documents, TeiRerank(gateway, self._options)),
                summary="Rank documents, or texts as text-embeddings-inference does",
                request=wire.AnyRerankRequest,
                response=(*_ANSWERS, list[_wire_tei.TeiRank]),
                errors=_SHARED,
                headers=_tei_replies.DOCUMENTED,
                description=f"With `texts` both the reply and errors are text-embeddings-inference's. {_VOYAGE}",
                example=_BY_DOCUMENTS,
            )
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return _tei_errors.render_error(error)


class Ranking:
    """/v1/rerank and /v1/ranking."""

    name = "ranking"
    error = DetailError

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        passages = {"query": {"text": _QUESTION}, "passages": [{"text": each} for each in _TEXTS]}
        ranking = Passages(gateway, self._options.max_inputs)
        return [
            Operation(
                method="POST",
                path="/v1/rerank",
                endpoint=Documents(gateway, self._options.max_inputs),
                summary="Rank documents",
                request=wire.RerankRequest,
                response=_ANSWERS,
                errors=_ERRORS,
                headers=_facts.DOCUMENTED,
                description=_VOYAGE,
                example=_BY_DOCUMENTS,
            ),
            *(
                Operation(
                    method="POST",
                    path=path,
                    endpoint=ranking,
                    summary="Rank passages, with logits",
                    request=wire.RankingRequest,
                    response=wire.RankingResponse,
                    errors=_ERRORS,
                    headers=_facts.DOCUMENTED,
                    example=passages,
                )
                for path in ("/v1/ranking", "/ranking")
            ),
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return render_detail(error)


class _Shape(msgspec.Struct, kw_only=True):
    """What of a body tells whose it is; the rest is skipped."""

    texts: Unread = msgspec.UNSET
    documents: Unread = msgspec.UNSET


class _Either:
    """/rerank: `texts` are text-embeddings-inference's, `documents` everybody else's."""

    def __init__(self, documents: Documents, texts: TeiRerank) -> None:
        self._documents = documents
        self._texts = texts
        self._shape = msgspec.json.Decoder(_Shape)

    async def __call__(self, request: Request) -> Reply:
        try:
            shape = self._shape.decode(request.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _wire.refusal(error, request.body) from None
        texts, documents = is_there(shape.texts), is_there(shape.documents)
        if texts and documents:
            raise InvalidValue("Both 'documents' and 'texts' are there; send one of them.", param="texts")
        await asyncio.sleep(0)  # a large body was skipped over
        if texts:
            return await self._texts.rerank_texts(request)
        if not documents:
            raise WrongType(
                "Missing required field 'documents' (or 'texts', as text-embeddings-inference has it).",
                param="documents",
            )
        request.render_error = render_detail
        return await self._documents(request)


class Documents:
    """By `documents`, in the reply of Jina or, where there is a `top_k`, of Voyage."""

    def __init__(self, gateway: Gateway, limit: int) -> None:
        self._gateway = gateway
        self._limit = limit
        # The value null is as if the field were not there, but for the dialect.
        asked: Any = msgspec.defstruct(
            "RerankRequest",
            [("top_k", wire.MaybeTop | msgspec.UnsetType, msgspec.UNSET)],
            bases=(wire.RerankRequest,),
            kw_only=True,
        )
        self._decode: Fields[Any] = Fields(asked, "rerank", ("documents", "rank_fields"), limit)

    async def __call__(self, request: Request) -> Reply:
        asked = await self._decode(request.body)
        voyage = asked.top_k is not msgspec.UNSET
        query = _ranking.query_of(asked.query)
        documents = _ranking.texts_of(asked.documents, "documents", self._limit)
        _check_known(asked)
        card = await _ranking.card_of(self._gateway, request, asked.model, "rerank")
        result = await _ranking.scored(self._gateway, request, _task(asked, card, query, documents))
        shown = not voyage if asked.return_documents is None else asked.return_documents
        scores = result.scores[:, 0]
        most = _cutting.agreed(top_n=asked.top_n or None, top_k=(asked.top_k or None) if voyage else None)
        order = _ranking.falling(scores, cast(int | None, most))

        def entry(place: int) -> dict[str, Any]:
            made = {"index": place, "relevance_score": scores[place]}
            if shown:
                made["document"] = documents[place] if voyage else {"text": documents[place]}
            return made

        listed = await _ranking.listed(order, entry)
        body = _as_voyage(listed, card.name, result) if voyage else _as_jina(listed, card.name, result, request.id)
        return Reply(200, [JSON, *_facts.batch_headers(request, result)], body)


def _check_known(asked: wire.RerankRequest) -> None:
    if asked.rank_fields not in (None, [], ["text"]):
        raise Unsupported(
            "'rank_fields' can only be [\"text\"]: join the fields of a document into its 'text'.", param="rank_fields"
        )
    if asked.return_embeddings:
        raise Unsupported("'return_embeddings' is not supported: POST /v1/embeddings.", param="return_embeddings")
    if asked.max_tokens_per_query:
        raise Unsupported(
            "'max_tokens_per_query' is not supported: leave it out, or cut the query before.",
            param="max_tokens_per_query",
        )


def _task(asked: wire.RerankRequest, card: ModelCard, query: str, documents: list[str]) -> RerankTask:
    whole = _cutting.to_model_length(card, asked.truncate_prompt_tokens, "truncate_prompt_tokens")
    wanted = _cutting.whether(asked.truncate, asked.truncation)
    most = cast(
        int | None,
        _cutting.agreed(
            max_tokens_per_doc=asked.max_tokens_per_doc or None, max_doc_length=asked.max_doc_length or None
        ),
    )
    return _ranking.task_of(
        card,
        query,
        documents,
        raw=_ranking.is_raw(asked.raw_scores, asked.use_activation),
        cut=_cutting.truncation(whole if wanted is None else wanted),
        most=_ranking.document_tokens(card, most),
    )


def _as_jina(listed: Body, model: str, result: Scored, request_id: str) -> Body:
    """Jina's reply, with the `id` and the `meta` that clients of Cohere's first version look for."""
    usage = _ranking.usage(result)
    head = {"id": request_id, "object": "list", "model": model, "usage": usage}
    tail = {"meta": _ranking.searched("1", len(result.tokens), usage["total_tokens"])}
    return _ranking.between(_ranking.opened(head, "results"), listed, _ranking.closed(tail))


def _as_voyage(listed: Body, model: str, result: Scored) -> Body:
    tail = {"model": model, "usage": {"total_tokens": sum(result.tokens)}}
    return _ranking.between(_ranking.opened({"object": "list"}, "data"), listed, _ranking.closed(tail))
