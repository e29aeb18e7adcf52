"""/rerank with `texts`, as in text-embeddings-inference; `documents` on the same path belong to another dialect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from shoal.errors import EmptyInput
from shoal.http.json import decoder
from shoal.http.request import Options, Reply, Request
from shoal.surfaces.shared import default_models, vector_encoding
from shoal.surfaces.shared.task_runs import run_task
from shoal.surfaces.tei import replies, scoring, wire
from shoal.types import Array, Rerank

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway


class TeiRerank:
    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._max_inputs = options.max_inputs
        self._decode = decoder.Decoder(wire.TeiRerankRequest, "tei", options.max_inputs)

    async def rerank_texts(self, request: Request) -> Reply:
        payload = await self._decode.decode_async(request.body)
        query, texts = payload.query, payload.texts
        if not texts:
            raise EmptyInput("`texts` cannot be empty", param="texts")
        card = await default_models.find_model(self._gateway, request, payload.model, default_models.RERANK)
        replies.check_count(len(texts), self._max_inputs)
        if not query and not all(texts):
            raise EmptyInput(replies.EMPTY_INPUT, param="texts")
        task = Rerank(
            model=card.name,
            queries=[query],
            documents=texts,
            raw_scores=True,
            truncate=payload.truncate,
            truncation_direction=replies.parse_direction(payload.truncation_direction),
        )
        result = await run_task(self._gateway, request, task)
        scores = scoring.apply_activation(result.scores, raw=bool(payload.raw_scores))[:, 0]
        count = len(query) * len(texts) + sum(map(len, texts))
        body = await _encode(scores, texts if payload.return_text else None)
        return Reply(200, replies.build_headers(request, card, count, result), body)


async def _encode(scores: Array, texts: list[str] | None) -> bytes | list[bytes]:
    order = scoring.sort_descending(scores)

    def some(start: int, stop: int) -> bytes:
        rows: list[dict[str, Any]] = []
        for place in order[start:stop]:
            text = {} if texts is None else {"text": texts[place]}
            rows.append({"index": place, **text, "score": scores[place]})
        return orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)

    return await vector_encoding.encode_array(len(order), some)
