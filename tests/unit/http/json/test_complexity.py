"""How much there is in JSON, without decoding it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.http.json import complexity
from shoal.http.json.complexity import count_pieces, count_pieces_async

JSON = st.recursive(
    st.none() | st.integers() | st.text('{[,"\\a\u20ac', max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('{,"\\b', max_size=4), inner, max_size=4),
    max_leaves=30,
)


def counted(value: Any) -> int:
    """Objects, lists and commas, of what was decoded."""
    if not isinstance(value, dict | list):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    return 1 + max(0, len(inner) - 1) + sum(map(counted, inner))


@settings(max_examples=200)
@given(value=JSON, step=st.integers(2, 50), ascii_only=st.booleans())
def test_what_is_in_strings_is_not_counted(value: Any, step: int, ascii_only: bool) -> None:
    """Wherever the turns cut it: inside of a string, of an escape, of a character."""
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(complexity, "_STEP", step)
        expected = counted(value)
        assert count_pieces(raw, expected) == asyncio.run(count_pieces_async(memoryview(raw), expected)) == expected
        assert count_pieces(raw, expected - 1) >= expected


async def test_it_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is far too much, not all is looked at twice."""
    looked: list[int] = []
    marks = complexity._count_marks

    def seen(piece: bytes) -> int:
        looked.append(len(piece))
        return marks(piece)

    monkeypatch.setattr(complexity, "_count_marks", seen)
    raw = b"[%b[]]" % (b"[]," * 1_000_000)
    assert await count_pieces_async(memoryview(raw), 1000) > 1000
    assert sum(looked) <= len(raw) + complexity._STEP
    assert max(looked) <= complexity._STEP


@pytest.mark.parametrize("raw", [b"", b'"', b'"\\', b'["a', b'{"a\\'])
def test_what_is_no_json(raw: bytes) -> None:
    """It comes to an end."""
    assert count_pieces(raw * 3, -1) >= 0
