"""/v2/embed and /v1/embed of Cohere, which return vectors in one or more types of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from shoal.errors import EmptyInput, InvalidValue, WrongType
from shoal.http.images import ImageReader
from shoal.http.json import decoder
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
from shoal.surfaces.shared.quantization import Precision, quantize
from shoal.surfaces.shared.task_runs import embed_inputs
from shoal.types import Embed, Embedded

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard

MAX_TYPES = 64
_DEFAULT: tuple[wire.EmbeddingType, ...] = ("float",)


class CohereEmbed:
    """The endpoints. `embed_v2` serves /v2/embed, `embed_v1` the older /v1/embed."""

    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._limit = options.max_inputs
        self._image_reader = options.image_reader or ImageReader()
        self._first = decoder.Decoder(wire.CohereEmbedV1Request, "cohere", self._limit)
        self._second = decoder.Decoder(wire.CohereEmbedRequest, "cohere", self._limit)

    async def embed_v1(self, request: Request) -> Reply:
        payload = await self._first.decode_async(request.body)
        _check_types(payload.embedding_types)
        done = await self._run(request, payload, _parse_inputs(payload, None, self._limit))
        if payload.embedding_types:
            return await _reply_by_type(request, done, payload.embedding_types, "1")
        return await _reply_floats(request, done)

    async def embed_v2(self, request: Request) -> Reply:
        payload = await self._second.decode_async(request.body)
        _check_types(payload.embedding_types)
        inputs = _parse_inputs(payload, payload.inputs, self._limit)
        done = await self._run(request, payload, inputs, payload.output_dimension, payload.max_tokens)
        return await _reply_by_type(request, done, payload.embedding_types or _DEFAULT, "2")

    async def _run(
        self,
        request: Request,
        payload: wire.CohereEmbedV1Request,
        inputs: list[input_parsing.Input],
        dimensions: int | None = None,
        max_tokens: int | None = None,
    ) -> _EmbedResult:
        card = await default_models.find_default_model(self._gateway, request, payload.model, "embed")
        role = _resolve_role(payload.input_type, card)
        whole = truncation.check_token_limit(card, max_tokens, "max_tokens")
        truncate, direction = truncation.parse_truncation(whole if payload.truncate is None else payload.truncate)
        input_parsing.check_modalities(self._gateway, card.name, inputs)
        task = Embed(
            model=card.name,
            inputs=(),
            prompt_name=role.prompt_name,
            input_type=role.input_type,
            truncate=truncate,
            truncation_direction=direction,
            dimensions=dimensions,
        )
        result, tokens = await embed_inputs(self._gateway, self._image_reader, request, task, inputs)
        texts = [each for each in inputs if isinstance(each, str)]
        return _EmbedResult(result, texts, tokens, len(inputs) - len(texts))


class _EmbedResult(NamedTuple):
    """The result, the `texts` among the inputs, the `tokens` read of them, and the number of `images`."""

    result: Embedded
    texts: list[str]
    tokens: int
    images: int


def _resolve_role(input_type: str | None, card: ModelCard) -> input_types.Role:
    if input_type is None or input_type == "image":
        return input_types.Role()
    return input_types.resolve_purpose(input_type, card, "input_type")


def _check_types(types: Sequence[wire.EmbeddingType] | None) -> None:
    """Raise InvalidValue for more than `MAX_TYPES` types."""
    if types is not None and len(types) > MAX_TYPES:
        raise InvalidValue("'embedding_types' repeats a type; name each type once.", param="embedding_types")


def _parse_inputs(
    payload: wire.CohereEmbedV1Request, inputs: list[wire.ContentInput] | None, limit: int
) -> list[input_parsing.Input]:
    """Parse `texts`, `inputs` or `images`. An empty list of images counts as absent.

    Raises WrongType if all are missing, InvalidValue for two of them or several parts in one input, EmptyInput and
    TooManyInputs.
    """
    forms: dict[str, Sequence[Any] | None] = {
        "texts": payload.texts,
        "inputs": inputs,
        "images": payload.images or None,
    }
    sent = {name: each for name, each in forms.items() if each is not None}
    if not sent:
        raise WrongType("Missing required field 'texts' (or 'inputs', or 'images').", param="texts")
    if len(sent) > 1:
        names = " and ".join(f"'{name}'" for name in sent)
        raise InvalidValue(f"{names} are mutually exclusive; send one of them.", param=list(sent)[1])
    ((name, each),) = sent.items()
    if not each:
        raise EmptyInput(f"'{name}' is an empty list; send at least one text.", param=name)
    input_parsing.check_count(each, name, limit)
    if name == "images":
        return [input_parsing.ImageReference(link, f"images[{at}]") for at, link in enumerate(each)]
    if payload.input_type == "image" and name == "texts":
        raise InvalidValue("'input_type' is image, but the inputs are texts: send another type.", param="input_type")
    found = list(each) if name == "texts" else [_parse_content(one, at) for at, one in enumerate(each)]
    if "" in found:
        raise EmptyInput(f"'{name}[{found.index('')}]' is empty; omit it or send a text.", param=name)
    return found


def _parse_content(item: wire.ContentInput, at: int) -> str | input_parsing.ImageReference:
    """Parse the only text or image of an input. Raises InvalidValue for several parts: no model here joins them."""
    place = f"inputs[{at}].content"
    if len(item.content) != 1:
        raise InvalidValue(
            f"'{place}' has {len(item.content)} parts; send one text or image per input: no model here combines "
            "several into one vector.",
            param="inputs",
        )
    return input_parsing.parse_part(item.content[0], f"{place}[0]")


async def _reply_floats(request: Request, done: _EmbedResult) -> Reply:
    head = ranking.open_object({"id": request.id}, "embeddings")
    vectors = vector_encoding.to_contiguous(done.result.vectors)
    floats = await vector_encoding.encode_rows(vectors, lambda _, row: vector_encoding.encode_numbers(row), b"[", b"]")
    return await _finish_reply(request, done, ranking.wrap_body(head, floats, b""), ("embeddings_floats", "1"))


async def _reply_by_type(
    request: Request, done: _EmbedResult, types: Sequence[wire.EmbeddingType], version: str
) -> Reply:
    """Encode the vectors in each requested type. Repeated types are written once."""
    pieces = [ranking.open_object({"id": request.id}, "embeddings") + b"{"]
    vectors = vector_encoding.to_contiguous(done.result.vectors)
    for number, kind in enumerate(dict.fromkeys(types)):
        name = b'%b"%b":[' % (b"," if number else b"", kind.encode())
        written = await vector_encoding.encode_rows(vectors, _row_encoder(kind), name, b"]")
        pieces += [written] if isinstance(written, bytes) else written
    return await _finish_reply(request, done, [*pieces, b"}"], ("embeddings_by_type", version))


def _row_encoder(kind: wire.EmbeddingType) -> vector_encoding.RowEncoder:
    if kind == "base64":
        return lambda index, row: b'"%b"' % vector_encoding.encode_base64(row)
    precision: Precision = kind
    return lambda index, row: vector_encoding.encode_numbers(quantize(row, precision))


async def _finish_reply(request: Request, done: _EmbedResult, body: Body, type_and_version: tuple[str, str]) -> Reply:
    """Add texts and metadata to the body. `type_and_version` is the type of the reply, and the version of the API."""
    assert isinstance(body, bytes | list)
    texts = done.texts
    again = await vector_encoding.encode_array(len(texts), lambda start, stop: orjson.dumps(texts[start:stop]))
    billed = {"input_tokens": done.tokens} if texts else {}
    meta = {
        "api_version": {"version": type_and_version[1]},
        "billed_units": {**billed, "images": done.images} if done.images else billed,
        "tokens": {"input_tokens": done.tokens},
    }
    tail = ranking.close_object({"meta": meta, "response_type": type_and_version[0]})
    start = [body] if isinstance(body, bytes) else body
    whole: Body = [*start, b',"texts":', *([again] if isinstance(again, bytes) else again), tail]
    return Reply(200, [JSON, *batch_headers.batch_headers(request, done.result)], whole)
