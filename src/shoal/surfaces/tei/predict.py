"""/predict of text-embeddings-inference: classifies texts and pairs of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from shoal.errors import EmptyInput, WrongType
from shoal.http.json import decoder
from shoal.http.request import Options, Reply, Request
from shoal.surfaces.shared import default_models, vector_encoding
from shoal.surfaces.shared.task_runs import run_task
from shoal.surfaces.tei import replies, scoring, wire
from shoal.types import Array, Classify, TextPair

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

LABELS_PER_SLICE = 2048
"""Pairs of label and score encoded at once, in about 2 ms."""

_FORMS = (
    "expected a string, a pair of strings [string, string] or a batch of mixed strings and pairs "
    "[[string], [string, string], ...]"
)


class TeiPredict:
    """The endpoint. `["a", "b"]` is one pair; two texts are `[["a"], ["b"]]`. Only the latter get one list each."""

    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._limit = options.max_inputs
        self._decode = decoder.Decoder(wire.TeiPredictRequest, "tei", options.max_inputs)

    async def predict(self, request: Request) -> Reply:
        payload = await self._decode.decode_async(request.body)
        inputs, batch = _parse_inputs(payload.inputs)
        replies.check_count(len(inputs), self._limit)
        if not all(each if isinstance(each, str) else any(each) for each in inputs):
            raise EmptyInput(replies.EMPTY_INPUT, param="inputs")
        card = await default_models.find_model(self._gateway, request, payload.model, default_models.CLASSIFY)
        task = Classify(
            model=card.name,
            inputs=inputs,
            raw_scores=True,
            truncate=payload.truncate,
            truncation_direction=replies.parse_direction(payload.truncation_direction),
        )
        result = await run_task(self._gateway, request, task)
        scores = scoring.apply_activation(result.scores, raw=bool(payload.raw_scores))
        labels = card.facts.labels if card.facts is not None else ()
        body = await _encode(scores, labels, batch=batch)
        return Reply(200, replies.build_headers(request, card, replies.count_characters(inputs), result), body)


def _parse_inputs(inputs: str | list[str | list[str]]) -> tuple[list[str | TextPair], bool]:
    """Return the inputs, and whether they are a batch. Raises WrongType for neither text, pair nor batch."""
    if isinstance(inputs, str):
        return [inputs], False
    if not inputs or any(isinstance(each, str) for each in inputs):
        texts = [each for each in inputs if isinstance(each, str)]
        if len(texts) != len(inputs):
            raise WrongType(f"inputs: texts and lists of texts are mixed, {_FORMS}", param="inputs")
        return [_to_item(texts)], False
    return [_to_item(each) for each in inputs if isinstance(each, list)], True


def _to_item(texts: list[str]) -> str | TextPair:
    match texts:
        case [text]:
            return text
        case [first, second]:
            return first, second
        case _:
            raise WrongType(f"inputs: invalid length {len(texts)}, {_FORMS}", param="inputs")


async def _encode(scores: Array, labels: tuple[str, ...], *, batch: bool) -> bytes | list[bytes]:
    if not batch:
        return _encode_slice(scores, labels)[1:-1]
    step = max(1, min(vector_encoding.SLICE, LABELS_PER_SLICE // max(1, len(labels))))
    return await vector_encoding.encode_array(
        len(scores), lambda start, stop: _encode_slice(scores[start:stop], labels), step
    )


def _encode_slice(scores: Array, labels: tuple[str, ...]) -> bytes:
    rows = [[{"score": row[at], "label": labels[at]} for at in scoring.sort_descending(row)] for row in scores]
    return orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)
