"""Bounds how much a protobuf message holds before it is parsed: a field of two bytes can become an object of hundreds.

Source: the encoding of protobuf; the field numbers are those of `kserve/protocol.proto`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shoal.errors import Malformed, TooManyInputs
from shoal.kserve.codec import MAX_DIMENSIONS
from shoal.surfaces.kserve.wire import MAX_PARAMETERS, MAX_TENSORS, MAX_VALUES

SMALL = 4_096
"""Bytes of a message that is parsed unchecked: in at most ten milliseconds."""

MAX_OTHER_BYTES = 65_536
"""Bytes of a message other than an inference request."""

MAX_FIELDS = 8_192
"""Fields of a request and of its tensors, visited in about ten milliseconds; a typed text is a field."""

_PARAMETERS, _INPUTS, _OUTPUTS, _RAW = 4, 5, 6, 7
_REQUEST: Mapping[int, int] = {
    _PARAMETERS: MAX_PARAMETERS,
    _INPUTS: MAX_TENSORS,
    _OUTPUTS: MAX_TENSORS,
    _RAW: MAX_TENSORS,
}
_SHAPE, _TENSOR_PARAMETERS, _CONTENTS = 3, 4, 5
_TENSOR: Mapping[int, int] = {_SHAPE: MAX_DIMENSIONS, _TENSOR_PARAMETERS: 16, _CONTENTS: 1}
_MAX_SHAPE_BYTES = 10 * MAX_DIMENSIONS
_FLOATS, _DOUBLES, _TEXTS = 6, 7, 8
_ELEMENTS: Mapping[int, int] = dict.fromkeys(range(1, _TEXTS + 1), MAX_FIELDS)
_WIDTHS: Mapping[int, int] = {_FLOATS: 4, _DOUBLES: 8}
_CONTINUED = bytes(range(0x80, 0x100))
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
    if len(data) > SMALL:
        _RequestCheck(data).run()


class _RequestCheck:
    """The check of one request. Fields and values are counted over all of its tensors."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._fields = self._values = 0

    def run(self) -> None:
        for field in self._visit(0, len(self._data), _REQUEST):
            if field.number == _INPUTS and field.is_nested:
                self._check_tensor(field)

    def _check_tensor(self, tensor: _Field) -> None:
        for field in self._visit(tensor.start, tensor.stop, _TENSOR):
            if field.number == _SHAPE and field.stop - field.start > _MAX_SHAPE_BYTES:
                raise TooManyInputs(f"a tensor has too many dimensions: send at most {MAX_DIMENSIONS}", param="inputs")
            if field.number == _CONTENTS and field.is_nested:
                for each in self._visit(field.start, field.stop, _ELEMENTS):
                    self._count_values(each)

    def _count_values(self, field: _Field) -> None:
        if field.number != _TEXTS and field.is_nested:
            packed = self._data[field.start : field.stop]
            width = _WIDTHS.get(field.number)
            self._values += len(packed) // width if width else len(packed.translate(None, _CONTINUED))
        if self._values > MAX_VALUES:
            raise TooManyInputs(f"there are more than {MAX_VALUES} typed values: send raw contents", param="inputs")

    def _visit(self, start: int, stop: int, limits: Mapping[int, int]) -> Iterator[_Field]:
        """Yield the fields of a message, and count those of each number and all."""
        counts: Counter[int] = Counter()
        for field in _fields(self._data, start, stop):
            self._fields += 1
            counts[field.number] += 1
            if (
                counts[field.number] > limits.get(field.number, _MAX_OTHERS)
                or len(counts) > _MAX_OTHERS
                or self._fields > MAX_FIELDS
            ):
                raise TooManyInputs(
                    "the request has too many tensors, parameters or typed elements: send raw contents, or split it",
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
            raise Malformed("the message is not valid protobuf: it has an invalid field")
        if end > stop:
            raise Malformed("the message is not valid protobuf: it is truncated")
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
    raise Malformed("the message is not valid protobuf: it has an invalid number")
