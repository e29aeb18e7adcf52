"""Serialization of cached rows: keys as bytes, records in a file, rows as MessagePack.

segment: MAGIC, then records record: crc32 u32, size u32, digest 16 bytes, payload; little-endian; the checksum covers
everything after it
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
"""Maximum bytes of a stored row, so that the event loop reads it in a fraction of a millisecond."""

_HEAD = struct.Struct("<II16s")
_CRC = struct.Struct("<I")
_DTYPES = ("<f4", "<i4")


def key_bytes(key: Hashable) -> bytes:
    """Serialize a key identically in every process: equal keys give equal bytes, different keys different bytes.

    Keys are None, integers, strings, bytes and tuples of these; True counts as 1, as in a dictionary. Raises TypeError
    for anything else.
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
    """Yield (digest, offset, size) of each record up to the first truncated or foreign one. Payloads are not verified
    here."""
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
    """Decode a record; return None if it is truncated, corrupt or belongs to another key."""
    if len(record) < _HEAD.size:
        return None
    checksum, length, named = _HEAD.unpack_from(record)
    if named != digest or length != len(record) - _HEAD.size or zlib.crc32(record[_CRC.size :]) != checksum:
        return None
    try:
        return _DECODER.decode(record[_HEAD.size :]).to_row()
    except (msgspec.DecodeError, ValueError, TypeError):  # intact, but not in this version's format
        return None


class _StoredRow(msgspec.Struct, array_like=True):
    """A row as MessagePack. `alone` means that the row is one array, held in `dense`. Arrays are (dtype, shape,
    bytes)."""

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
        """Rebuild the row. Raises ValueError and TypeError for data that `from_row` did not produce."""
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
    """Return a read-only array over `value`."""
    if value is None:
        return None
    dtype, shape, data = value
    if dtype not in _DTYPES:
        raise ValueError(f"no row has numbers of type {dtype}")
    array: Array = np.frombuffer(data, dtype=dtype).reshape(shape)
    return array
