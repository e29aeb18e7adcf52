"""The surface of text-embeddings-inference: /embed, the tokenizer, and the model's card."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
import orjson

from shoal._version import __version__
from shoal.core.protocols import ModelFacts, Operation
from shoal.errors import EmptyInput, InvalidValue, ShoalError, TooManyInputs, Unauthorized, WrongType
from shoal.surfaces import _facts, _rows, _status, _wire
from shoal.surfaces._request import JSON, Headers, Options, Reply, Request
from shoal.types import Context, Direction, Embed, Embedded, TextItem

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard

_ENCODE = msgspec.json.Encoder()
_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_ERRORS: dict[int, Any] = dict.fromkeys((400, 422, 424, 429, 500, 503, 504), _wire.TeiError)
_UNREADABLE = "What cannot be read at all is refused as plain text (400, 413, 415, 422), as in the original."
_TIMES = {
    "x-compute-type": "Backend and precision that computed it.",
    "x-compute-time": "Milliseconds in all.",
    "x-compute-characters": "Characters of the texts.",
    "x-compute-tokens": "Tokens that the model read.",
    "x-total-time": "Milliseconds in all.",
    "x-tokenization-time": "Milliseconds of tokenising.",
    "x-queue-time": "Milliseconds of waiting for a batch.",
    "x-inference-time": "Milliseconds of the batch.",
}


class Tei:
    """The original knows one model and no names: every route here works on the default model."""

    name = "tei"
    error = _wire.TeiError

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        embed = _Embed(gateway, self._options.max_inputs)
        codec = _Codec(gateway, self._options.max_inputs)
        info = _Info(gateway, self._options)
        return [
            *(
                Operation(
                    method="POST",
                    path=path,
                    endpoint=embed,
                    summary="Embed texts",
                    request=_wire.TeiEmbedRequest,
                    response=list[list[float]],
                    errors=_ERRORS,
                    headers={**_facts.DOCUMENTED, **_TIMES},
                    example={"inputs": ["What is Deep Learning?"]},
                    description=_UNREADABLE,
                )
                for path in ("/embed", "/")  # clients that are given nothing but the server's address post to /
            ),
            Operation(
                method="POST",
                path="/tokenize",
                endpoint=codec.tokenize,
                summary="Show the tokens of texts",
                request=_wire.TeiTokenizeRequest,
                response=list[list[_wire.TeiToken]],
                errors=_ERRORS,
                example={"inputs": "What is Deep Learning?"},
                description=_UNREADABLE,
            ),
            Operation(
                method="POST",
                path="/decode",
                endpoint=codec.decode,
                summary="Turn token ids into texts",
                request=_wire.TeiDecodeRequest,
                response=list[str],
                errors=_ERRORS,
                example={"ids": [101, 2023, 102]},
                description=_UNREADABLE,
            ),
            Operation(
                method="GET",
                path="/info",
                endpoint=info,
                summary="Describe the default model",
                response=_wire.TeiInfo,
                errors={424: _wire.TeiError, 503: _wire.TeiError},
            ),
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        status, error_type = _status.row(error).tei
        headers = _status.headers(error, status)
        if isinstance(error, Unauthorized):
            return status, headers, b""
        if error_type is None:
            return status, {"content-type": "text/plain; charset=utf-8", **headers}, error.message.encode()
        body = orjson.dumps({"error": error.message, "error_type": error_type})
        return status, {"content-type": "application/json", **headers}, body


class _Embed:
    def __init__(self, gateway: Gateway, max_inputs: int) -> None:
        self._gateway = gateway
        self._max_inputs = max_inputs
        self._decode = _wire.Decoder(_wire.TeiEmbedRequest, "tei", "inputs", max_inputs)

    async def __call__(self, request: Request) -> Reply:
        asked = await self._decode.in_turns(request.body)
        if asked.dimensions == 0:
            raise InvalidValue("`dimensions` must be at least 1.", param="dimensions")
        inputs = _inputs(asked.inputs, self._max_inputs)
        card = self._gateway.model("")
        request.model, request.items = card.name, len(inputs)
        direction = (asked.truncation_direction or "right").lower()
        task = Embed(
            model=card.name,
            inputs=inputs,
            prompt_name=asked.prompt_name,
            truncate=asked.truncate,
            truncation_direction=cast(Direction, direction),
            normalize=asked.normalize is not False,
            dimensions=asked.dimensions,
        )
        result = await self._gateway.run(task, request.context())
        request.result = result
        vectors = _rows.contiguous(result.vectors)
        body = await _rows.array_of(len(vectors), lambda start, stop: _rows.numbers(vectors[start:stop]))
        headers = [JSON, *_facts.batch_headers(request, result), *_times(request, card, inputs, result)]
        return Reply(200, headers, body)


def _inputs(given: str | list[Any], limit: int) -> list[TextItem]:
    """Texts and lists of ids, in any mixture. One bare list of ids is one input."""
    items: list[Any] = [given] if isinstance(given, str) else given
    if not items:
        raise EmptyInput("`inputs` is empty; send at least one text.", param="inputs")
    kinds = set(map(type, items))
    if int in kinds:
        if len(kinds) > 1:
            raise WrongType("'inputs' mixes bare token ids with other inputs; put them into a list.", param="inputs")
        items = [items]
    _check_count(len(items), limit)
    if not all(items):
        raise EmptyInput("`inputs` holds an empty text; leave it out.", param="inputs")
    return items


def _check_count(count: int, limit: int) -> None:
    if count > limit:
        raise TooManyInputs(f"These are more than the {limit} inputs that one request may hold; split it.")


def _times(request: Request, card: ModelCard, inputs: Sequence[TextItem], result: Embedded) -> Headers:
    """The original's headers: whole milliseconds."""
    facts = result.facts
    total = b"%d" % ((time.monotonic() - request.started) * 1000)
    kind = f"{card.facts.backend}+{card.facts.precision}" if card.facts is not None else "unknown"
    return [
        (b"x-compute-type", kind.encode()),
        (b"x-compute-time", total),
        (b"x-compute-characters", b"%d" % sum([len(text) for text in inputs if isinstance(text, str)])),
        (b"x-compute-tokens", b"%d" % sum(result.tokens)),
        (b"x-total-time", total),
        (b"x-tokenization-time", b"%d" % facts.prepare_ms),
        (b"x-queue-time", b"%d" % facts.queue_ms),
        (b"x-inference-time", b"%d" % facts.infer_ms),
    ]


class _Codec:
    def __init__(self, gateway: Gateway, max_inputs: int) -> None:
        self._gateway = gateway
        self._max_inputs = max_inputs
        self._decode_tokenize = _wire.Decoder(_wire.TeiTokenizeRequest, "tei", "inputs", max_inputs)
        self._decode_decode = _wire.Decoder(_wire.TeiDecodeRequest, "tei", "ids", max_inputs)

    async def tokenize(self, request: Request) -> Reply:
        asked = await self._decode_tokenize.in_turns(request.body)
        texts = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
        if not texts:
            raise EmptyInput("`inputs` is empty; send at least one text.", param="inputs")
        _check_count(len(texts), self._max_inputs)
        special = asked.add_special_tokens is not False
        async with self._gateway.using_codec("", _waiting(request)) as codec:
            tokens = await codec.tokenize(texts, add_special_tokens=special, prompt_name=asked.prompt_name)
        body = await _rows.arrays_of(tokens, orjson.dumps)
        return Reply(200, [JSON], body)

    async def decode(self, request: Request) -> Reply:
        asked = await self._decode_decode.in_turns(request.body)
        if not asked.ids:
            raise EmptyInput("`ids` is empty; send at least one id.", param="ids")
        kinds = set(map(type, asked.ids))
        if len(kinds) > 1:
            raise WrongType("'ids' mixes ids and lists of ids; send one kind.", param="ids")
        ids = cast(list[list[int]], [asked.ids] if int in kinds else asked.ids)
        _check_count(len(ids), self._max_inputs)
        skip = asked.skip_special_tokens is not False
        async with self._gateway.using_codec("", _waiting(request)) as codec:
            texts = await codec.decode(ids, skip_special_tokens=skip)
        return Reply(200, [JSON], await _rows.array_of(len(texts), lambda start, stop: orjson.dumps(texts[start:stop])))


def _waiting(request: Request) -> Context:
    """For a model that has to wake first. It is no task, so what becomes of it stays the front's to count."""
    return Context(id=request.id, deadline=request.deadline, client=request.client)


class _Info:
    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._options = options

    async def __call__(self, request: Request) -> Reply:
        card = self._gateway.model("")
        if card.facts is None:
            raise card.refusal()
        return Reply(200, [JSON], _ENCODE.encode(_info(card.name, card.facts, self._options)))


def _info(name: str, facts: ModelFacts, options: Options) -> _wire.TeiInfo:
    """What a model's own table changes stands in the details of its facts; all else is as the server's settings."""
    details = facts.details
    return _wire.TeiInfo(
        model_id=facts.id or name,
        model_sha=facts.revision or None,
        model_dtype=_DTYPES.get(facts.precision, facts.precision),
        served_model_name=name,
        model_type=_wire.TeiModelType(embedding=_wire.TeiPooling(pooling=facts.pooling)),
        max_concurrent_requests=details.get("max_queue_items", options.max_queue_items),
        max_input_length=facts.max_input_tokens or 0,
        max_batch_tokens=details.get("max_batch_tokens", options.max_batch_tokens),
        max_batch_requests=details.get("max_batch_size") or options.max_batch_size,
        max_client_batch_size=options.max_inputs,
        auto_truncate=details.get("truncate", options.truncate),
        tokenization_workers=1,
        version=__version__,
        sha=None,
        docker_label=None,
    )
