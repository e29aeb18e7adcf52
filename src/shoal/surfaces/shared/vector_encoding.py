"""Encode vectors straight from a contiguous float32 array, in slices, so that the event loop can run in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson
import pybase64

from shoal.types import Array

SLICE = 64
"""Rows encoded at once. orjson holds the GIL, for about 2 ms with 64 rows of 1,024 numbers."""

ELEMENTS = 4096
"""Tokens encoded at once, in about 3 ms."""

RowEncoder = Callable[[int, Array], bytes]


def encode_numbers(row: Array) -> bytes:
    """Encode one vector, or a slice of vectors, as a JSON array of shortest-form float32 numbers."""
    return orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)


def encode_base64(row: Array) -> bytes:
    """Encode one vector as the base64 of its little-endian float32 bytes, without quotes."""
    return pybase64.b64encode(row.data)


def to_contiguous(vectors: Array) -> Array:
    """Convert to little-endian float32 in C order, without a copy if it already is."""
    return np.ascontiguousarray(vectors, dtype="<f4")


async def encode_rows(vectors: Array, encode: RowEncoder, head: bytes, tail: bytes) -> bytes | list[bytes]:
    """Encode the body `head`, the rows through `encode` with commas between, and `tail`, as bytes or as pieces."""
    rows = len(vectors)
    if rows == 1:
        return head + encode(0, vectors[0]) + tail
    pieces = [head]
    for start in range(0, rows, SLICE):
        if start:
            pieces.append(b",")
            await asyncio.sleep(0)
        stop = min(start + SLICE, rows)
        pieces.append(b",".join([encode(at, vectors[at]) for at in range(start, stop)]))
    pieces.append(tail)
    return pieces if rows > SLICE else b"".join(pieces)


async def encode_arrays(lists: Sequence[Sequence[Any]], encode: Callable[[Any], bytes]) -> list[bytes]:
    """Encode a JSON array of arrays, a few thousand elements at a time, even if one of `lists` holds millions.

    `encode` returns the JSON array of a slice of one list.
    """
    pieces: list[bytes] = []
    written = [b"["]
    since = 0
    for index, each in enumerate(lists):
        written.append(b",[" if index else b"[")
        for start in range(0, len(each), ELEMENTS):
            some = encode(each[start : start + ELEMENTS])[1:-1]
            written += [b",", some] if start else [some]
            since += len(each[start : start + ELEMENTS])
            if since >= ELEMENTS:
                pieces.append(b"".join(written))
                since, written = 0, []
                await asyncio.sleep(0)
        written.append(b"]")
    return [*pieces, b"".join([*written, b"]"])]


async def encode_array(count: int, encode: Callable[[int, int], bytes], step: int = SLICE) -> bytes | list[bytes]:
    """Encode a JSON array of `count` elements, `step` at a time; `encode(start, stop)` returns the array of a slice."""
    pieces = [b"["]
    for start in range(0, count, step):
        if start:
            pieces.append(b",")
            await asyncio.sleep(0)
        pieces.append(encode(start, min(start + step, count))[1:-1])
    pieces.append(b"]")
    return pieces if count > step else b"".join(pieces)
