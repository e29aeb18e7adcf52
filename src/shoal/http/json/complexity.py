"""How much there is in JSON, counted without decoding it: what stands in strings counts for nothing.

The interpreter is held while JSON is decoded, for as long as there are values in it and not for as long as it is.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

_STEP = 65_536  # bytes that are looked at in one go: a fraction of a millisecond, and ten of nothing but short strings
_MARKS = (b"{", b"[", b",")
_WHOLE = re.compile(rb'(?s:[^"]++|"(?:[^"\\]++|\\.)*+")*+')
_STRING = re.compile(rb'(?s)"(?:[^"\\]++|\\.)*+"')
_INSIDE = re.compile(rb'(?s:[^"\\]++|\\.)*+')
_QUOTE = 0x22


def count_pieces(raw: bytes, most: int) -> int:
    """Objects, lists and commas of `raw`, which is JSON: no fewer than its values, but for one.

    Beyond `most` it counts no further, and answers more than `most`.
    """
    total = 0
    for total in _iterate_counts(memoryview(raw), most):  # noqa: B007 (the last one counts)
        pass
    return total


async def count_pieces_async(raw: memoryview, most: int) -> int:
    """As `count_pieces`, in turns with the event loop."""
    total = 0
    for total in _iterate_counts(raw, most):  # noqa: B007 (the last one counts)
        await asyncio.sleep(0)
    return total


def _iterate_counts(raw: memoryview, most: int) -> Iterator[int]:
    """The count so far, whenever others may have a turn; the last one is the answer."""
    total = 0
    for at in range(0, len(raw), _STEP):
        total += _count_marks(bytes(raw[at : at + _STEP]))
        yield total
    if total <= most:
        return  # with those inside of strings: of most bodies that is all that need be known
    total = at = 0
    inside = False
    while at < len(raw) and total <= most:
        end = _match_end(_INSIDE if inside else _WHOLE, raw, at)
        if not inside:
            total += _count_marks(_STRING.sub(b"", bytes(raw[at:end])))
        met = end < len(raw) and raw[end] == _QUOTE
        if end == at and not met:
            return  # half an escape: no JSON
        at = end + met
        inside ^= met
        yield total


def _count_marks(piece: bytes) -> int:
    return sum(map(piece.count, _MARKS))


def _match_end(pattern: re.Pattern[bytes], raw: memoryview, at: int) -> int:
    found = pattern.match(raw, at, at + _STEP)
    assert found is not None  # each pattern matches nothing at all, too
    return found.end()
