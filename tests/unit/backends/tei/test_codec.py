"""The tokenizer of a server, offered to clients."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.tei.codec import TeiCodec, to_tokens
from shoal.backends.tei.engine import TeiEngine
from shoal.backends.tei.link import TokenWire
from shoal.core.protocols import TextCodec, Token
from shoal.errors import InvalidValue, TransportFailed, Unavailable, UpstreamFailed
from tests.fakes.tei import FakeTei
from tests.fakes.tei_model import CLS, SEP, Script, word_id
from tests.unit.backends.tei.kit import close, engine_of


@pytest.fixture
async def server() -> AsyncIterator[FakeTei]:
    async with FakeTei(Script(max_client_batch_size=2, prompts='{"query": "find "}')) as made:
        yield made


@pytest.fixture
async def engine(server: FakeTei) -> AsyncIterator[TeiEngine]:
    made = await engine_of(server)
    yield made
    await close(made)


@pytest.fixture
def codec(engine: TeiEngine) -> TeiCodec:
    return TeiCodec([engine])


async def spans(codec: TeiCodec, text: str, prompt_name: str | None = None) -> list[tuple[str, int | None, int | None]]:
    (row,) = await codec.tokenize([text], add_special_tokens=False, prompt_name=prompt_name)
    return [(token.text, token.start, token.stop) for token in row]


async def test_tokens_with_their_frame(codec: TeiCodec) -> None:
    assert isinstance(codec, TextCodec)
    (row,) = await codec.tokenize(["two words"], add_special_tokens=True, prompt_name=None)
    assert row == [
        Token(CLS, "[CLS]", True, None, None),
        Token(word_id("two"), "two", False, 0, 3),
        Token(word_id("words"), "words", False, 4, 9),
        Token(SEP, "[SEP]", True, None, None),
    ]


async def test_offsets_count_characters(codec: TeiCodec) -> None:
    """The server counts bytes."""
    assert await spans(codec, "drei Wörter für 日本 x") == [
        ("drei", 0, 4),
        ("Wörter", 5, 11),
        ("für", 12, 15),
        ("日本", 16, 18),
        ("x", 19, 20),
    ]


async def test_offsets_behind_a_prompt_that_is_not_known_here(codec: TeiCodec) -> None:
    assert await spans(codec, "für dich", "query") == [("find", 0, 4), ("für", 5, 8), ("dich", 9, 13)]


async def test_many_texts_are_split_into_calls(server: FakeTei, codec: TeiCodec) -> None:
    rows = await codec.tokenize(list("abcde"), add_special_tokens=False, prompt_name=None)
    assert [row[0].text for row in rows] == list("abcde")
    assert [len(call.inputs) for call in server.calls] == [2, 2, 1]
    texts = await codec.decode([[7], [8, 9], [CLS, 5]], skip_special_tokens=True)
    assert texts == ["w7", "w8 w9", "w5"]
    assert await codec.decode([[CLS, 5]], skip_special_tokens=False) == ["w101 w5"]
    assert await codec.decode([], skip_special_tokens=True) == []


async def test_what_it_refuses(codec: TeiCodec) -> None:
    with pytest.raises(InvalidValue, match=r"`nobody` but it was not found.*\['query'\]"):
        await codec.tokenize(["a"], add_special_tokens=True, prompt_name="nobody")
    with pytest.raises(InvalidValue, match="cannot be empty"):
        await codec.decode([[]], skip_special_tokens=True)


async def test_servers_that_are_not_there(server: FakeTei, engine: TeiEngine) -> None:
    async with FakeTei(Script(seed=1)) as other:
        away = await engine_of(other, serving=False)
        assert await TeiCodec([away, engine]).decode([[7]], skip_special_tokens=True) == ["w7"]
        with pytest.raises(Unavailable):
            await TeiCodec([away]).decode([[7]], skip_special_tokens=True)
        await close(away)
    await server.stop()
    with pytest.raises(TransportFailed):
        await TeiCodec([engine]).decode([[7]], skip_special_tokens=True)


async def test_a_refused_key_is_the_operators_matter(server: FakeTei, codec: TeiCodec) -> None:
    server.change(api_key="other")
    with pytest.raises(UpstreamFailed, match="upstream_api_key"):
        await codec.decode([[7]], skip_special_tokens=True)


CHARACTERS = st.text(st.sampled_from("aé日🐟 "), min_size=1, max_size=12)


@given(CHARACTERS, st.data())
def test_any_slices_of_any_text(text: str, data: st.DataObject) -> None:
    """Where tokens are slices of the text, offsets point to their characters."""
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=6, unique=True)))
    slices = list(itertools.pairwise(ends))
    row = [TokenWire(1, text[a:b], False, len(text[:a].encode()), len(text[:b].encode())) for a, b in slices]
    assert [(token.start, token.stop) for token in to_tokens(text, row)] == slices


@given(CHARACTERS, st.lists(st.tuples(st.text(max_size=3), st.integers(-5, 50), st.integers(-5, 50)), max_size=5))
def test_any_answer_is_handled(text: str, tokens: list[tuple[str, int, int]]) -> None:
    row = [TokenWire(1, word, False, start, stop) for word, start, stop in tokens]
    assert len(to_tokens(text, row)) == len(row)
