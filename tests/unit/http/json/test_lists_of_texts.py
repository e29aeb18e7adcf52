"""Lists that hold texts and lists of texts: decoded in turns to what msgspec makes of them at once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import Malformed, WrongType
from shoal.http.json import decoder, lists

KIND = str | list[str | list[str]]
TEXTS = st.text(max_size=8)
PADDING = " " * decoder.LARGE


class Asked(msgspec.Struct):
    inputs: KIND
    more: int = 0


async def decoded(inputs: Any, limit: int = 10_000) -> Any:
    """As a body that is large by what stands around its list."""
    body = b'{"inputs":%b%b,"more":7}' % (msgspec.json.encode(inputs), PADDING.encode())
    asked = await decoder.Decoder(Asked, "test", "inputs", limit).decode_async(body)
    assert asked.more == 7
    return asked.inputs


@given(st.lists(TEXTS | st.lists(TEXTS, max_size=lists.MAX_TEXTS), max_size=8))
async def test_the_same_as_at_once(inputs: list[Any]) -> None:
    """Texts and lists in any mixture, escapes and surrogates included."""
    assert await decoded(inputs) == inputs


async def test_many_pairs() -> None:
    """More than is decoded in one turn."""
    pairs = [[f"first {at}", f'second "{at}" \\ été'] for at in range(5000)]
    assert await decoded(pairs) == pairs


async def test_an_inner_list_that_is_too_long_ends_it() -> None:
    """No more of it is read than shows that it is too long; nor of the rest."""
    assert await decoded([["a"], ["b", "c", "d", "e"], ["f"]]) == [["a"], ["b", "c", "d"]]
    assert await decoded([["a"]] * 9, limit=3) == [["a"]] * 4


@pytest.mark.parametrize("wrong", [7, {}, [], None, True])
async def test_what_is_no_text(wrong: Any) -> None:
    """Said with its place."""
    with pytest.raises(WrongType) as caught:
        await decoded([["a"], ["b", wrong]])
    assert "'inputs[1][1]' is invalid: expected `str`" in caught.value.message
    assert caught.value.param == "inputs"


@pytest.mark.parametrize("lead", [b"", b"\xe2", b"\xf0\x9f", b"x" * 9])
@pytest.mark.parametrize("shift", range(5))
async def test_what_is_no_character(lead: bytes, shift: int) -> None:
    """A text is cut between characters; where none begins near the cut it is not UTF-8."""
    text = b"x" * (lists._STEP - shift) + lead + b"\x80" * 9 + b"x" * 90
    with pytest.raises(Malformed, match="not UTF-8"):
        await decoder.Decoder(Asked, "test", "inputs", 9).decode_async(b'{"inputs":["%b"]}' % text)


@pytest.mark.parametrize("character", ["é", "€", "🐟"])
@pytest.mark.parametrize("shift", range(7))
async def test_a_cut_inside_of_a_character(character: str, shift: int) -> None:
    """Loses nothing."""
    text = "x" * (lists._STEP - shift) + character * 9
    assert await decoded([msgspec.json.decode(msgspec.json.encode(text))]) == [text]
