"""/v2/embed and /v1/embed of Cohere: vectors in as many types of numbers as are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import orjson

from shoal.errors import EmptyInput, InvalidValue, TooManyInputs, Unsupported, WrongType
from shoal.surfaces import _cutting, _facts, _ranking, _roles, _rows
from shoal.surfaces import _wire_cohere as wire
from shoal.surfaces._fields import Fields
from shoal.surfaces._quantize import Precision, quantized
from shoal.surfaces._request import JSON, Body, Reply, Request
from shoal.types import Embed, Embedded, TextItem

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard

_SHORT = ("images", "embedding_types")
"""Lists that nobody fills: read like long ones, so that a body full of them costs no more."""

MOST_TYPES = 64
_DEFAULT: tuple[wire.EmbeddingType, ...] = ("float",)
_NO_IMAGES = "images are not supported: send 'texts'; no model served here embeds images."


class CohereEmbed:
    """`second` answers /v2/embed, `first` its older form."""

    def __init__(self, gateway: Gateway, limit: int) -> None:
        self._gateway = gateway
        self._limit = limit
        self._first = Fields(wire.CohereEmbedV1Request, "cohere", ("texts", *_SHORT), limit)
        self._second = Fields(wire.CohereEmbedRequest, "cohere", ("texts", "inputs", *_SHORT), limit)

    async def first(self, request: Request) -> Reply:
        asked = await self._first(request.body)
        _check_types(asked.embedding_types)
        texts = _texts(asked.texts, None, asked.images, self._limit)
        result = await self._run(request, asked, texts)
        if asked.embedding_types:
            return await _reply(request, result, texts, asked.embedding_types, "1")
        return await _floats(request, result, texts)

    async def second(self, request: Request) -> Reply:
        asked = await self._second(request.body)
        _check_types(asked.embedding_types)
        texts = _texts(asked.texts, asked.inputs, asked.images, self._limit)
        result = await self._run(request, asked, texts, asked.output_dimension, asked.max_tokens)
        return await _reply(request, result, texts, asked.embedding_types or _DEFAULT, "2")

    async def _run(
        self,
        request: Request,
        asked: wire.CohereEmbedV1Request,
        texts: list[str],
        dimensions: int | None = None,
        max_tokens: int | None = None,
    ) -> Embedded:
        if asked.input_type == "image":
            raise Unsupported(_NO_IMAGES, param="input_type")
        card = await _ranking.card_of(self._gateway, request, asked.model, "embed")
        role = _role(asked.input_type, card)
        whole = _cutting.to_model_length(card, max_tokens, "max_tokens")
        truncate, direction = _cutting.truncation(whole if asked.truncate is None else asked.truncate)
        inputs: list[TextItem] = [*texts]
        task = Embed(
            model=card.name,
            inputs=inputs,
            prompt_name=role.prompt_name,
            input_type=role.input_type,
            truncate=truncate,
            truncation_direction=direction,
            dimensions=dimensions,
        )
        request.items = len(inputs)
        result = await self._gateway.run(task, request.context())
        request.result = result
        return result


def _role(input_type: str | None, card: ModelCard) -> _roles.Role:
    return _roles.Role() if input_type is None else _roles.purpose(input_type, card)


def _check_types(types: Sequence[wire.EmbeddingType] | None) -> None:
    """Raises InvalidValue for more of them than anybody means: of a large body not all were read."""
    if types is not None and len(types) > MOST_TYPES:
        raise InvalidValue("'embedding_types' names a type many times; name each once.", param="embedding_types")


def _texts(
    texts: list[str] | None, inputs: list[wire.ContentInput] | None, images: list[str] | None, limit: int
) -> list[str]:
    """Raises Unsupported for images, WrongType for nothing at all, InvalidValue for two forms, EmptyInput and
    TooManyInputs."""
    if images:
        raise Unsupported(_NO_IMAGES, param="images")
    if texts is None and inputs is None:
        raise WrongType("Missing required field 'texts' (or 'inputs').", param="texts")
    if texts is not None and inputs is not None:
        raise InvalidValue("Both 'texts' and 'inputs' are there; send one of them.", param="inputs")
    name = "inputs" if texts is None else "texts"
    count = len(texts or inputs or ())
    if not count:
        raise EmptyInput(f"'{name}' is an empty list; send at least one text.", param=name)
    if count > limit:
        raise TooManyInputs(f"'{name}' holds more than the {limit} entries of one request; split it.", param=name)
    found = texts if texts is not None else [_content(each, at) for at, each in enumerate(inputs or ())]
    if not all(found):
        raise EmptyInput(f"'{name}[{found.index('')}]' is empty; leave it out or send a text.", param=name)
    return found


def _content(given: wire.ContentInput, at: int) -> str:
    """The one text of an input. Raises Unsupported for an image or several parts, which a model would have to fuse."""
    place = f"inputs[{at}].content"
    if any(part.type == "image_url" for part in given.content):
        raise Unsupported(f"'{place}': {_NO_IMAGES}", param="inputs")
    if len(given.content) != 1:
        raise Unsupported(f"'{place}' has {len(given.content)} parts; send one text an input.", param="inputs")
    return given.content[0].text or ""


async def _floats(request: Request, result: Embedded, texts: list[str]) -> Reply:
    head = _ranking.opened({"id": request.id}, "embeddings")
    vectors = _rows.contiguous(result.vectors)
    floats = await _rows.joined(vectors, lambda _, row: _rows.numbers(row), b"[", b"]")
    return await _with_texts(request, result, texts, _ranking.between(head, floats, b""), ("embeddings_floats", "1"))


async def _reply(
    request: Request, result: Embedded, texts: list[str], types: Sequence[wire.EmbeddingType], version: str
) -> Reply:
    """Each type once, whatever number of times it was named."""
    pieces = [_ranking.opened({"id": request.id}, "embeddings") + b"{"]
    vectors = _rows.contiguous(result.vectors)
    for number, kind in enumerate(dict.fromkeys(types)):
        name = b'%b"%b":[' % (b"," if number else b"", kind.encode())
        written = await _rows.joined(vectors, _writer(kind), name, b"]")
        pieces += [written] if isinstance(written, bytes) else written
    return await _with_texts(request, result, texts, [*pieces, b"}"], ("embeddings_by_type", version))


def _writer(kind: wire.EmbeddingType) -> _rows.RowEncoder:
    if kind == "base64":
        return lambda index, row: b'"%b"' % _rows.base64(row)
    precision: Precision = kind
    return lambda index, row: _rows.numbers(quantized(row, precision))


async def _with_texts(request: Request, result: Embedded, texts: list[str], body: Body, said: tuple[str, str]) -> Reply:
    """`said`: the type of the reply, and the version of the API."""
    assert isinstance(body, bytes | list)
    again = await _rows.array_of(len(texts), lambda start, stop: orjson.dumps(texts[start:stop]))
    total = sum(result.tokens)
    meta = {
        "api_version": {"version": said[1]},
        "billed_units": {"input_tokens": total},
        "tokens": {"input_tokens": total},
    }
    tail = _ranking.closed({"meta": meta, "response_type": said[0]})
    start = [body] if isinstance(body, bytes) else body
    whole: Body = [*start, b',"texts":', *([again] if isinstance(again, bytes) else again), tail]
    return Reply(200, [JSON, *_facts.batch_headers(request, result)], whole)
