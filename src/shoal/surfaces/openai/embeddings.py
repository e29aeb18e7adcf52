"""POST /v1/embeddings: OpenAI's, with what NVIDIA NIM, Voyage, Jina and vLLM ask for on the same path."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Literal, cast

import msgspec
import numpy as np

from shoal.errors import InvalidValue, ModelNotFound, Unsupported
from shoal.http.images import Pictures
from shoal.http.json import decoder
from shoal.http.json.fields import Fields
from shoal.http.request import JSON, Body, Headers, Options, Reply, Request
from shoal.surfaces.openai.wire_embeddings import AnyModelRequest, EmbeddingsRequest
from shoal.surfaces.shared import (
    batch_headers,
    default_models,
    input_parsing,
    input_types,
    matrices,
    token_ids,
    truncation,
    vector_encoding,
    vector_kinds,
)
from shoal.surfaces.shared.input_parsing import Given, Picture
from shoal.surfaces.shared.quantization import Precision, quantized
from shoal.surfaces.shared.task_runs import embed_inputs
from shoal.types import Array, Embed, Embedded, VectorKind

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import ModelCard

_ENCODE = msgspec.json.Encoder()
_BINARY = b"application/octet-stream"
_WEIGHT = re.compile(rb"[01](\.[0-9]{0,3})?")
HEADERS = {
    "x-shoal-shape": "Of bytes: the number of vectors, a comma, and the numbers of each.",
    "x-shoal-dtype": "Of bytes: the type of each number as NumPy writes it: `<f4`, `>f4`, `<f2`, `>f2`, int8 or uint8.",
}
DOCUMENTED = {**batch_headers.DOCUMENTED, **token_ids.DOCUMENTED, **HEADERS}


class Embeddings:
    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._limit = options.max_inputs
        self._pictures = options.pictures or Pictures()
        many = ("input", "embedding_type", "modality", "messages")
        self._any_model = options.any_model
        self._token_ids = options.token_ids
        self.request = AnyModelRequest if options.any_model else EmbeddingsRequest
        self._decode = Fields(self.request, "openai", many, options.max_inputs)

    async def __call__(self, request: Request) -> Reply:
        asked = await self._decode(request.body)
        if not (asked.model or self._any_model):
            raise InvalidValue("'model' is empty; name a model of GET /v1/models.", param="model")
        _check_known(asked)
        given = _given(asked, self._limit)
        name, suffix = input_types.without_suffix(self._gateway, asked.model or "")
        card = await default_models.awake(self._gateway, request, self._named(name))
        given, told = await token_ids.settled(given, name, card, self._token_ids)
        written = _Form(asked, request)
        kind = vector_kinds.main_kind(card)
        input_parsing.check_takes(self._gateway, card.name, given)
        task = _task(asked, card, suffix, kind)
        if kind == "multi":
            written.check_numbers()
            vector_kinds.check_late_interaction(task)
            matrices.check_inputs(card, [each for each in given if not isinstance(each, Picture)], "input")
        if written.whole and not task.normalize:
            raise InvalidValue(
                "int8 and uint8 are made of vectors of length one; leave 'normalize' out.", param="normalize"
            )
        result, tokens = await embed_inputs(
            self._gateway, self._pictures, request, task, given, asked.image_download_headers
        )
        matrices.check_matrices(result.multi_vectors, "input")
        headers, body = await written.encoded(result, card.name, tokens)
        return Reply(200, [*headers, *batch_headers.batch_headers(request, result), *told], body)

    def _named(self, name: str) -> ModelCard:
        """By name. With `any_model` a name that nobody has means the default, but not one that a server may have which
        is not there yet: its vectors would be of another space."""
        try:
            return self._gateway.model("" if name == default_models.NOT_SPECIFIED else name)
        except ModelNotFound:
            if not self._any_model:
                raise
            return self._gateway.model("")


def _check_known(asked: EmbeddingsRequest) -> None:
    if asked.late_chunking:
        raise Unsupported(
            "'late_chunking' is not supported: leave it out, and embed each chunk by itself.", param="late_chunking"
        )
    if asked.dimensions == 0 and asked.modality is None:
        raise decoder.FieldError(
            "'dimensions' is invalid: expected `int` >= 1.", at="dimensions", reason="Expected `int` >= 1"
        )
    if asked.add_special_tokens is False:
        raise Unsupported(
            "'add_special_tokens' cannot be false for texts: send token ids, which are used as they are.",
            param="add_special_tokens",
        )


def _given(asked: EmbeddingsRequest, limit: int) -> list[Given]:
    """Raises WrongType for no input at all, InvalidValue for two, and as `input_parsing` does."""
    if asked.messages is None:
        if asked.input is None:
            raise decoder.FieldError(
                "Missing required field 'input'.", at="input", reason="Field required", missing=True
            )
        return input_parsing.given(asked.input, limit, asked.modality)
    if asked.input is not None:
        raise InvalidValue("Both 'input' and 'messages' are there; send one of them.", param="messages")
    if asked.modality is not None:
        raise InvalidValue("'modality' is of 'input': the parts of 'messages' say what they are.", param="modality")
    return input_parsing.of_messages(asked.messages)


def _task(asked: EmbeddingsRequest, card: ModelCard, suffix: str | None, kind: VectorKind) -> Embed:
    """The task without its inputs. `suffix`: the role that the model's name ends in."""
    whole = truncation.to_model_length(card, asked.truncate_prompt_tokens, "truncate_prompt_tokens")
    wanted = truncation.whether(asked.truncate, asked.truncation)
    side = truncation.agreed(truncation_side=asked.truncation_side, truncation_direction=asked.truncation_direction)
    truncate, direction = truncation.truncation(wanted, cast(Literal["left", "right"] | None, side))
    purpose = input_types.purpose(asked.task, card) if asked.task is not None else input_types.Role()
    role = input_types.role(asked.input_type) if asked.input_type is not None else suffix
    normalize = truncation.agreed(
        normalize=asked.normalize, normalized=asked.normalized, use_activation=asked.use_activation
    )
    # Infinity's client always sends `modality`, and 0 for vectors of full length.
    dimensions = truncation.agreed(dimensions=asked.dimensions or None, output_dimension=asked.output_dimension)
    return Embed(
        model=card.name,
        inputs=(),
        prompt_name=asked.prompt_name if asked.prompt_name is not None else purpose.prompt_name,
        input_type=role if role is not None else purpose.input_type,
        truncate=whole if truncate is None else truncate,
        truncation_direction=direction,
        normalize=normalize is not False,
        dimensions=cast(int | None, dimensions),
        outputs=(kind,),
    )


class _Form:
    """How the vectors are to be written: which numbers, and as JSON, as base64 or as nothing but bytes."""

    def __init__(self, asked: EmbeddingsRequest, request: Request) -> None:
        kinds = asked.embedding_type if isinstance(asked.embedding_type, list) else [asked.embedding_type]
        if len(kinds) != 1:
            raise Unsupported(
                "'embedding_type' can name one type here; POST /v2/embed takes several.", param="embedding_type"
            )
        (kind,) = kinds
        named = None if kind == "base64" else kind
        precision = truncation.agreed(output_dtype=asked.output_dtype, embedding_type=named)
        self._precision = cast(Precision, precision or "float")
        form = asked.encoding_format
        if kind == "base64" and form not in (None, "base64"):
            raise InvalidValue(
                f"'encoding_format' {form} and 'embedding_type' base64 contradict each other; send one of them.",
                param="encoding_format",
            )
        self._base64 = "base64" in (form, kind)
        self._bytes = form == "bytes_only" or (
            form is None and not self._base64 and _accepts_bytes(request.headers.get(b"accept", b""))
        )
        width = 2 if asked.embed_dtype == "float16" else 4
        self._dtype = np.dtype(f"{'>' if asked.endianness == 'big' else '<'}f{width}")
        self.whole = self._precision in ("int8", "uint8")

    def check_numbers(self) -> None:
        """Raises Unsupported where more than JSON numbers is asked of vectors that have no common length."""
        if self._precision != "float" or self._bytes:
            raise Unsupported(
                "vectors of late interaction come as JSON numbers: leave 'output_dtype' and bytes out.",
                param="model",
            )

    async def encoded(self, result: Embedded, model: str, total: int) -> tuple[Headers, Body]:
        """`total`: tokens that the model read."""
        head = b'{"object":"list","data":['
        tail = b'],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (_ENCODE.encode(model), total, total)
        if result.multi_vectors:
            # Also where base64 is asked for, as OpenAI's client does unasked: it takes what is a list as it is.
            pieces = await matrices.entries(result.multi_vectors, _head)
            return [JSON], [head, *pieces, tail]
        vectors = vector_encoding.contiguous(result.vectors)
        if self._bytes:
            return await self._raw(vectors)
        write = self._base64_entry if self._base64 else self._entry
        return [JSON], await vector_encoding.joined(vectors, write, head, tail)

    def _entry(self, index: int, row: Array) -> bytes:
        return _head(index) + vector_encoding.numbers(quantized(row, self._precision)) + b"}"

    def _base64_entry(self, index: int, row: Array) -> bytes:
        return _head(index) + b'"' + vector_encoding.base64(self._packed(row)) + b'"}'

    def _packed(self, rows: Array) -> Array:
        found = quantized(rows, self._precision)
        return found.astype(self._dtype, copy=False) if self._precision == "float" else found

    async def _raw(self, vectors: Array) -> tuple[Headers, Body]:
        pieces: list[bytes] = []
        shape = self._packed(vectors[:1])
        for start in range(0, len(vectors), vector_encoding.SLICE):
            await asyncio.sleep(0)
            pieces.append(self._packed(vectors[start : start + vector_encoding.SLICE]).tobytes())
        return [
            (b"content-type", _BINARY),
            (b"x-shoal-shape", b"%d,%d" % (len(vectors), shape.shape[1])),
            (b"x-shoal-dtype", (shape.dtype.str if self._precision == "float" else shape.dtype.name).encode()),
        ], pieces


def _accepts_bytes(accept: bytes) -> bool:
    """Whether the header names bytes, and names JSON no higher (RFC 9110, section 12.5.1)."""
    weights = {b"application/json": 0.0, _BINARY: 0.0}
    for each in accept.lower().split(b","):
        name, *more = (part.strip() for part in each.split(b";"))
        if name in weights:
            weights[name] = next((_weight(part[2:]) for part in more if part.startswith(b"q=")), 1.0)
    return weights[_BINARY] > 0 and weights[_BINARY] >= weights[b"application/json"]


def _weight(text: bytes) -> float:
    """0 for what is no number of the header's form."""
    return float(text) if _WEIGHT.fullmatch(text) else 0.0


def _head(index: int) -> bytes:
    return b'{"object":"embedding","index":%d,"embedding":' % index
