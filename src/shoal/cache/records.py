"""How cached rows are written down: keys as bytes, records in a file, rows as MessagePack.

segment: MAGIC, then records
record: crc32 u32, size u32, digest 16 bytes, payload; little-endian; the checksum is of all that follows it
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Hashable, Iterator
from typing import Any

import msgspec
import numpy as np

from shoal.core.protocols import CountedRow, Row, VectorSet
from shoal.decoding import msgpack_decoder
from shoal.types import Array, SparseVector

MAGIC = b"shoalr1\n"
DIGEST_BYTES = 16
LARGEST = 1 << 20
"""Bytes of the largest row that is written: reading it takes the loop a fraction of a millisecond."""

_HEAD = struct.Struct("<II16s")
_CRC = struct.Struct("<I")
_DTYPES = ("<f4", "<i4")


def key_bytes(key: Hashable) -> bytes:
    """A key's content, the same in every process: equal keys give equal bytes, different ones different bytes.

    Keys are None, integers, texts, bytes and tuples of these; True counts as 1, as it does in a dictionary. Raises
    TypeError for anything else.
    """
    match key:
        case None:
            return b"n"
        case bool() | int() | np.integer():
            return b"i%d;" % int(key)
        case str():
            text = key.encode("utf-8", "surrogatepass")
            return b"s%d:%b" % (len(text), text)
        case bytes():
            return b"b%d:%b" % (len(key), key)
        case tuple():
            return b"t%d:%b" % (len(key), b"".join(map(key_bytes, key)))
        case _:
            raise TypeError(f"a key holds a {type(key).__name__}, which has no stable form")


def read_records(fd: int, size: int) -> Iterator[tuple[bytes, int, int]]:
    """(digest, offset, size) of each record, up to where the file is cut off or is none of ours. Their contents are
    checked when they are read."""
    if os.pread(fd, len(MAGIC), 0) != MAGIC:
        return
    offset = len(MAGIC)
    chunk, start = b"", 0
    while offset + _HEAD.size <= size:
        at = offset - start
        if at + _HEAD.size > len(chunk):
            start, at = offset, 0
            chunk = os.pread(fd, LARGEST, start)
            if len(chunk) < _HEAD.size:
                return
        _, length, digest = _HEAD.unpack_from(chunk, at)
        whole = _HEAD.size + length
        if not length or length > 2 * LARGEST or offset + whole > size:
            return
        yield digest, offset, whole
        offset += whole


def encode_record(digest: bytes, found: CountedRow) -> bytes:
    payload = msgspec.msgpack.encode(_StoredRow.from_row(found))
    head = _HEAD.pack(0, len(payload), digest)
    return _CRC.pack(zlib.crc32(payload, zlib.crc32(head[_CRC.size :]))) + head[_CRC.size :] + payload


def decode_record(record: bytes, digest: bytes) -> CountedRow | None:
    """None for a record that is cut off, was changed, or is of another key."""
    if len(record) < _HEAD.size:
        return None
    checksum, length, named = _HEAD.unpack_from(record)
    if named != digest or length != len(record) - _HEAD.size or zlib.crc32(record[_CRC.size :]) != checksum:
        return None
    try:
        return _DECODER.decode(record[_HEAD.size :]).to_row()
    except (msgspec.DecodeError, ValueError, TypeError):  # whole, but not what this version writes
        return None


class _StoredRow(msgspec.Struct, array_like=True):
    """A row as MessagePack: `alone` says that it is one array, then `dense`. Arrays are (dtype, shape, bytes)."""

    tokens: int
    alone: bool
    dense: Any = None
    token_vectors: Any = None
    multi: Any = None
    indices: Any = None
    values: Any = None

    @classmethod
    def from_row(cls, found: CountedRow) -> _StoredRow:
        row = found.row
        if not isinstance(row, VectorSet):
            return cls(found.tokens, True, _pack_array(row))
        sparse = row.sparse
        return cls(
            found.tokens,
            False,
            _pack_array(row.dense),
            _pack_array(row.tokens),
            _pack_array(row.multi),
            _pack_array(None if sparse is None else sparse.indices),
            _pack_array(None if sparse is None else sparse.values),
        )

    def to_row(self) -> CountedRow:
        """Raises ValueError and TypeError for what `from_row` did not make."""
        dense = _unpack_array(self.dense)
        if self.alone:
            if dense is None:
                raise ValueError("a row without numbers")
            return CountedRow(dense, self.tokens)
        indices, values = _unpack_array(self.indices), _unpack_array(self.values)
        sparse = None if indices is None or values is None else SparseVector(indices, values)
        row: Row = VectorSet(
            dense=dense, tokens=_unpack_array(self.token_vectors), sparse=sparse, multi=_unpack_array(self.multi)
        )
        return CountedRow(row, self.tokens)


_DECODER = msgpack_decoder(_StoredRow)


def _pack_array(array: Array | None) -> Any:
    if array is None:
        return None
    plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return (plain.dtype.str, plain.shape, plain.tobytes())


def _unpack_array(value: Any) -> Array | None:
    """Read-only."""
    if value is None:
        return None
    dtype, shape, data = value
    if dtype not in _DTYPES:
        raise ValueError(f"no row has numbers of type {dtype}")
    array: Array = np.frombuffer(data, dtype=dtype).reshape(shape)
    return array
