"""POST /v1/embeddings: OpenAI's, with what NVIDIA NIM, Voyage, Jina and vLLM ask for on the same path."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np

from shoal.errors import InvalidValue, ModelNotFound, Unsupported
from shoal.surfaces import _cutting, _facts, _matrices, _mixed, _roles, _rows, _tei_models, _wire
from shoal.surfaces._fields import Fields
from shoal.surfaces._mixed import Given, Picture
from shoal.surfaces._pictures import Pictures
from shoal.surfaces._quantize import Precision, quantized
from shoal.surfaces._request import JSON, Body, Headers, Options, Reply, Request
from shoal.surfaces._wire_embeddings import AnyModelRequest, EmbeddingsRequest
from shoal.types import Array, Embed, Embedded, TextItem, VectorKind

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
DOCUMENTED = {**_facts.DOCUMENTED, **HEADERS}


class Embeddings:
    def __init__(self, gateway: Gateway, options: Options) -> None:
        self._gateway = gateway
        self._limit = options.max_inputs
        self._pictures = options.pictures or Pictures()
        many = ("input", "embedding_type", "modality", "messages")
        self._any_model = options.any_model
        self.request = AnyModelRequest if options.any_model else EmbeddingsRequest
        self._decode = Fields(self.request, "openai", many, options.max_inputs)

    async def __call__(self, request: Request) -> Reply:
        asked = await self._decode(request.body)
        if not (asked.model or self._any_model):
            raise InvalidValue("'model' is empty; name a model of GET /v1/models.", param="model")
        _check_known(asked)
        given = _given(asked, self._limit)
        name, suffix = _roles.without_suffix(self._gateway, asked.model or "")
        card = await _tei_models.awake(self._gateway, request, self._named(name))
        written = _Form(asked, request)
        kind = kind_of_vectors(card)
        mixed = _mixed.has_pictures(given)
        if mixed:
            _mixed.check_takes(self._gateway, card.name, given)
        task = _task(asked, card, [] if mixed else cast(list[TextItem], given), suffix, kind)
        if kind == "multi":
            written.check_numbers()
            check_late(task)
            _matrices.check_inputs(card, [each for each in given if not isinstance(each, Picture)], "input")
        if written.whole and not task.normalize:
            raise InvalidValue(
                "int8 and uint8 are made of vectors of length one; leave 'normalize' out.", param="normalize"
            )
        request.model, request.items = card.name, len(given)
        if mixed:
            inputs = await _mixed.read(self._pictures, given, request, asked.image_download_headers)
            task = msgspec.structs.replace(task, inputs=inputs)
        result = await self._gateway.run(task, request.context())
        request.result = result
        _matrices.check_matrices(result.multi_vectors, "input")
        read = _mixed.text_tokens(task.inputs, result.tokens) if mixed else sum(result.tokens)
        headers, body = await written.encoded(result, card.name, read)
        return Reply(200, [*headers, *_facts.batch_headers(request, result)], body)

    def _named(self, name: str) -> ModelCard:
        """By name. With `any_model` a name that nobody has means the default, but not one that a server may have which
        is not there yet: its vectors would be of another space."""
        try:
            return self._gateway.model(name)
        except ModelNotFound:
            if not self._any_model:
                raise
            return self._gateway.model("")


def _check_known(asked: EmbeddingsRequest) -> None:
    if asked.late_chunking:
        raise Unsupported(
            "'late_chunking' is not supported: leave it out, and embed each chunk by itself.", param="late_chunking"
        )
    if asked.add_special_tokens is False:
        raise Unsupported(
            "'add_special_tokens' cannot be false for texts: send token ids, which are used as they are.",
            param="add_special_tokens",
        )


def _given(asked: EmbeddingsRequest, limit: int) -> list[Given]:
    """Raises WrongType for no input at all, InvalidValue for two, and as `_mixed` does."""
    if asked.messages is None:
        if asked.input is None:
            raise _wire.FieldError("Missing required field 'input'.", at="input", reason="Field required", missing=True)
        return _mixed.given(asked.input, limit, asked.modality)
    if asked.input is not None:
        raise InvalidValue("Both 'input' and 'messages' are there; send one of them.", param="messages")
    if asked.modality is not None:
        raise InvalidValue("'modality' is of 'input': the parts of 'messages' say what they are.", param="modality")
    return _mixed.of_messages(asked.messages)


def check_late(task: Embed, normalize: str = "normalize") -> None:
    """Vectors of late interaction are as the model makes them. Raises Unsupported where others are asked for.

    `normalize`: what the dialect calls that field.
    """
    for name, asked in (("dimensions", task.dimensions is not None), (normalize, not task.normalize)):
        if asked:
            raise Unsupported(
                f"'{name}' changes nothing about vectors of late interaction, which the model {task.model!r} gives: "
                "leave it out.",
                param=name,
            )


def kind_of_vectors(card: ModelCard) -> VectorKind:
    """Dense vectors where the model has them, else those of late interaction. Raises Unsupported for sparse ones."""
    vectors = card.facts.vectors if card.facts is not None and "embed" in card.facts.tasks else ("dense",)
    if "dense" in vectors:
        return "dense"
    if "multi" in vectors:
        return "multi"
    raise Unsupported(
        f"the model {card.name!r} gives {' and '.join(vectors)} vectors, which this route does not answer: use "
        + ("POST /embed_sparse" if "sparse" in vectors else "POST /embed_all"),
        param="model",
    )


def _task(
    asked: EmbeddingsRequest, card: ModelCard, inputs: Sequence[TextItem], suffix: str | None, kind: VectorKind
) -> Embed:
    whole = _cutting.to_model_length(card, asked.truncate_prompt_tokens, "truncate_prompt_tokens")
    wanted = _cutting.whether(asked.truncate, asked.truncation)
    truncate, direction = _cutting.truncation(wanted, asked.truncation_side)
    purpose = _roles.purpose(asked.task, card) if asked.task is not None else _roles.Role()
    role = _roles.role(asked.input_type) if asked.input_type is not None else suffix
    normalize = _cutting.agreed(
        normalize=asked.normalize, normalized=asked.normalized, use_activation=asked.use_activation
    )
    dimensions = _cutting.agreed(dimensions=asked.dimensions, output_dimension=asked.output_dimension)
    return Embed(
        model=card.name,
        inputs=inputs,
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
        precision = _cutting.agreed(output_dtype=asked.output_dtype, embedding_type=named)
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
            pieces = await _matrices.entries(result.multi_vectors, _head)
            return [JSON], [head, *pieces, tail]
        vectors = _rows.contiguous(result.vectors)
        if self._bytes:
            return await self._raw(vectors)
        write = self._base64_entry if self._base64 else self._entry
        return [JSON], await _rows.joined(vectors, write, head, tail)

    def _entry(self, index: int, row: Array) -> bytes:
        return _head(index) + _rows.numbers(quantized(row, self._precision)) + b"}"

    def _base64_entry(self, index: int, row: Array) -> bytes:
        return _head(index) + b'"' + _rows.base64(self._packed(row)) + b'"}'

    def _packed(self, rows: Array) -> Array:
        found = quantized(rows, self._precision)
        return found.astype(self._dtype, copy=False) if self._precision == "float" else found

    async def _raw(self, vectors: Array) -> tuple[Headers, Body]:
        pieces: list[bytes] = []
        shape = self._packed(vectors[:1])
        for start in range(0, len(vectors), _rows.SLICE):
            await asyncio.sleep(0)
            pieces.append(self._packed(vectors[start : start + _rows.SLICE]).tobytes())
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
