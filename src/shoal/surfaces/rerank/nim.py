"""POST /v1/ranking of NVIDIA NIM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.http.json import decoder
from shoal.http.request import JSON, Reply, Request
from shoal.surfaces.rerank import wire
from shoal.surfaces.shared import batch_headers, default_models, ranking, truncation
from shoal.surfaces.shared.task_runs import run_task

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway


class RankingEndpoint:
    """Returns logits, whatever activation the model names. Returns all of them: its client takes the first itself."""

    def __init__(self, gateway: Gateway, limit: int) -> None:
        self._gateway = gateway
        self._limit = limit
        self._decode = decoder.Decoder(wire.RankingRequest, "rerank", limit)

    async def __call__(self, request: Request) -> Reply:
        payload = await self._decode.decode_async(request.body)
        query = ranking.parse_query(payload.query)
        passages = ranking.parse_rank_texts(payload.passages, "passages", self._limit)
        card = await default_models.find_default_model(self._gateway, request, payload.model, "rerank")
        task = ranking.build_task(card, query, passages, raw=True, cut=truncation.parse_truncation(payload.truncate))
        result = await run_task(self._gateway, request, task)
        logits = result.scores[:, 0]
        listed = await ranking.encode_results(
            ranking.sort_descending(logits), lambda place: {"index": place, "logit": logits[place]}
        )
        tail = ranking.close_object({"usage": ranking.count_usage(result)})
        body = ranking.wrap_body(ranking.open_object({}, "rankings"), listed, tail)
        return Reply(200, [JSON, *batch_headers.batch_headers(request, result)], body)
