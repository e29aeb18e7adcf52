"""Reads and writes the bodies of the KServe v2 REST API: JSON, with Triton's binary tensors behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import orjson

from shoal.errors import InvalidValue, Malformed, TooManyInputs, WrongType
from shoal.http.json.complexity import count_pieces_async
from shoal.http.json.decoder import LARGE, Decoder
from shoal.http.request import JSON, Headers
from shoal.kserve import codec
from shoal.surfaces.kserve import wire
from shoal.surfaces.kserve.signature import VERSION, Signature, TensorSpec
from shoal.surfaces.kserve.tensors import (
    InferRequest,
    InferResponse,
    InputTensor,
    Tensor,
    check_tensor_parameters,
    collect_inputs,
    read_requested_output,
)

JSON_LENGTH = b"inference-header-content-length"
"""Header with the bytes of JSON before binary tensors."""

_BINARY_SIZE, _BINARY, _BINARY_ALL = "binary_data_size", "binary_data", "binary_data_output"
_OCTETS = (b"content-type", b"application/octet-stream")
_ENCODE = msgspec.json.Encoder()
_SLICE = 65_536
"""Numbers encoded at once, in about 2 ms."""


async def check_json(body: memoryview) -> None:
    """Raise TooManyInputs for JSON with too many values."""
    if len(body) > LARGE and await count_pieces_async(body, wire.MAX_VALUES) > wire.MAX_VALUES:
        raise TooManyInputs(
            f"the body has more than {wire.MAX_VALUES} values: send large tensors in binary, or split it"
        )


class OutputForm(NamedTuple):
    """Which outputs the client reads in the binary part: `named`, and by default all or none."""

    binary: bool
    named: Mapping[str, bool]

    def is_binary(self, name: str) -> bool:
        return self.named.get(name, self.binary)


class InferDecoder:
    """Decodes the bodies of inference requests. `max_inputs` limits how much JSON is decoded at once."""

    def __init__(self, max_inputs: int) -> None:
        self._decode = Decoder(wire.InferBody, "kserve", max_inputs)

    async def decode(
        self, model: str, version: str, body: bytes, json_length: bytes | None
    ) -> tuple[InferRequest, OutputForm]:
        """Return a request to a model, and the form of its outputs. `json_length`: the header's value.

        Raises RequestErrors that name the tensor.
        """
        end = _parse_json_length(json_length, len(body))
        await check_json(memoryview(body)[:end])
        payload = await self._decode.decode_async(body if end == len(body) else body[:end])
        parameters = dict(payload.parameters)
        binary = parameters.pop(_BINARY_ALL, False) is True
        outputs = [read_requested_output(each.name, each.parameters, (_BINARY,)) for each in payload.outputs]
        form = OutputForm(binary, {each.name: each.parameters.get(_BINARY, binary) is True for each in payload.outputs})
        blobs = _Blobs(body, end)
        inputs = collect_inputs([_read_input(each, blobs) for each in payload.inputs])
        blobs.finish()
        call = InferRequest(
            model=model,
            version=version,
            id=payload.id,
            parameters=parameters,
            inputs=inputs,
            outputs=outputs,
        )
        return call, form


def _parse_json_length(header: bytes | None, size: int) -> int:
    if header is None:
        return size
    if not header.isdigit() or len(header) > 20:
        raise Malformed("The header 'inference-header-content-length' is not a number.")
    length = int(header)
    if not 0 < length <= size:
        raise Malformed(
            f"The header 'inference-header-content-length' is {length}, but the body has {size} bytes; send the size "
            "of its JSON."
        )
    return length


class _Blobs:
    """Takes the binary tensors of a body, in order."""

    def __init__(self, body: bytes, start: int) -> None:
        self._body = body
        self._at = start

    def take(self, size: int, name: str) -> bytes:
        if not 0 <= size <= len(self._body) - self._at:
            raise InvalidValue(
                f"the input {name!r} has a {_BINARY_SIZE} of {size}, but {len(self._body) - self._at} bytes are left",
                param=name,
            )
        found = self._body[self._at : self._at + size]
        self._at += size
        return found

    def finish(self) -> None:
        if self._at < len(self._body):
            raise InvalidValue(
                f"{len(self._body) - self._at} bytes of the body belong to no input; set {_BINARY_SIZE}", param="inputs"
            )


def _read_input(tensor: wire.InputTensor, blobs: _Blobs) -> InputTensor:
    check_tensor_parameters(tensor.name, tensor.parameters, (_BINARY_SIZE,))
    size = tensor.parameters.get(_BINARY_SIZE)
    contents: bytes | list[Any]
    if (tensor.data is None) == (size is None):
        raise InvalidValue(f"the input {tensor.name[:200]!r} must have 'data' or {_BINARY_SIZE}", param=tensor.name)
    if tensor.data is not None:
        contents = tensor.data
    elif isinstance(size, bool) or not isinstance(size, int):
        raise WrongType(f"the {_BINARY_SIZE} of {tensor.name[:200]!r} must be an integer", param=tensor.name)
    else:
        contents = blobs.take(size, tensor.name[:200])
    return InputTensor(tensor.name, tensor.datatype, tuple(tensor.shape), contents)


async def encode_response(response: InferResponse, form: OutputForm) -> tuple[Headers, list[bytes]]:
    """Return the headers and the pieces of a response's body. The event loop runs between slices of large tensors."""
    pieces = [b'{"model_name":%b,"model_version":"%b"' % (_ENCODE.encode(response.model), VERSION.encode())]
    if response.id:
        pieces.append(b',"id":%b' % _ENCODE.encode(response.id))
    pieces.append(b',"outputs":[')
    blobs: list[bytes] = []
    for at, tensor in enumerate(response.outputs):
        head = b'%b{"name":"%b","datatype":"%b","shape":%b,' % (
            b"," if at else b"",
            tensor.name.encode(),
            tensor.datatype.encode(),
            _ENCODE.encode(tensor.array.shape),
        )
        if form.is_binary(tensor.name):
            blobs.append(codec.to_raw(tensor.datatype, tensor.array))
            pieces.append(head + b'"parameters":{"%b":%d}}' % (_BINARY_SIZE.encode(), len(blobs[-1])))
        else:
            pieces += [head, b'"data":[', *await _collect(_encode_elements(tensor)), b"]}"]
    pieces.append(b"]}")
    if not blobs:
        return [JSON], pieces
    json_length = b"%d" % sum(map(len, pieces))
    return [_OCTETS, (JSON_LENGTH, json_length)], [*pieces, *blobs]


async def _collect(slices: Iterator[bytes]) -> list[bytes]:
    """Return the slices; the event loop runs after each large one."""
    pieces: list[bytes] = []
    for each in slices:
        pieces.append(each)
        if len(each) > _SLICE:
            await asyncio.sleep(0)
    return pieces


def _encode_elements(tensor: Tensor) -> Iterator[bytes]:
    flat = tensor.array.ravel()
    for start in range(0, len(flat), _SLICE):
        part = flat[start : start + _SLICE]
        if part.dtype == object:
            data = _ENCODE.encode(part.tolist())
        else:
            data = orjson.dumps(np.ascontiguousarray(part), option=orjson.OPT_SERIALIZE_NUMPY)
        yield (b"," if start else b"") + data[1:-1]


def read_generate(model: str, body: Mapping[str, Any], signature: Signature) -> InferRequest:
    """Return the request of Triton's generate extension: tensors by name, also within `parameters`, where all other
    names are parameters. A single value has the shape [1].

    Raises RequestErrors that name the tensor.
    """
    specs = {each.name: each for each in signature.inputs}
    fields = {name: value for name, value in body.items() if name not in ("id", "parameters")}
    for name in fields:
        if name not in specs:
            raise InvalidValue(f"the model has no input {name[:200]!r}; it has {', '.join(specs)}", param=name)
    parameters = body.get("parameters") or {}
    fields |= {name: value for name, value in parameters.items() if name in specs}
    return InferRequest(
        model=model,
        id=body.get("id") or "",
        parameters={name: value for name, value in parameters.items() if name not in specs},
        inputs={name: _read_value(specs[name], value) for name, value in fields.items()},
    )


def _read_value(spec: TensorSpec, value: Any) -> InputTensor:
    if isinstance(value, dict):
        value = _ENCODE.encode(value).decode()  # the JSON of a text, as of sampling_parameters
    values = value if isinstance(value, list) else [value]
    if spec.dims == (-1,) and values and not isinstance(values[0], list):
        values = [values]  # one row of token ids
    shape = (len(values), len(values[0])) if values and isinstance(values[0], list) else (len(values),)
    return InputTensor(spec.name, spec.datatype, shape, values)


async def encode_generated(response: InferResponse) -> list[bytes]:
    """Return the pieces of the only response of the generate extension. The event loop runs between slices."""
    return await _collect(_generate_fields(response.model, response.id, response.outputs))


def to_generate_fields(model: str, id: str, tensors: Sequence[Tensor]) -> bytes:
    """Return a response of the generate extension: a value for a tensor with one element, else a list."""
    return b"".join(_generate_fields(model, id, tensors))


def _generate_fields(model: str, id: str, tensors: Sequence[Tensor]) -> Iterator[bytes]:
    yield b'{"model_name":%b,"model_version":"%b"' % (_ENCODE.encode(model), VERSION.encode())
    if id:
        yield b',"id":%b' % _ENCODE.encode(id)
    for tensor in tensors:
        is_list = tensor.array.size != 1
        yield b',"%b":%b' % (tensor.name.encode(), b"[" if is_list else b"")
        yield from _encode_elements(tensor)
        if is_list:
            yield b"]"
    yield b"}"
