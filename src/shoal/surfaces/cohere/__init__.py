"""Cohere's API: /v2/rerank, /v2/embed, and /v1/embed for older clients.

`surfaces.rerank` serves /v1/rerank, which is Jina's path, too. /embed belongs to text-embeddings-inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.core.protocols import Operation
from shoal.errors import ShoalError, Unsupported
from shoal.http.json import decoder
from shoal.http.request import JSON, Options, Reply, Request
from shoal.surfaces.cohere import wire as wire
from shoal.surfaces.cohere.embed import CohereEmbed
from shoal.surfaces.shared import batch_headers, default_models, ranking
from shoal.surfaces.shared.detail_errors import MessageError, render_message
from shoal.surfaces.shared.task_runs import run_task

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

_ERRORS: dict[int, Any] = dict.fromkeys((400, 404, 422, 429, 500, 502, 503, 504), MessageError)
_QUESTION = "What is a shoal?"
_TEXTS = ["A group of fish.", "A kind of bread."]


class Cohere:
    name = "cohere"
    error = MessageError

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        limit = self._options.max_inputs
        embed = CohereEmbed(gateway, self._options)
        table: list[tuple[str, Any, str, Any, Any, Any]] = [
            (
                "/v2/rerank",
                _RerankEndpoint(gateway, limit),
                "Rank documents",
                wire.CohereRerankRequest,
                wire.CohereRerankResponse,
                {"query": _QUESTION, "documents": _TEXTS},
            ),
            (
                "/v2/embed",
                embed.embed_v2,
                "Embed texts or images, in one or more number types",
                wire.CohereEmbedRequest,
                wire.CohereEmbedResponse,
                {"texts": _TEXTS, "input_type": "search_document", "embedding_types": ["float", "int8"]},
            ),
            (
                "/v1/embed",
                embed.embed_v1,
                "Embed texts or images, as in Cohere's v1 API",
                wire.CohereEmbedV1Request,
                wire.CohereEmbedV1Response,
                {"texts": _TEXTS, "input_type": "search_document"},
            ),
        ]
        return [
            Operation(
                method="POST",
                path=path,
                endpoint=endpoint,
                summary=summary,
                request=request,
                response=response,
                errors=_ERRORS,
                headers=batch_headers.HEADER_DOCS,
                example=example,
            )
            for path, endpoint, summary, request, response, example in table
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return render_message(error)


class _RerankEndpoint:
    def __init__(self, gateway: Gateway, limit: int) -> None:
        self._gateway = gateway
        self._limit = limit
        self._decode = decoder.Decoder(wire.CohereRerankRequest, "cohere", limit)

    async def __call__(self, request: Request) -> Reply:
        payload = await self._decode.decode_async(request.body)
        query = ranking.parse_query(payload.query)
        documents = ranking.parse_rank_texts(payload.documents, "documents", self._limit)
        if payload.relevant_spans is not None and payload.relevant_spans.mode != "disabled":
            raise Unsupported("'relevant_spans' is not supported: omit it.", param="relevant_spans")
        card = await default_models.find_default_model(self._gateway, request, payload.model, "rerank")
        max_document_tokens = ranking.resolve_document_tokens(card, payload.max_tokens_per_doc)
        task = ranking.build_task(card, query, documents, max_document_tokens=max_document_tokens)
        result = await run_task(self._gateway, request, task)
        scores = result.scores[:, 0]

        def entry(place: int) -> dict[str, Any]:
            document = {"document": {"text": documents[place]}} if payload.return_documents else {}
            return {"index": place, "relevance_score": scores[place], **document}

        listed = await ranking.encode_results(ranking.sort_descending(scores, payload.top_n), entry)
        tail = ranking.close_object({"meta": ranking.search_meta("2", len(documents), sum(result.tokens))})
        body = ranking.wrap_body(ranking.open_object({"id": request.id}, "results"), listed, tail)
        return Reply(200, [JSON, *batch_headers.batch_headers(request, result)], body)
