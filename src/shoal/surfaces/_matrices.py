"""Several vectors an input, as entries of a reply's list: some numbers at a time, with the loop free between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from shoal.surfaces import _rows
from shoal.types import Array

NUMBERS = 65_536
"""Numbers encoded at once: about 2 ms."""


async def entries(each: Sequence[Array], head: Callable[[int], bytes]) -> list[bytes]:
    """`HEAD[[...], ...]}` of each float32 [l, width], with commas between; `head` answers what stands before."""
    pieces: list[bytes] = []
    since = 0
    for index, matrix in enumerate(each):
        rows = _rows.contiguous(matrix)
        pieces.append((b"," if index else b"") + head(index) + b"[")
        step = max(1, NUMBERS // max(1, rows.shape[1]))
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            pieces.append((b"," if start else b"") + _rows.numbers(some)[1:-1])
            since += some.size
            if since >= NUMBERS:
                since = 0
                await asyncio.sleep(0)
        pieces.append(b"]}")
    return pieces
