"""Vectors to bytes: straight from one contiguous float32 array, in slices, with the loop free between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson
import pybase64

from shoal.types import Array

SLICE = 64
"""Rows encoded at once. orjson holds the interpreter: 64 rows of 1,024 numbers take it about 2 ms."""

ELEMENTS = 4096
"""Tokens encoded at once: about 3 ms."""

RowEncoder = Callable[[int, Array], bytes]


def encode_numbers(row: Array) -> bytes:
    """One vector, or a slice of them, as a JSON array of shortest-form float32 numbers."""
    return orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)


def encode_base64(row: Array) -> bytes:
    """One vector as the base64 of its little-endian float32 bytes, without quotes."""
    return pybase64.b64encode(row.data)


def to_contiguous(vectors: Array) -> Array:
    """Little-endian float32 in C order; no copy where it is that already."""
    return np.ascontiguousarray(vectors, dtype="<f4")


async def encode_rows(vectors: Array, encode: RowEncoder, head: bytes, tail: bytes) -> bytes | list[bytes]:
    """`head`, the rows as `encode` writes them with commas between, `tail`: pieces that together are the body."""
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
    """A JSON array of arrays, made some thousand elements at a time, also where one of `lists` holds millions.

    `encode` answers the JSON array of a slice of one of them.
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
    """A JSON array of `count` elements, made `step` at a time: `encode(start, stop)` answers a JSON array of those."""
    pieces = [b"["]
    for start in range(0, count, step):
        if start:
            pieces.append(b",")
            await asyncio.sleep(0)
        pieces.append(encode(start, min(start + step, count))[1:-1])
    pieces.append(b"]")
    return pieces if count > step else b"".join(pieces)
