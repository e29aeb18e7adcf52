"""The size of a server's vocabulary is found by decoding single token ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.tei.vocabulary import BEYOND, POINTS, find_vocab_size
from shoal.errors import DeadlineExceeded, InputRejected, InvalidValue, ShoalError
from tests.fakes.tei import FakeTei
from tests.fakes.tei_model import VOCABULARY
from tests.unit.backends.tei.open.kit import Open, embed


class Decoder:
    """A link to a server with this vocabulary, of which the ids in `empty` decode to no text."""

    base = "http://gpu:8080"

    def __init__(self, size: int, empty: Sequence[int] = (), beyond: str | ShoalError = "") -> None:
        self.size, self.empty, self.beyond = size, frozenset(empty), beyond
        self.calls: list[int] = []

    async def decode(self, ids: Sequence[Sequence[int]], **_: Any) -> list[str]:
        self.calls.append(len(ids))
        return [self._decode(one) for (one,) in ids]

    def _decode(self, one: int) -> str:
        if one < self.size:
            return "" if one in self.empty else "a"
        if isinstance(self.beyond, ShoalError):
            raise self.beyond
        return self.beyond


def find(decoder: Decoder, max_inputs: int = 32) -> int | None:
    return asyncio.run(find_vocab_size(decoder, max_inputs, time.monotonic() + 5))  # type: ignore[arg-type]


@given(size=st.integers(1, 300_000), empty=st.sets(st.integers(0, 300_000), max_size=3), most=st.integers(1, 64))
def test_the_size_is_found_in_a_few_calls(size: int, empty: set[int], most: int) -> None:
    """Also where single ids have no text, but the last one and no two in a row."""
    empty = {each for each in empty - {size - 1} if each + 1 not in empty}
    decoder = Decoder(size, sorted(empty))
    assert find(decoder, most) == size
    assert max(decoder.calls) <= min(POINTS, most)
    assert len(decoder.calls) <= (10 if most >= POINTS else 48)


def test_an_id_without_a_text_does_not_end_the_vocabulary() -> None:
    assert find(Decoder(9, [7]), 1) == 9


@pytest.mark.parametrize("beyond", ["<unk>", InputRejected("no such id"), DeadlineExceeded("too late")])
def test_unknown_where_the_server_does_not_tell(beyond: str | ShoalError) -> None:
    """A text for an id that no vocabulary has says nothing about the others, nor does an error."""
    assert find(Decoder(30522, beyond=beyond)) is None
    assert find(Decoder(0)) is None
    assert find(Decoder(BEYOND + 1)) is None


async def test_an_id_outside_the_vocabulary_reaches_no_server(opened: Open) -> None:
    """It is an error of its own item; the last id of the vocabulary is embedded."""
    async with FakeTei() as server:
        runner = await opened(server)
        await embed(runner, [VOCABULARY - 1])
        calls = len(server.calls)
        with pytest.raises(InvalidValue, match=f"token id {VOCABULARY} .*0 to {VOCABULARY - 1}"):
            await embed(runner, [VOCABULARY])
        assert len(server.calls) == calls
