"""Bounds how much a protobuf message holds before it is parsed: a field of two bytes can become an object of hundreds.

Source: the encoding of protobuf; the field numbers are those of `kserve/protocol.proto`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shoal.errors import Malformed, TooManyInputs

SMALL = 4_096
"""Bytes of a message that is parsed unchecked: in at most ten milliseconds."""

MAX_OTHER_BYTES = 65_536
"""Bytes of a message other than an inference request."""

_PARAMETERS, _INPUTS, _OUTPUTS, _RAW = 4, 5, 6, 7
_REQUEST: Mapping[int, int] = {_PARAMETERS: 256, _INPUTS: 64, _OUTPUTS: 64, _RAW: 64}
_SHAPE, _CONTENTS = 3, 5
_TENSOR: Mapping[int, int] = {_SHAPE: 8, 4: 16}
_MAX_SHAPE_BYTES = 80
_TEXTS, _FLOATS, _DOUBLES = 8, 6, 7
_MAX_TEXTS = 65_536
_MAX_VALUES = 262_144
_VALUE_BYTES: Mapping[int, int] = {_FLOATS: 4, _DOUBLES: 8}
_MAX_OTHERS = 16
"""Fields of any other number: those that occur once, and unknown ones."""


class _Field(NamedTuple):
    number: int
    start: int
    stop: int
    is_nested: bool


def check_infer_request(data: bytes) -> None:
    """Check the bytes of a ModelInferRequest.

    Raises TooManyInputs for more tensors, parameters or typed contents than are sensible, Malformed for invalid bytes.
    """
    if len(data) <= SMALL:
        return
    for field in _count(data, 0, len(data), _REQUEST):
        if field.number == _INPUTS and field.is_nested:
            _check_tensor(data, field)


def _check_tensor(data: bytes, tensor: _Field) -> None:
    for field in _count(data, tensor.start, tensor.stop, _TENSOR):
        if field.number == _SHAPE and field.stop - field.start > _MAX_SHAPE_BYTES:
            raise TooManyInputs("a tensor has too many dimensions", param="inputs")
        if field.number == _CONTENTS and field.is_nested:
            _check_contents(data, field)


def _check_contents(data: bytes, contents: _Field) -> None:
    limits = dict.fromkeys(range(1, 8), _MAX_VALUES) | {_TEXTS: _MAX_TEXTS}
    for field in _count(data, contents.start, contents.stop, limits):
        size = (field.stop - field.start) // _VALUE_BYTES.get(field.number, 1)
        if field.number != _TEXTS and size > _MAX_VALUES:
            raise TooManyInputs("a tensor has too many typed contents: send them as raw contents", param="inputs")


def _count(data: bytes, start: int, stop: int, limits: Mapping[int, int]) -> Iterator[_Field]:
    """Yield the fields of a message, and count those of each number."""
    counts: Counter[int] = Counter()
    for field in _fields(data, start, stop):
        counts[field.number] += 1
        if counts[field.number] > limits.get(field.number, _MAX_OTHERS) or len(counts) > _MAX_OTHERS:
            raise TooManyInputs(
                "the request has too many tensors, parameters or elements; send raw contents, or split it",
                param="inputs",
            )
        yield field


def _fields(data: bytes, at: int, stop: int) -> Iterator[_Field]:
    while at < stop:
        tag, at = _read_varint(data, at, stop)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            end = _read_varint(data, at, stop)[1]
        elif kind == 1:
            end = at + 8
        elif kind == 2:
            size, at = _read_varint(data, at, stop)
            end = at + size
        elif kind == 5:
            end = at + 4
        else:
            raise Malformed("the message has an invalid field")
        if end > stop:
            raise Malformed("the message is truncated")
        yield _Field(number, at, end, kind == 2)
        at = end


def _read_varint(data: bytes, at: int, stop: int) -> tuple[int, int]:
    """Return a number and the position after it."""
    value = shift = 0
    while at < stop and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise Malformed("the message has an invalid number")
