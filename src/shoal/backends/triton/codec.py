"""numpy arrays to KServe v2 tensors and back.

Source: the KServe v2 protocol with Triton's binary tensor extension. Raw contents are little-endian and row-major;
BYTES is, for each element, its length in four bytes and the element itself. BOOL is a byte; FP16 and BF16 are two and
have no typed form. numpy has no bfloat16: BF16 tensors are float32 arrays here, rounded to the nearest even on the way
out. BYTES tensors are object arrays: str or bytes on the way out, bytes on the way in, since nothing promises UTF-8.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, MutableMapping
from typing import Any, cast

import numpy as np

from shoal.backends.triton.protocol_pb2 import (
    InferParameter,
    InferTensorContents,
    ModelInferRequest,
    ModelInferResponse,
)
from shoal.errors import InputRejected, InternalError, Unsupported, UpstreamFailed
from shoal.types import Array

DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
"""Datatypes that numpy has, as they lie in raw contents. Beside them there are BYTES and BF16."""

DATATYPES = frozenset({*DTYPES, "BYTES", "BF16"})

TYPED: Mapping[str, str] = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of InferTensorContents that holds a datatype."""

LENGTH = struct.Struct("<I")
Parameter = bool | int | float | str


def add_input(request: ModelInferRequest, name: str, datatype: str, array: Array) -> ModelInferRequest.InferInputTensor:
    """Append one tensor, converted to `datatype`, with raw contents.

    Raises Unsupported for a datatype that KServe v2 does not have, InputRejected for a value that does not fit into it
    (a negative number in an unsigned one), InternalError for an array of another kind.
    """
    request.raw_input_contents.append(to_raw(datatype, array))
    return request.inputs.add(name=name, datatype=datatype, shape=array.shape)


def read_outputs(response: ModelInferResponse) -> dict[str, Array]:
    """All tensors of an answer by name, in the shapes that it states; raw and typed contents both.

    Numbers in raw contents are not copied: their arrays are read-only. Raises UpstreamFailed where the contents do not
    fit what the answer says of them.
    """
    raw = response.raw_output_contents
    if raw and len(raw) != len(response.outputs):
        raise UpstreamFailed(f"the model answered {len(response.outputs)} tensors with {len(raw)} raw contents")
    return {
        tensor.name: _read_tensor(tensor.name, tensor.datatype, tuple(tensor.shape), raw[i] if raw else tensor.contents)
        for i, tensor in enumerate(response.outputs)
    }


def to_raw(datatype: str, array: Array) -> bytes:
    """An array as raw contents. Raises as `add_input` does."""
    if datatype == "BYTES":
        return to_blob(array)
    if datatype == "BF16":
        return to_bf16(array).tobytes()
    return _cast(datatype, array).tobytes()


def from_raw(datatype: str, shape: tuple[int, ...], data: bytes) -> Array:
    """Raw contents as an array of `shape`. Raises UpstreamFailed when they are too short or too long for it."""
    if datatype == "BYTES":
        return from_blob(data, shape)
    dtype = np.dtype("<u2") if datatype == "BF16" else _dtype(datatype)
    size = _size(shape)
    if len(data) != size * dtype.itemsize:
        raise UpstreamFailed(f"{datatype} {list(shape)} takes {size * dtype.itemsize} bytes, not {len(data)}")
    array = np.frombuffer(data, dtype=dtype).reshape(shape)
    return from_bf16(array) if datatype == "BF16" else array


def from_typed(datatype: str, shape: tuple[int, ...], contents: InferTensorContents) -> Array:
    """Typed contents as an array of `shape`. Raises UpstreamFailed when their number does not fit it, or a value its
    datatype."""
    values = getattr(contents, _field(datatype))
    if len(values) != _size(shape):
        raise UpstreamFailed(f"{datatype} {list(shape)} takes {_size(shape)} values, not {len(values)}")
    if datatype == "BYTES":
        return _objects(list(values), shape)
    # INT8 and INT16 travel in 32 bits.
    wide: Any = {"int_contents": "<i4", "uint_contents": "<u4"}.get(_field(datatype), DTYPES[datatype])
    try:
        return _cast(datatype, np.array(values, dtype=wide).reshape(shape))
    except InputRejected as error:
        raise UpstreamFailed(error.message) from error


def to_blob(array: Array) -> bytes:
    """Texts or byte strings, in row-major order, each after its length."""
    parts: list[bytes] = []
    append, length = parts.append, LENGTH.pack
    for element in _elements(array):
        append(length(len(element)))
        append(element)
    return b"".join(parts)


def from_blob(data: bytes, shape: tuple[int, ...]) -> Array:
    """What `to_blob` made, as an object array of bytes. Raises UpstreamFailed when it is cut short or has a rest."""
    elements: list[bytes] = []
    append, length_at, end, position = elements.append, LENGTH.unpack_from, len(data), 0
    size = _size(shape)
    while position + 4 <= end and len(elements) < size:
        start = position + 4
        position = start + length_at(data, position)[0]
        append(data[start:position])
    if position != end or len(elements) != size:
        raise UpstreamFailed(f"BYTES {list(shape)} is broken: {len(elements)} of {size} elements in {end} bytes")
    return _objects(elements, shape)


def to_bf16(array: Array) -> Array:
    """float32 as the upper half of its bits, uint16, rounded to the nearest even; NaN stays NaN, with its sign."""
    bits = _cast("FP32", array).reshape(-1).view("<u4")
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    # Rounding would carry a NaN of few bits over into infinity or past the sign.
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if nan.any():
        rounded = np.where(nan, (bits >> 16) | np.uint32(0x40), rounded)
    return cast(Array, rounded.astype("<u2").reshape(array.shape))


def from_bf16(halves: Array) -> Array:
    """uint16 halves as float32, exactly."""
    whole = halves.astype("<u4").reshape(-1) << 16
    return cast(Array, whole.view("<f4").reshape(halves.shape))


def set_parameter(parameters: MutableMapping[str, InferParameter], name: str, value: Parameter) -> None:
    """Put a request or tensor parameter into its protobuf map, in the field of its type.

    Whole numbers go as int64, from 2**63 on as uint64. Raises Unsupported for any other value.
    """
    match value:
        case bool():
            parameters[name].bool_param = value
        case int() if -(2**63) <= value < 2**63:
            parameters[name].int64_param = value
        case int() if 2**63 <= value < 2**64:
            parameters[name].uint64_param = value
        case float():
            parameters[name].double_param = value
        case str():
            parameters[name].string_param = value
        case _:
            raise Unsupported(f"{name}: {value!r} cannot be a parameter; give a boolean, number or text", param=name)


def _read_tensor(name: str, datatype: str, shape: tuple[int, ...], contents: bytes | InferTensorContents) -> Array:
    try:
        if isinstance(contents, bytes):
            return from_raw(datatype, shape, contents)
        return from_typed(datatype, shape, contents)
    except UpstreamFailed as error:
        raise UpstreamFailed(f"tensor {name!r}: {error.message}") from error
    except Unsupported as error:  # what the other side sent, not what somebody asked for
        raise UpstreamFailed(f"tensor {name!r}: {error.message}") from error


def _cast(datatype: str, array: Array) -> Array:
    """The array in the datatype's own dtype, row-major; itself where it is that already."""
    dtype = _dtype(datatype)
    if array.dtype != dtype:
        if array.dtype.kind in "iu" and dtype.kind in "iu":
            _check_range(datatype, dtype, array)
        elif not np.can_cast(array.dtype, dtype, "same_kind"):
            raise InternalError(f"an array of {array.dtype} cannot be sent as {datatype}")
        try:
            with np.errstate(over="raise"):
                array = array.astype(dtype)
        except FloatingPointError as error:
            raise InputRejected(f"a value is too large for {datatype}") from error
    return array if array.flags.c_contiguous else array.copy(order="C")


def _check_range(datatype: str, dtype: np.dtype[Any], array: Array) -> None:
    """numpy itself would wrap a number that is out of range around."""
    if array.size and not np.can_cast(array.dtype, dtype):
        low, high = int(array.min()), int(array.max())
        bounds = np.iinfo(dtype)
        if low < bounds.min or high > bounds.max:
            wrong = low if low < bounds.min else high
            raise InputRejected(f"{wrong} does not fit into {datatype} ({bounds.min} to {bounds.max})")


def _dtype(datatype: str) -> np.dtype[Any]:
    dtype = DTYPES.get(datatype)
    if dtype is None:
        raise Unsupported(f"no datatype {datatype!r}; KServe v2 has {', '.join(sorted(DATATYPES))}")
    return dtype


def _field(datatype: str) -> str:
    field = TYPED.get(datatype)
    if field is None:
        raise Unsupported(f"{datatype} has no typed contents; it is sent raw")
    return field


def _elements(array: Array) -> list[bytes]:
    """The elements of an array of texts as bytes, in row-major order."""
    values = array.ravel().tolist()
    try:
        return [each if isinstance(each, bytes) else each.encode() for each in values]
    except AttributeError as error:
        raise InternalError(f"an array of {array.dtype} cannot be sent as BYTES: {error}") from error
    except UnicodeEncodeError as error:
        raise InputRejected(f"a text is not valid Unicode: {error}") from error


def _objects(elements: list[bytes], shape: tuple[int, ...]) -> Array:
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array.reshape(shape)


def _size(shape: tuple[int, ...]) -> int:
    """How many elements. A shape of an answer is final: a free axis (-1) in it means nothing."""
    size = 1
    for length in shape:
        if length < 0:
            raise UpstreamFailed(f"the shape {list(shape)} has a negative length")
        size *= length
    return size
