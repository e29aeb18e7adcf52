"""Chunks put together to answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import EngineFailed
from shoal.surfaces.openai.events import compute_timings
from shoal.surfaces.openai.wire_chat import Timings
from shoal.surfaces.shared.generation import Answer, collect
from shoal.types import Chunk, TokenLogprob, ToolCall, ToolDelta, Usage


class Chunks:
    def __init__(self, chunks: Sequence[Chunk], error: Exception | None = None) -> None:
        self._chunks = chunks
        self._error = error
        self.closed = False

    async def stream(self) -> AsyncGenerator[Chunk]:
        try:
            for chunk in self._chunks:
                yield chunk
            if self._error is not None:
                raise self._error
        finally:
            self.closed = True


async def answer_of(*chunks: Chunk) -> Answer:
    return await collect(Chunks(chunks).stream())


async def test_choices() -> None:
    """By their index, whatever the order; calls by theirs; the usage is no choice."""
    token = TokenLogprob(token="b", logprob=-1.0)
    answer = await answer_of(
        Chunk(index=1, reasoning="h", cut=2),
        Chunk(index=0, text="a"),
        Chunk(index=1, reasoning="m", text="x"),
        Chunk(index=0, text="b", logprobs=[token], finish_reason="length"),
        Chunk(index=1, tools=[ToolDelta(index=1, id="2", name="g"), ToolDelta(index=0, id="1", name="f")]),
        Chunk(index=1, tools=[ToolDelta(index=0, arguments="{"), ToolDelta(index=0, arguments="}")]),
        Chunk(index=1, finish_reason="tool_calls"),
        Chunk(usage=Usage(prompt_tokens=1)),
    )
    first, second = answer.choices
    assert (first.index, first.text, first.logprobs, first.finish_reason) == (0, "ab", [token], "length")
    assert (second.index, second.text, second.reasoning, second.finish_reason) == (1, "x", "hm", "tool_calls")
    assert second.tools == [ToolCall(id="1", name="f", arguments="{}"), ToolCall(id="2", name="g")]
    assert (answer.usage, answer.raw, answer.cut) == (Usage(prompt_tokens=1), None, 2)
    assert 0 < answer.first_s <= answer.seconds


async def test_the_answer_of_an_upstream() -> None:
    """Its bytes, put together, with its dialect; and the usage beside them."""
    answer = await answer_of(Chunk(raw=("d", b"{")), Chunk(raw=("d", b"}"), usage=Usage(completion_tokens=3)))
    assert (answer.raw, answer.choices, answer.usage) == (("d", b"{}"), [], Usage(completion_tokens=3))


async def test_nothing() -> None:
    """No chunk at all is an answer without choices."""
    answer = await answer_of()
    assert (answer.choices, answer.usage, answer.first_s, answer.pieces) == ([], None, 0.0, 0)


async def test_pieces() -> None:
    """Those that tell something are counted."""
    answer = await answer_of(Chunk(text="a"), Chunk(), Chunk(reasoning="b"), Chunk(finish_reason="stop"))
    assert answer.pieces == 2


async def test_errors() -> None:
    """They pass, and the chunks are closed."""
    chunks = Chunks([Chunk(text="a")], EngineFailed("broken"))
    with pytest.raises(EngineFailed):
        await collect(chunks.stream())
    assert chunks.closed


@given(st.lists(st.tuples(st.integers(0, 3), st.text(max_size=4)), max_size=20))
async def test_no_text_is_lost(pieces: list[tuple[int, str]]) -> None:
    """Each choice's pieces in their order."""
    answer = await answer_of(*(Chunk(index=index, text=text) for index, text in pieces))
    assert {choice.index: choice.text for choice in answer.choices} == {
        index: "".join(text for own, text in pieces if own == index) for index, _ in pieces
    }


@pytest.mark.parametrize(
    ("tokens", "first_s", "pieces", "expected"),
    [
        (40, 0.98, 2, None),  # a call that was held back
        (40, 0.80, 4, None),
        (40, 0.80, 40, 0.80),  # a stream of tokens after a long prompt
        (40, 0.80, 5, 0.80),
        (40, 0.50, 2, 0.50),
        (40, 0.995, 40, 0.995),
        (40, 0.30, 1, None),  # one piece, whenever it came
        (1, 0.98, 1, 0.98),
    ],
)
def test_unknown_timings_are_omitted(tokens: int, first_s: float, pieces: int, expected: float | None) -> None:
    """No time is told that cannot be known, as that of the prompt of an answer that was sent at once."""
    usage = Usage(prompt_tokens=10, completion_tokens=tokens)
    timings = compute_timings(usage, first_s, 1.0, pieces)
    assert (timings.prompt_n, timings.predicted_n) == (10, tokens)
    if expected is None:
        assert timings == Timings(prompt_n=10, predicted_n=tokens, cache_n=0)
        return
    assert timings.prompt_ms == expected * 1000
    assert timings.predicted_per_second == pytest.approx(tokens / (1.0 - expected))


@pytest.mark.parametrize(
    ("usage", "first_s", "seconds", "expected"),
    [
        (Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=6), 0.5, 2.0, (6, 500, 12, 6, 1500, 4, 4)),
        (Usage(prompt_tokens=10, completion_tokens=6), 2.0, 2.0, (10, 2000, 5, 6, 0, 0, 0)),
        (Usage(), 0.0, 0.0, (0, 0, 0, 0, 0, 0, 0)),
    ],
)
def test_timings(usage: Usage, first_s: float, seconds: float, expected: tuple[float, ...]) -> None:
    """llama.cpp's names, and nothing divides by zero."""
    timings = compute_timings(usage, first_s, seconds, 6)
    assert (
        *(timings.prompt_n, timings.prompt_ms, timings.prompt_per_second),
        *(timings.predicted_n, timings.predicted_ms, timings.predicted_per_second, timings.cache_n),
    ) == expected
