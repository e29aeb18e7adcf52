"""POST /pooling of vLLM: what a model makes of texts, whatever that is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.errors import InvalidValue, ModelNotFound, ModelNotReady, Unsupported
from shoal.surfaces import _cutting, _embeddings, _matrices, _mixed, _ranking, _rows, _scores, _wire
from shoal.surfaces._request import Body, Reply, Request
from shoal.surfaces._wire_scores import PoolingRequest
from shoal.types import Array, Classify, Embed, Result, TaskKind, TextItem, TextPair, VectorKind

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard


class Pooling:
    def __init__(self, gateway: Gateway, limit: int) -> None:
        self._gateway = gateway
        self._limit = limit
        self._decode = _wire.Decoder(PoolingRequest, "scoring", "input", limit)

    async def __call__(self, request: Request) -> Reply:
        asked = await self._decode.in_turns(request.body)
        inputs = _mixed.texts_of(asked.input, self._limit)
        card = await self._card(request, asked)
        request.items = len(inputs)
        result: Result
        if asked.task == "classify" or (asked.task is None and not _embeds(card)):
            result = await self._gateway.run(_classify(asked, card, inputs), request.context())
            rows: Array = result.scores
            matrices: list[Array] = []
        else:
            result = await self._gateway.run(_embed(asked, card, inputs), request.context())
            rows, matrices = result.vectors, result.token_vectors or result.multi_vectors
            _matrices.check_matrices(matrices, "input")
        request.result = result
        base64 = asked.encoding_format == "base64"
        body = await (_of_tokens(matrices, base64=base64) if matrices else _of_rows(rows, base64=base64))
        return _scores.reply(request, "pool", card.name, body, result)

    async def _card(self, request: Request, asked: PoolingRequest) -> ModelCard:
        """By name, else the default for the task; without a task for vectors, and for scores where nothing embeds."""
        default: TaskKind = "classify" if asked.task == "classify" else "embed"
        try:
            return await _ranking.card_of(self._gateway, request, asked.model, default)
        except (ModelNotFound, ModelNotReady):
            if asked.model or asked.task is not None:
                raise
        return await _ranking.card_of(self._gateway, request, None, "classify")


def _embeds(card: ModelCard) -> bool:
    return card.facts is None or "embed" in card.facts.tasks


def _classify(asked: PoolingRequest, card: ModelCard, inputs: list[TextItem]) -> Classify:
    texts: list[str | TextPair] = [each for each in inputs if isinstance(each, str)]
    if len(texts) != len(inputs):
        raise InvalidValue("Token ids cannot be classified; send texts.", param="input")
    whole = _cutting.to_model_length(card, asked.truncate_prompt_tokens, "truncate_prompt_tokens")
    truncate, direction = _cutting.truncation(whole, asked.truncation_side)
    return Classify(
        model=card.name,
        inputs=texts,
        raw_scores=asked.use_activation is False,
        truncate=truncate,
        truncation_direction=direction,
    )


def _embed(asked: PoolingRequest, card: ModelCard, inputs: list[TextItem]) -> Embed:
    whole = _cutting.to_model_length(card, asked.truncate_prompt_tokens, "truncate_prompt_tokens")
    truncate, direction = _cutting.truncation(whole, asked.truncation_side)
    kind = _kind(asked, card)
    task = Embed(
        model=card.name,
        inputs=inputs,
        truncate=truncate,
        truncation_direction=direction,
        normalize=asked.use_activation is not False,
        dimensions=asked.dimensions,
        outputs=(kind,),
    )
    if kind == "multi":
        _embeddings.check_late(task, "use_activation")
    elif kind == "tokens" and asked.dimensions is not None:
        raise Unsupported("'dimensions' is not for vectors of tokens: leave it out.", param="dimensions")
    if kind != "dense":
        _matrices.check_inputs(card, inputs, "input")
    return task


def _kind(asked: PoolingRequest, card: ModelCard) -> VectorKind:
    if asked.task != "token_embed":
        return _embeddings.kind_of_vectors(card)
    return "multi" if card.facts is not None and "multi" in card.facts.vectors else "tokens"


async def _of_rows(rows: Array, *, base64: bool) -> Body:
    def entry(index: int, row: Array) -> bytes:
        data = b'"%b"' % _rows.base64(row) if base64 else _rows.numbers(row)
        return _head(index) + data + b"}"

    return await _rows.joined(_rows.contiguous(rows), entry, b"[", b"]")


async def _of_tokens(matrices: list[Array], *, base64: bool) -> Body:
    if not base64:
        return [b"[", *await _matrices.entries(matrices, _head), b"]"]

    def some(start: int, stop: int) -> bytes:
        made = [_head(at) + b'"%b"}' % _rows.base64(_matrices.taken(matrices, at)) for at in range(start, stop)]
        return b"[" + b",".join(made) + b"]"

    return await _rows.array_of(len(matrices), some, 8)


def _head(index: int) -> bytes:
    return b'{"index":%d,"object":"pooling","data":' % index
