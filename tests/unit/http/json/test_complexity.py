"""Counting the values in JSON without decoding it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import TooManyInputs
from shoal.http.json import complexity
from shoal.http.json.complexity import check_values, count_pieces, count_pieces_async

JSON = st.recursive(
    st.none() | st.integers() | st.text('{[,"\\a\u20ac', max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('{,"\\b', max_size=4), inner, max_size=4),
    max_leaves=30,
)


def count_values(value: Any) -> int:
    """Return the number of objects, lists and commas in a decoded value."""
    if not isinstance(value, dict | list):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    return 1 + max(0, len(inner) - 1) + sum(map(count_values, inner))


def weigh_values(value: Any) -> int:
    """Return the same with weights."""
    if isinstance(value, str):
        return complexity.WEIGHT
    if not isinstance(value, dict | list):
        return 0
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    return complexity.WEIGHT + max(0, len(value) - 1) + sum(map(weigh_values, inner))


@given(value=JSON, step=st.integers(2, 50), ascii_only=st.booleans())
def test_string_contents_are_not_counted(value: Any, step: int, ascii_only: bool) -> None:
    """The loop turns may split a string, an escape or a character anywhere."""
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(complexity, "_STEP", step)
        expected = count_values(value)
        assert count_pieces(raw, expected) == asyncio.run(count_pieces_async(memoryview(raw), expected)) == expected
        assert count_pieces(raw, expected - 1) >= expected


async def test_it_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the body is far too large, only the first step is scanned."""
    monkeypatch.setattr(complexity, "_STEP", 3000)
    raw = b"[%b[]]" % (b"[]," * 1_000_000)
    assert 1000 < await count_pieces_async(memoryview(raw), 1000) <= 3000
    assert 1000 < count_pieces(raw, 1000) <= 3000


@given(value=JSON, step=st.integers(2, 50), ascii_only=st.booleans())
def test_values_are_weighed(value: Any, step: int, ascii_only: bool) -> None:
    """A text, a key, a list and an object weigh five each, a comma one: refused only above the limit."""
    raw = memoryview(json.dumps(value, ensure_ascii=ascii_only).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(complexity, "_STEP", step)
        patch.setattr(complexity, "MAX_VALUES", weigh_values(value))
        asyncio.run(check_values(raw, 0))
        patch.setattr(complexity, "MAX_VALUES", weigh_values(value) - 1)
        with pytest.raises(TooManyInputs) as caught:
            asyncio.run(check_values(raw, 0, "field"))
        assert caught.value.param == "field"
        asyncio.run(check_values(raw, 1))


@pytest.mark.parametrize("raw", [b"", b'"', b'"\\', b'["a', b'{"a\\'])
def test_invalid_json(raw: bytes) -> None:
    """The scan terminates."""
    assert count_pieces(raw * 3, -1) >= 0
