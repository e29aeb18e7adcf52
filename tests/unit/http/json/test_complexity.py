"""How much there is in JSON, without decoding it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import TooManyInputs
from shoal.http.json import complexity
from shoal.http.json.complexity import check_values, count_pieces, count_pieces_async

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


def weighed(value: Any) -> int:
    """The same, with what the weights make of it."""
    if isinstance(value, str):
        return complexity.WEIGHT
    if not isinstance(value, dict | list):
        return 0
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    return complexity.WEIGHT + max(0, len(value) - 1) + sum(map(weighed, inner))


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
    """Of what is far too much, no more than the first step is looked at."""
    monkeypatch.setattr(complexity, "_STEP", 3000)
    raw = b"[%b[]]" % (b"[]," * 1_000_000)
    assert 1000 < await count_pieces_async(memoryview(raw), 1000) <= 3000
    assert 1000 < count_pieces(raw, 1000) <= 3000


@settings(max_examples=200)
@given(value=JSON, step=st.integers(2, 50), ascii_only=st.booleans())
def test_values_are_weighed(value: Any, step: int, ascii_only: bool) -> None:
    """A text, a key, a list and an object each as five, a comma as one: refused above the bound, and not at it."""
    raw = memoryview(json.dumps(value, ensure_ascii=ascii_only).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(complexity, "_STEP", step)
        patch.setattr(complexity, "MAX_VALUES", weighed(value))
        asyncio.run(check_values(raw, 0))
        patch.setattr(complexity, "MAX_VALUES", weighed(value) - 1)
        with pytest.raises(TooManyInputs) as caught:
            asyncio.run(check_values(raw, 0, "field"))
        assert caught.value.param == "field"
        asyncio.run(check_values(raw, 1))


@pytest.mark.parametrize("raw", [b"", b'"', b'"\\', b'["a', b'{"a\\'])
def test_what_is_no_json(raw: bytes) -> None:
    """It comes to an end."""
    assert count_pieces(raw * 3, -1) >= 0
