"""/rerank by `texts`, as text-embeddings-inference has it; the same path by `documents` is another dialect's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from shoal.errors import EmptyInput
from shoal.surfaces import _rows, _tei_errors, _tei_models, _tei_replies, _tei_scores, _wire, _wire_tei
from shoal.surfaces._request import Options, Reply, Request
from shoal.types import Array, Rerank

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway


class TeiRerank:
    """`rerank_texts` reads the whole body itself, and raises what `render_error` tells in the original's words."""

    render_error = staticmethod(_tei_errors.render_error)

    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._max_inputs = options.max_inputs
        self._decode = _wire.Decoder(_wire_tei.TeiRerankRequest, "tei", "texts", options.max_inputs)

    async def rerank_texts(self, request: Request) -> Reply:
        asked = await self._decode.in_turns(request.body)
        query, texts = asked.query, asked.texts
        if not texts:
            raise EmptyInput("`texts` cannot be empty", param="texts")
        card = await _tei_models.find(self._gateway, request, asked.model, _tei_models.RERANK)
        _tei_replies.check_count(len(texts), self._max_inputs)
        if not query and not all(texts):
            raise EmptyInput(_tei_replies.EMPTY_INPUT, param="texts")
        request.items = len(texts)
        task = Rerank(
            model=card.name,
            queries=[query],
            documents=texts,
            raw_scores=True,
            truncate=asked.truncate,
            truncation_direction=_tei_replies.direction(asked.truncation_direction),
        )
        result = await self._gateway.run(task, request.context())
        request.result = result
        scores = _tei_scores.activated(result.scores, raw=bool(asked.raw_scores))[:, 0]
        count = len(query) * len(texts) + sum(map(len, texts))
        body = await _encoded(scores, texts if asked.return_text else None)
        return Reply(200, _tei_replies.headers(request, card, count, result), body)


async def _encoded(scores: Array, texts: list[str] | None) -> bytes | list[bytes]:
    order = _tei_scores.falling(scores)

    def some(start: int, stop: int) -> bytes:
        rows: list[dict[str, Any]] = []
        for place in order[start:stop]:
            text = {} if texts is None else {"text": texts[place]}
            rows.append({"index": place, **text, "score": scores[place]})
        return orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)

    return await _rows.array_of(len(order), some)
