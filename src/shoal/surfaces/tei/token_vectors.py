"""Encode token vectors and sparse vectors as text-embeddings-inference does, a few milliseconds at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from shoal.surfaces.shared import matrices, vector_encoding
from shoal.types import Array, SparseVector

T = TypeVar("T")

SLICE_NUMBERS = 32_768
"""Numbers encoded at once, in about a millisecond."""

SLICE_ENTRIES = 2048
"""Entries of sparse vectors encoded at once, in about 2 ms."""


async def encode_matrices(each: list[Array]) -> bytes | list[bytes]:
    """Encode float32 [l, width] matrices as `[[[...], ...], ...]`. Remove them from the list as they are encoded."""

    def slices(index: int) -> Iterator[tuple[int, bytes]]:
        rows = matrices.take_matrix(each, index)
        step = max(1, SLICE_NUMBERS // max(1, rows.shape[1]))
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            yield SLICE_NUMBERS if len(some) == step else some.size, vector_encoding.encode_numbers(some)[1:-1]

    return await _encode_arrays(range(len(each)), slices, SLICE_NUMBERS, SLICE_NUMBERS // 256)


async def encode_sparse(each: Sequence[SparseVector]) -> bytes | list[bytes]:
    """Encode sparse vectors as `[[{"index":...,"value":...}, ...], ...]`, without zero weights."""

    def slices(vector: SparseVector) -> Iterator[tuple[int, bytes]]:
        there = vector.values != 0
        indices, values = vector.indices[there].astype("<i4"), vector_encoding.to_contiguous(vector.values[there])
        for start in range(0, len(indices), SLICE_ENTRIES):
            names = vector_encoding.encode_numbers(indices[start : start + SLICE_ENTRIES])[1:-1].split(b",")
            weights = vector_encoding.encode_numbers(values[start : start + SLICE_ENTRIES])[1:-1].split(b",")
            pairs = zip(names, weights, strict=True)
            yield len(names), b",".join([b'{"index":%b,"value":%b}' % pair for pair in pairs])

    return await _encode_arrays(each, slices, SLICE_ENTRIES, SLICE_ENTRIES // 256)


async def _encode_arrays(
    each: Sequence[T], slices: Callable[[T], Iterator[tuple[int, bytes]]], max_size: int, min_size: int
) -> bytes | list[bytes]:
    """Encode a JSON array of arrays.

    `slices` yields the content of one array in pieces, each with its size. After a total size of `max_size`, the event
    loop gets to run. Each array adds `min_size` to the total, about the cost of creating it.
    """
    pieces: list[bytes] = []
    written, since = [b"["], 0
    for index, one in enumerate(each):
        written.append(b",[" if index else b"[")
        since += min_size
        for number, (size, piece) in enumerate(slices(one)):
            written += [b",", piece] if number else [piece]
            since += size
            if since >= max_size:
                pieces.append(b"".join(written))
                written, since = [], 0
                await asyncio.sleep(0)
        written.append(b"]")
    last = b"".join([*written, b"]"])
    return [*pieces, last] if pieces else last
