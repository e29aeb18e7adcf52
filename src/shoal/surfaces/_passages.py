"""POST /v1/ranking of NVIDIA NIM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.surfaces import _cutting, _facts, _ranking, _wire
from shoal.surfaces import _wire_rerank as wire
from shoal.surfaces._request import JSON, Reply, Request

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway


class Passages:
    """Logits, whatever activation the model names; all of them, because its client takes the first as they come."""

    def __init__(self, gateway: Gateway, limit: int) -> None:
        self._gateway = gateway
        self._limit = limit
        self._decode = _wire.Decoder(wire.RankingRequest, "rerank", "passages", limit)

    async def __call__(self, request: Request) -> Reply:
        asked = await self._decode.in_turns(request.body)
        query = _ranking.query_of(asked.query)
        passages = _ranking.texts_of(asked.passages, "passages", self._limit)
        card = await _ranking.card_of(self._gateway, request, asked.model, "rerank")
        task = _ranking.task_of(card, query, passages, raw=True, cut=_cutting.truncation(asked.truncate))
        result = await _ranking.scored(self._gateway, request, task)
        logits = result.scores[:, 0]
        listed = await _ranking.listed(_ranking.falling(logits), lambda place: {"index": place, "logit": logits[place]})
        tail = _ranking.closed({"usage": _ranking.usage(result)})
        body = _ranking.between(_ranking.opened({}, "rankings"), listed, tail)
        return Reply(200, [JSON, *_facts.batch_headers(request, result)], body)
