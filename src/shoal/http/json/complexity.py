"""Counts the values in JSON without decoding it, and limits how much is decoded at once.

Decoding holds the GIL, so no other thread or task runs, for about 40 ns per number, 200 ns per list and 3 ns per byte.
Counting runs in steps and yields to the event loop in between. Characters inside strings do not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

from shoal.errors import TooManyInputs

MAX_VALUES = 1_048_576
"""Maximum values of a body beyond the allowance per input: 2,048 lists of 512 token ids, decoded in about 40 ms."""

VALUES_PER_INPUT = 32
"""Allowance for each input that a request may hold: a pair of texts counts as 17, a text in an object as 16."""

WEIGHT = 5
"""Values that a text, key, list or object counts as: each costs the time and memory of several numbers."""

_STEP = 65_536  # bytes scanned per step: a fraction of a millisecond, or a few milliseconds if all are short strings


class _Marks(NamedTuple):
    commas: int
    openings: int
    quotes: int


def count_pieces(raw: bytes, limit: int) -> int:
    """Count objects, lists and commas in the JSON `raw`: at least the number of its values less one.

    Counting stops once the result exceeds `limit`.
    """
    total = 0
    for marks in _scan(memoryview(raw)):
        total += marks.commas + marks.openings
        if total > limit:
            break
    return total


async def count_pieces_async(raw: memoryview, limit: int) -> int:
    """Like `count_pieces`, but yields to the event loop between steps."""
    total = 0
    for marks in _scan(raw):
        total += marks.commas + marks.openings
        if total > limit:
            break
        await asyncio.sleep(0)
    return total


async def check_values(raw: memoryview, max_inputs: int, param: str | None = None) -> None:
    """Raise TooManyInputs for JSON whose decoding would block the event loop too long.

    `max_inputs`: maximum inputs of the request; `param`: the field that holds `raw`, None for a whole body.
    """
    most = MAX_VALUES + VALUES_PER_INPUT * max_inputs
    numbers = quotes = 0
    for marks in _scan(raw):
        numbers += marks.commas + WEIGHT * marks.openings
        quotes += marks.quotes
        if numbers + WEIGHT * (quotes // 2) > most:
            subject = "The body" if param is None else f"'{param}'"
            raise TooManyInputs(
                f"{subject} has more than {most} values, counting each string, list and object as {WEIGHT}; split the "
                "request.",
                param=param,
            )
        await asyncio.sleep(0)


def _scan(raw: memoryview) -> Iterator[_Marks]:
    """Yield the counts of each step of `raw`. Without escaped backslashes and quotes, each remaining quote begins or
    ends a string."""
    is_inside = 0
    rest = b""
    for at in range(0, len(raw), _STEP):
        step = rest + bytes(raw[at : at + _STEP])
        # A backslash at the end of the step may escape the next byte.
        rest = b"\\" if (len(step) - len(step.rstrip(b"\\"))) % 2 else b""
        parts = step.removesuffix(rest).replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[is_inside::2])
        quotes = len(parts) - 1
        is_inside ^= quotes % 2
        yield _Marks(outside.count(b","), outside.count(b"[") + outside.count(b"{"), quotes)
