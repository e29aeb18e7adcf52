"""POST /v1/embeddings: OpenAI's fields, plus those of NVIDIA NIM, Voyage, Jina and vLLM on the same path."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import numpy as np

from shoal.errors import InvalidValue, ModelNotFound, Unsupported
from shoal.http.images import ImageReader
from shoal.http.json import decoder
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
from shoal.surfaces.shared.input_parsing import ImageReference, Input
from shoal.surfaces.shared.quantization import Precision, quantize
from shoal.surfaces.shared.task_runs import embed_inputs
from shoal.types import Array, Embed, Embedded, VectorKind

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import Model, ModelCard

_ENCODE = msgspec.json.Encoder()
_BINARY = b"application/octet-stream"
_WEIGHT = re.compile(rb"[01](\.[0-9]{0,3})?")
_DTYPES: dict[tuple[bool, bool], np.dtype[Any]] = {
    (False, False): np.dtype("<f4"),
    (False, True): np.dtype(">f4"),
    (True, False): np.dtype("<f2"),
    (True, True): np.dtype(">f2"),
}
"""Of raw bytes, by (half precision, big-endian)."""
BINARY_HEADER_DOCS = {
    "x-shoal-shape": "For binary responses: the number of vectors, a comma, and the dimension.",
    "x-shoal-dtype": "For binary responses: the number type in NumPy's notation: `<f4`, `>f4`, `<f2`, `>f2`, int8 or "
    "uint8.",
}
HEADER_DOCS = {**batch_headers.HEADER_DOCS, **token_ids.HEADER_DOCS, **BINARY_HEADER_DOCS}


class Embeddings:
    """The endpoint. `request`: the form of its bodies (None: as `any_model` says)."""

    def __init__(self, gateway: Gateway, options: Options, request: type[EmbeddingsRequest] | None = None) -> None:
        self._gateway = gateway
        self._limit = options.max_inputs
        self._image_reader = options.image_reader or ImageReader()
        self._any_model = options.any_model
        self._token_ids = options.token_ids
        self.request = request or (AnyModelRequest if options.any_model else EmbeddingsRequest)
        self._decode = decoder.Decoder(self.request, "openai", options.max_inputs)

    async def __call__(self, request: Request) -> Reply:
        payload = await self._decode.decode_async(request.body)
        if not (payload.model or self._any_model):
            raise InvalidValue("'model' is empty; name a model of GET /v1/models.", param="model")
        extended = _is_extended(payload)
        if extended:
            _check_supported(payload)
        inputs = _parse_inputs(payload, self._limit)
        kinds = set(map(type, inputs))
        model, card, name, role = await self._resolve_model(request, payload.model or "")
        token_headers: Headers = []
        if list in kinds:
            inputs, token_headers = await token_ids.resolve_token_ids(inputs, name, card, self._token_ids)
        written = _VectorFormat(payload, request)
        kind = vector_kinds.main_kind(card)
        if ImageReference in kinds:
            input_parsing.check_modalities(self._gateway, card.name, inputs)
        if extended:
            task = _build_task(payload, card, role, kind)
        else:
            task = Embed(
                model=card.name, inputs=(), input_type=role, dimensions=payload.dimensions or None, outputs=(kind,)
            )
        if kind == "multi":
            written.check_numbers()
            vector_kinds.check_late_interaction(task)
            matrices.check_inputs(card, [each for each in inputs if not isinstance(each, ImageReference)], "input")
        if written.is_integer and not task.normalize:
            raise InvalidValue(
                "int8 and uint8 are only available for normalized vectors; omit 'normalize'.", param="normalize"
            )
        result, tokens = await embed_inputs(
            self._gateway, self._image_reader, request, task, inputs, payload.image_download_headers, model
        )
        if result.multi_vectors:
            matrices.check_matrices(result.multi_vectors, "input")
        headers, body = await written.encode_reply(result, card.name, tokens)
        return Reply(200, [*headers, *batch_headers.batch_headers(request, result), *token_headers], body)

    async def _resolve_model(self, request: Request, name: str) -> tuple[Model | None, ModelCard, str, str | None]:
        """Return the model with exactly this name, if any; the card of the model that is meant; its name as the client
        sent it; and the role from the name's suffix (None: no suffix)."""
        found = self._gateway.registry.get(name)
        if found is not None:
            card, role = found.card(), None
        else:
            name, role = input_types.strip_role_suffix(self._gateway, name)
            card = self._find_model(name)
        request.model = card.name
        if card.facts is None:
            card = await default_models.wake_model(self._gateway, request, card)
        return found, card, name, role

    def _find_model(self, name: str) -> ModelCard:
        """Find a model by name. With `any_model`, unknown names mean the default model.

        That excludes names that a server which is still awaited may have: the default's vectors are of another space.
        """
        try:
            return self._gateway.model("" if name == default_models.NOT_SPECIFIED else name)
        except ModelNotFound:
            if not self._any_model:
                raise
            return self._gateway.model("")


def _is_extended(payload: EmbeddingsRequest) -> bool:
    """Whether the request has fields beyond OpenAI's own. One struct comparison replaces a check of each field."""
    plain = type(payload)(  # the decoder's own subtype: structs of two types are never equal
        model=payload.model,
        input=payload.input,
        encoding_format=payload.encoding_format,
        dimensions=payload.dimensions,
        user=payload.user,
    )
    return payload.dimensions == 0 or payload != plain


def _check_supported(payload: EmbeddingsRequest) -> None:
    if payload.late_chunking:
        raise Unsupported(
            "'late_chunking' is not supported: omit it, and embed each chunk separately.", param="late_chunking"
        )
    if payload.dimensions == 0 and payload.modality is None:
        raise decoder.FieldError(
            "'dimensions' is invalid: expected `int` >= 1.", at="dimensions", reason="Expected `int` >= 1"
        )
    if payload.add_special_tokens is False:
        raise Unsupported(
            "'add_special_tokens' cannot be false for texts: send token ids, which are used unchanged.",
            param="add_special_tokens",
        )


def _parse_inputs(payload: EmbeddingsRequest, limit: int) -> list[Input]:
    """Parse `input` or `messages`.

    Raises WrongType if both are missing, InvalidValue if both are there, and what `input_parsing` raises.
    """
    if payload.messages is None:
        if payload.input is None:
            raise decoder.FieldError(
                "Missing required field 'input'.", at="input", reason="Field required", missing=True
            )
        return input_parsing.parse_inputs(payload.input, limit, payload.modality)
    if payload.input is not None:
        raise InvalidValue("'input' and 'messages' are mutually exclusive; send one of them.", param="messages")
    if payload.modality is not None:
        raise InvalidValue("'modality' applies to 'input'; parts of 'messages' have a type.", param="modality")
    return input_parsing.parse_messages(payload.messages)


def _build_task(payload: EmbeddingsRequest, card: ModelCard, suffix: str | None, kind: VectorKind) -> Embed:
    """Build the task without its inputs. `suffix` is the role from the end of the model's name."""
    whole = truncation.check_token_limit(card, payload.truncate_prompt_tokens, "truncate_prompt_tokens")
    mode = truncation.merge_truncate_fields(payload.truncate, payload.truncation)
    side = truncation.merge_fields(
        truncation_side=payload.truncation_side, truncation_direction=payload.truncation_direction
    )
    truncate, direction = truncation.parse_truncation(mode, cast(Literal["left", "right"] | None, side))
    purpose = input_types.Role()
    if payload.task is not None:
        purpose = input_types.resolve_purpose(payload.task, card, "task")
    role = input_types.normalize_role(payload.input_type) if payload.input_type is not None else suffix
    normalize = truncation.merge_fields(
        normalize=payload.normalize, normalized=payload.normalized, use_activation=payload.use_activation
    )
    # Infinity's client always sends `modality`, and 0 for vectors of full length.
    dimensions = truncation.merge_fields(
        dimensions=payload.dimensions or None, output_dimension=payload.output_dimension
    )
    return Embed(
        model=card.name,
        inputs=(),
        prompt_name=payload.prompt_name if payload.prompt_name is not None else purpose.prompt_name,
        input_type=role if role is not None else purpose.input_type,
        truncate=whole if truncate is None else truncate,
        truncation_direction=direction,
        normalize=normalize is not False,
        dimensions=cast(int | None, dimensions),
        outputs=(kind,),
    )


class _VectorFormat:
    """The requested output format: the type of numbers, written as JSON, base64 or raw bytes."""

    def __init__(self, payload: EmbeddingsRequest, request: Request) -> None:
        kind = payload.embedding_type
        if isinstance(kind, list):
            if len(kind) != 1:
                raise Unsupported(
                    "'embedding_type' accepts one type; POST /v2/embed accepts several.", param="embedding_type"
                )
            (kind,) = kind
        self._precision: Precision = payload.output_dtype or "float"
        if kind is not None and kind != "base64":
            truncation.merge_fields(output_dtype=payload.output_dtype, embedding_type=kind)
            self._precision = kind
        form = payload.encoding_format
        if kind == "base64" and form not in (None, "base64"):
            raise InvalidValue(
                f"'encoding_format' {form} and 'embedding_type' base64 contradict each other; send one of them.",
                param="encoding_format",
            )
        self._base64 = "base64" in (form, kind)
        accept = request.headers.get(b"accept", b"").lower()
        self._bytes = form == "bytes_only" or (
            form is None and not self._base64 and _BINARY in accept and _accepts_bytes(accept)
        )
        self._dtype = _DTYPES[payload.embed_dtype == "float16", payload.endianness == "big"]
        self.is_integer = self._precision in ("int8", "uint8")

    def check_numbers(self) -> None:
        """Raise Unsupported for formats other than JSON numbers, since late-interaction vectors vary in number."""
        if self._precision != "float" or self._bytes:
            raise Unsupported(
                "late-interaction vectors are only returned as JSON numbers: omit 'output_dtype' and binary formats.",
                param="model",
            )

    async def encode_reply(self, result: Embedded, model: str, total: int) -> tuple[Headers, Body]:
        """Return the headers and the body. `total` is the number of tokens that the model read."""
        head = b'{"object":"list","data":['
        tail = b'],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (_ENCODE.encode(model), total, total)
        if result.multi_vectors:
            # Base64 requests get lists, too: OpenAI's client requests base64 by default, and accepts lists unchanged.
            pieces = await matrices.encode_entries(result.multi_vectors, _entry_head)
            return [JSON], [head, *pieces, tail]
        vectors = vector_encoding.to_contiguous(result.vectors)
        if self._bytes:
            return await self._encode_bytes(vectors)
        write = self._encode_base64_entry if self._base64 else self._encode_entry
        return [JSON], await vector_encoding.encode_rows(vectors, write, head, tail)

    def _encode_entry(self, index: int, row: Array) -> bytes:
        numbers = row if self._precision == "float" else quantize(row, self._precision)
        return b'{"object":"embedding","index":%d,"embedding":%b}' % (index, vector_encoding.encode_numbers(numbers))

    def _encode_base64_entry(self, index: int, row: Array) -> bytes:
        return _entry_head(index) + b'"' + vector_encoding.encode_base64(self._pack(row)) + b'"}'

    def _pack(self, rows: Array) -> Array:
        found = quantize(rows, self._precision)
        return found.astype(self._dtype, copy=False) if self._precision == "float" else found

    async def _encode_bytes(self, vectors: Array) -> tuple[Headers, Body]:
        pieces: list[bytes] = []
        shape = self._pack(vectors[:1])
        for start in range(0, len(vectors), vector_encoding.SLICE):
            await asyncio.sleep(0)
            pieces.append(self._pack(vectors[start : start + vector_encoding.SLICE]).tobytes())
        return [
            (b"content-type", _BINARY),
            (b"x-shoal-shape", b"%d,%d" % (len(vectors), shape.shape[1])),
            (b"x-shoal-dtype", (shape.dtype.str if self._precision == "float" else shape.dtype.name).encode()),
        ], pieces


def _accepts_bytes(accept: bytes) -> bool:
    """Whether a lower-case Accept header prefers bytes at least as much as JSON (RFC 9110, section 12.5.1)."""
    weights = {b"application/json": 0.0, _BINARY: 0.0}
    for each in accept.split(b","):
        name, *more = (part.strip() for part in each.split(b";"))
        if name in weights:
            weights[name] = next((_parse_weight(part[2:]) for part in more if part.startswith(b"q=")), 1.0)
    return weights[_BINARY] > 0 and weights[_BINARY] >= weights[b"application/json"]


def _parse_weight(text: bytes) -> float:
    """Parse a quality value; invalid ones count as 0."""
    return float(text) if _WEIGHT.fullmatch(text) else 0.0


def _entry_head(index: int) -> bytes:
    return b'{"object":"embedding","index":%d,"embedding":' % index
