"""Counts what JSON holds without decoding it, and bounds what is decoded in one go.

Decoding holds the interpreter, and no other thread or task runs meanwhile: for about 40 ns a number, 200 ns a list, and
3 ns a byte. Counting happens in steps, in turns with the event loop. Characters inside strings do not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

from shoal.errors import TooManyInputs

MAX_VALUES = 1_048_576
"""Values of one body beside the allowance of each input: 2,048 lists of 512 token ids, decoded in about 40 ms."""

VALUES_PER_INPUT = 32
"""Allowance of each input that a request may hold: a pair of texts counts as 17, a text in an object as 16."""

WEIGHT = 5
"""What a text, a key, a list or an object counts as: in time and memory each costs several numbers."""

_STEP = 65_536  # bytes that are looked at in one go: a fraction of a millisecond, or a few of nothing but short strings


class _Marks(NamedTuple):
    commas: int
    openings: int
    quotes: int


def count_pieces(raw: bytes, most: int) -> int:
    """Count objects, lists and commas of `raw`, which is JSON: no fewer than its values, but for one.

    Counting stops once the result is above `most`.
    """
    total = 0
    for marks in _scan(memoryview(raw)):
        total += marks.commas + marks.openings
        if total > most:
            break
    return total


async def count_pieces_async(raw: memoryview, most: int) -> int:
    """As `count_pieces`, in turns with the event loop."""
    total = 0
    for marks in _scan(raw):
        total += marks.commas + marks.openings
        if total > most:
            break
        await asyncio.sleep(0)
    return total


async def check_values(raw: memoryview, max_inputs: int, param: str | None = None) -> None:
    """Raises TooManyInputs for JSON that would hold the event loop while it is decoded.

    `max_inputs`: how many inputs the request may hold; `param`: the field that `raw` is, None for a whole body.
    """
    most = MAX_VALUES + VALUES_PER_INPUT * max_inputs
    numbers = quotes = 0
    for marks in _scan(raw):
        numbers += marks.commas + WEIGHT * marks.openings
        quotes += marks.quotes
        if numbers + WEIGHT * (quotes // 2) > most:
            subject = "The body" if param is None else f"'{param}'"
            raise TooManyInputs(
                f"{subject} holds more than {most} values, where each text, list and object counts as {WEIGHT}; split "
                "the request.",
                param=param,
            )
        await asyncio.sleep(0)


def _scan(raw: memoryview) -> Iterator[_Marks]:
    """Yield what each step of `raw` adds. Pairs of backslashes and escaped quotes go, then strings begin and end at
    every quote."""
    is_inside = 0
    rest = b""
    for at in range(0, len(raw), _STEP):
        step = rest + bytes(raw[at : at + _STEP])
        # A backslash at the end may belong to the next byte.
        rest = b"\\" if (len(step) - len(step.rstrip(b"\\"))) % 2 else b""
        parts = step.removesuffix(rest).replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[is_inside::2])
        quotes = len(parts) - 1
        is_inside ^= quotes % 2
        yield _Marks(outside.count(b","), outside.count(b"[") + outside.count(b"{"), quotes)
