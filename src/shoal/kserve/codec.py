"""Converts numpy arrays to KServe v2 tensors and back.

Source: the KServe v2 protocol with Triton's binary tensor extension. Raw contents are little-endian and row-major. A
BYTES element is its length in four bytes, then its content. BOOL takes one byte; FP16 and BF16 take two and have no
typed form. numpy has no bfloat16: BF16 tensors are float32 arrays here, rounded to nearest even when sent. BYTES
tensors are object arrays: str or bytes when sent, bytes when received, since UTF-8 is not guaranteed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shoal.errors import InputRejected, InternalError, Unsupported
from shoal.types import Array

if TYPE_CHECKING:  # the codec of arrays alone needs no protobuf
    from shoal.kserve.protocol_pb2 import InferParameter, InferTensorContents, ModelInferRequest

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
"""Datatypes that numpy has, in the layout of raw contents: all except BYTES and BF16."""

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
"""The field of InferTensorContents for each datatype."""

MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**31 - 1

LENGTH = struct.Struct("<I")
Parameter = bool | int | float | str


class InvalidTensor(ValueError):
    """A received tensor is invalid: its contents do not match its datatype and shape."""


def add_input(request: ModelInferRequest, name: str, datatype: str, array: Array) -> ModelInferRequest.InferInputTensor:
    """Append one tensor with raw contents, converted to `datatype`.

    Raises Unsupported for a datatype outside KServe v2, InputRejected for a value out of its range (a negative number
    as an unsigned one), InternalError for an array of another kind.
    """
    request.raw_input_contents.append(to_raw(datatype, array))
    return request.inputs.add(name=name, datatype=datatype, shape=array.shape)


def read_tensors(tensors: Sequence[Any], raw: Sequence[bytes]) -> dict[str, Array]:
    """Return all inputs of a request, or all outputs of a response, by name, in the shapes that they state, from raw or
    typed contents.

    Numbers in raw contents are not copied: their arrays are read-only. Raises InvalidTensor if the contents do not
    match the stated datatypes and shapes.
    """
    if raw and len(raw) != len(tensors):
        raise InvalidTensor(f"{len(tensors)} tensors have {len(raw)} raw contents")
    return {
        tensor.name: _read_tensor(tensor.name, tensor.datatype, tuple(tensor.shape), raw[i] if raw else tensor.contents)
        for i, tensor in enumerate(tensors)
    }


def to_raw(datatype: str, array: Array) -> bytes:
    """Return an array as raw contents. Raises as `add_input` does."""
    if datatype == "BYTES":
        return to_blob(array)
    if datatype == "BF16":
        return to_bf16(array).tobytes()
    return _cast(datatype, array).tobytes()


def from_raw(datatype: str, shape: tuple[int, ...], data: bytes) -> Array:
    """Return raw contents as an array of `shape`. Raises InvalidTensor if their length does not match it."""
    if datatype == "BYTES":
        return from_blob(data, shape)
    dtype = np.dtype("<u2") if datatype == "BF16" else _dtype(datatype)
    size = count_elements(shape)
    if len(data) != size * dtype.itemsize:
        raise InvalidTensor(f"{datatype} {list(shape)} takes {size * dtype.itemsize} bytes, not {len(data)}")
    array = np.frombuffer(data, dtype=dtype).reshape(shape)
    return from_bf16(array) if datatype == "BF16" else array


def from_typed(datatype: str, shape: tuple[int, ...], contents: InferTensorContents) -> Array:
    """Return typed contents as an array of `shape`. Raises InvalidTensor if their count or a value does not fit."""
    values = getattr(contents, _field(datatype))
    if len(values) != count_elements(shape):
        raise InvalidTensor(f"{datatype} {list(shape)} takes {count_elements(shape)} values, not {len(values)}")
    if datatype == "BYTES":
        return to_objects(list(values), shape)
    # INT8 and INT16 are sent in 32 bits.
    wide: Any = {"int_contents": "<i4", "uint_contents": "<u4"}.get(_field(datatype), DTYPES[datatype])
    try:
        return _cast(datatype, np.array(values, dtype=wide).reshape(shape))
    except InputRejected as error:
        raise InvalidTensor(error.message) from error


def to_blob(array: Array) -> bytes:
    """Encode texts or byte strings in row-major order, each after its length."""
    parts: list[bytes] = []
    append, length = parts.append, LENGTH.pack
    for element in _elements(array):
        append(length(len(element)))
        append(element)
    return b"".join(parts)


def from_blob(data: bytes, shape: tuple[int, ...]) -> Array:
    """Decode the output of `to_blob` to an object array of bytes. Raises InvalidTensor if it is truncated or too
    long."""
    elements: list[bytes] = []
    append, length_at, end, position = elements.append, LENGTH.unpack_from, len(data), 0
    size = count_elements(shape)
    while position + 4 <= end and len(elements) < size:
        start = position + 4
        position = start + length_at(data, position)[0]
        append(data[start:position])
    if position != end or len(elements) != size:
        raise InvalidTensor(f"BYTES {list(shape)} is broken: {len(elements)} of {size} elements in {end} bytes")
    return to_objects(elements, shape)


def to_bf16(array: Array) -> Array:
    """Return float32 values as uint16, their upper halves rounded to nearest even; NaN stays NaN and keeps its sign."""
    bits = _cast("FP32", array).reshape(-1).view("<u4")
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    # Rounding would turn a NaN with few bits set into infinity, and overflow others past the sign.
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if nan.any():
        rounded = np.where(nan, (bits >> 16) | np.uint32(0x40), rounded)
    return cast(Array, rounded.astype("<u2").reshape(array.shape))


def from_bf16(halves: Array) -> Array:
    """Return uint16 upper halves as float32, exactly."""
    whole = halves.astype("<u4").reshape(-1) << 16
    return cast(Array, whole.view("<f4").reshape(halves.shape))


def set_parameter(parameters: MutableMapping[str, InferParameter], name: str, value: Parameter) -> None:
    """Put a request or tensor parameter into its protobuf map, in the field of its type.

    Integers are sent as int64, from 2**63 on as uint64. Raises Unsupported for any other value.
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
            raise Unsupported(f"{name}: {value!r} cannot be a parameter; use a boolean, number or string", param=name)


def _read_tensor(name: str, datatype: str, shape: tuple[int, ...], contents: bytes | InferTensorContents) -> Array:
    try:
        if isinstance(contents, bytes):
            return from_raw(datatype, shape, contents)
        return from_typed(datatype, shape, contents)
    except InvalidTensor as error:
        raise InvalidTensor(f"tensor {name!r}: {error}") from error
    except Unsupported as error:  # the sender chose the datatype
        raise InvalidTensor(f"tensor {name!r}: {error.message}") from error


def _cast(datatype: str, array: Array) -> Array:
    """Return the array in the datatype's dtype, row-major; the same array if it already is."""
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
    """Raise InputRejected for a number out of range, which numpy would wrap around."""
    if array.size and not np.can_cast(array.dtype, dtype):
        low, high = int(array.min()), int(array.max())
        bounds = np.iinfo(dtype)
        if low < bounds.min or high > bounds.max:
            wrong = low if low < bounds.min else high
            raise InputRejected(f"{wrong} does not fit into {datatype} ({bounds.min} to {bounds.max})")


def _dtype(datatype: str) -> np.dtype[Any]:
    dtype = DTYPES.get(datatype)
    if dtype is None:
        raise Unsupported(f"unknown datatype {datatype[:20]!r}; KServe v2 has {', '.join(sorted(DATATYPES))}")
    return dtype


def _field(datatype: str) -> str:
    field = TYPED.get(datatype)
    if field is None:
        raise Unsupported(f"{datatype} has no typed contents; it is sent raw")
    return field


def _elements(array: Array) -> list[bytes]:
    """Return the elements of an array of texts as bytes, in row-major order."""
    values = array.ravel().tolist()
    try:
        return [each if isinstance(each, bytes) else each.encode() for each in values]
    except AttributeError as error:
        raise InternalError(f"an array of {array.dtype} cannot be sent as BYTES: {error}") from error
    except UnicodeEncodeError as error:
        raise InputRejected(f"a text is not valid Unicode: {error}") from error


def to_objects(elements: list[Any], shape: tuple[int, ...]) -> Array:
    """Return texts or byte strings as an object array of `shape`."""
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array.reshape(shape)


def count_elements(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape. Raises InvalidTensor for a negative length, which has no meaning in
    contents, and for more dimensions or elements than any tensor has."""
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidTensor(f"the shape has {len(shape)} dimensions; the limit is {MAX_DIMENSIONS}")
    size = 1
    for length in shape:
        if not 0 <= length <= MAX_ELEMENTS:
            raise InvalidTensor(f"the shape {list(shape)} has the length {length}")
        size *= length
    if size > MAX_ELEMENTS:
        raise InvalidTensor(f"the shape {list(shape)} has {size} elements; the limit is {MAX_ELEMENTS}")
    return size
