"""/v2/embed and /v1/embed of Cohere: vectors in as many types of numbers as are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from shoal.errors import EmptyInput, InvalidValue, WrongType
from shoal.http.images import Pictures
from shoal.http.json.fields import Fields
from shoal.http.request import JSON, Body, Options, Reply, Request
from shoal.surfaces.cohere import wire
from shoal.surfaces.shared import (
    batch_headers,
    default_models,
    input_parsing,
    input_types,
    ranking,
    truncation,
    vector_encoding,
)
from shoal.surfaces.shared.quantization import Precision, quantized
from shoal.surfaces.shared.task_runs import embed_inputs
from shoal.types import Embed, Embedded

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard

_LISTS = ("texts", "images", "embedding_types")
"""Also the last one, which nobody fills: a body full of it costs no more."""

MOST_TYPES = 64
_DEFAULT: tuple[wire.EmbeddingType, ...] = ("float",)


class CohereEmbed:
    """`second` answers /v2/embed, `first` its older form."""

    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._limit = options.max_inputs
        self._pictures = options.pictures or Pictures()
        self._first = Fields(wire.CohereEmbedV1Request, "cohere", _LISTS, self._limit)
        self._second = Fields(wire.CohereEmbedRequest, "cohere", (*_LISTS, "inputs"), self._limit)

    async def first(self, request: Request) -> Reply:
        asked = await self._first(request.body)
        _check_types(asked.embedding_types)
        done = await self._run(request, asked, _given(asked, None, self._limit))
        if asked.embedding_types:
            return await _reply(request, done, asked.embedding_types, "1")
        return await _floats(request, done)

    async def second(self, request: Request) -> Reply:
        asked = await self._second(request.body)
        _check_types(asked.embedding_types)
        given = _given(asked, asked.inputs, self._limit)
        done = await self._run(request, asked, given, asked.output_dimension, asked.max_tokens)
        return await _reply(request, done, asked.embedding_types or _DEFAULT, "2")

    async def _run(
        self,
        request: Request,
        asked: wire.CohereEmbedV1Request,
        given: list[input_parsing.Given],
        dimensions: int | None = None,
        max_tokens: int | None = None,
    ) -> _Done:
        card = await default_models.find_default(self._gateway, request, asked.model, "embed")
        role = _role(asked.input_type, card)
        whole = truncation.to_model_length(card, max_tokens, "max_tokens")
        truncate, direction = truncation.truncation(whole if asked.truncate is None else asked.truncate)
        input_parsing.check_takes(self._gateway, card.name, given)
        task = Embed(
            model=card.name,
            inputs=(),
            prompt_name=role.prompt_name,
            input_type=role.input_type,
            truncate=truncate,
            truncation_direction=direction,
            dimensions=dimensions,
        )
        result, tokens = await embed_inputs(self._gateway, self._pictures, request, task, given)
        texts = [each for each in given if isinstance(each, str)]
        return _Done(result, texts, tokens, len(given) - len(texts))


class _Done(NamedTuple):
    """`texts`: those among the inputs; `tokens`: what was read of them; `images`: how many pictures there were."""

    result: Embedded
    texts: list[str]
    tokens: int
    images: int


def _role(input_type: str | None, card: ModelCard) -> input_types.Role:
    return input_types.Role() if input_type in (None, "image") else input_types.purpose(input_type, card)


def _check_types(types: Sequence[wire.EmbeddingType] | None) -> None:
    """Raises InvalidValue for more of them than anybody means: of a large body not all were read."""
    if types is not None and len(types) > MOST_TYPES:
        raise InvalidValue("'embedding_types' names a type many times; name each once.", param="embedding_types")


def _given(
    asked: wire.CohereEmbedV1Request, inputs: list[wire.ContentInput] | None, limit: int
) -> list[input_parsing.Given]:
    """Raises WrongType for nothing at all, InvalidValue for two forms or several parts in one input, EmptyInput and
    TooManyInputs. An empty list of images is as if it were not there."""
    forms: dict[str, Sequence[Any] | None] = {"texts": asked.texts, "inputs": inputs, "images": asked.images or None}
    sent = {name: each for name, each in forms.items() if each is not None}
    if not sent:
        raise WrongType("Missing required field 'texts' (or 'inputs', or 'images').", param="texts")
    if len(sent) > 1:
        names = " and ".join(f"'{name}'" for name in sent)
        raise InvalidValue(f"Both {names} are there; send one of them.", param=list(sent)[1])
    ((name, each),) = sent.items()
    if not each:
        raise EmptyInput(f"'{name}' is an empty list; send at least one text.", param=name)
    input_parsing.check_count(each, name, limit)
    if name == "images":
        return [input_parsing.Picture(link, f"images[{at}]") for at, link in enumerate(each)]
    if asked.input_type == "image" and name == "texts":
        raise InvalidValue("'input_type' is image, and these are texts: send another one.", param="input_type")
    found = list(each) if name == "texts" else [_content(one, at) for at, one in enumerate(each)]
    if "" in found:
        raise EmptyInput(f"'{name}[{found.index('')}]' is empty; leave it out or send a text.", param=name)
    return found


def _content(given: wire.ContentInput, at: int) -> str | input_parsing.Picture:
    """The one text or picture of an input. Raises InvalidValue for several parts, which a model would have to fuse."""
    place = f"inputs[{at}].content"
    if len(given.content) != 1:
        raise InvalidValue(
            f"'{place}' has {len(given.content)} parts; send one text or one picture an input, since no model here "
            "joins several to one vector.",
            param="inputs",
        )
    return input_parsing.part(given.content[0], f"{place}[0]")


async def _floats(request: Request, done: _Done) -> Reply:
    head = ranking.opened({"id": request.id}, "embeddings")
    vectors = vector_encoding.contiguous(done.result.vectors)
    floats = await vector_encoding.joined(vectors, lambda _, row: vector_encoding.numbers(row), b"[", b"]")
    return await _with_texts(request, done, ranking.between(head, floats, b""), ("embeddings_floats", "1"))


async def _reply(request: Request, done: _Done, types: Sequence[wire.EmbeddingType], version: str) -> Reply:
    """Each type once, whatever number of times it was named."""
    pieces = [ranking.opened({"id": request.id}, "embeddings") + b"{"]
    vectors = vector_encoding.contiguous(done.result.vectors)
    for number, kind in enumerate(dict.fromkeys(types)):
        name = b'%b"%b":[' % (b"," if number else b"", kind.encode())
        written = await vector_encoding.joined(vectors, _writer(kind), name, b"]")
        pieces += [written] if isinstance(written, bytes) else written
    return await _with_texts(request, done, [*pieces, b"}"], ("embeddings_by_type", version))


def _writer(kind: wire.EmbeddingType) -> vector_encoding.RowEncoder:
    if kind == "base64":
        return lambda index, row: b'"%b"' % vector_encoding.base64(row)
    precision: Precision = kind
    return lambda index, row: vector_encoding.numbers(quantized(row, precision))


async def _with_texts(request: Request, done: _Done, body: Body, said: tuple[str, str]) -> Reply:
    """`said`: the type of the reply, and the version of the API."""
    assert isinstance(body, bytes | list)
    texts = done.texts
    again = await vector_encoding.array_of(len(texts), lambda start, stop: orjson.dumps(texts[start:stop]))
    billed = {"input_tokens": done.tokens} if texts else {}
    meta = {
        "api_version": {"version": said[1]},
        "billed_units": {**billed, "images": done.images} if done.images else billed,
        "tokens": {"input_tokens": done.tokens},
    }
    tail = ranking.closed({"meta": meta, "response_type": said[0]})
    start = [body] if isinstance(body, bytes) else body
    whole: Body = [*start, b',"texts":', *([again] if isinstance(again, bytes) else again), tail]
    return Reply(200, [JSON, *batch_headers.batch_headers(request, done.result)], whole)
