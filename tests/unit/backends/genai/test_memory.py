"""The memory available for contexts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.genai.memory import BLOCK_TOKENS, LEAST_BYTES, MOST_BYTES, block_bytes, cache_budget, count_blocks

MB = 2**20


@pytest.mark.parametrize(("precision", "size"), [("f32", 16384), ("f16", 8192), ("bf16", 8192), ("u8", 6656)])
def test_a_block_of_the_tiny_model(precision: str, size: int) -> None:
    """The size is the one the library reports for two layers of four heads of width eight."""
    assert block_bytes([(4, 8)] * 4, precision) == size


def test_the_budget() -> None:
    """The configured size is used; else a quarter of the free memory, within bounds."""
    assert cache_budget(500, 10) == 500 * MB
    assert cache_budget(0, 8 * 2**30) == 2 * 2**30
    assert cache_budget(0, 2**40) == MOST_BYTES
    assert cache_budget(0, 0) == LEAST_BYTES


@given(
    free_bytes=st.integers(0, 2**40),
    one=st.integers(1, 2**24),
    explicit=st.booleans(),
    context=st.none() | st.integers(1, 10**6),
    streams=st.integers(1, 4096),
)
def test_blocks(free_bytes: int, one: int, explicit: bool, context: int | None, streams: int) -> None:
    """At least one block fits, all are within the budget, and by default no more than can be used."""
    count = count_blocks(free_bytes, one, explicit=explicit, context_tokens=context, streams=streams)
    assert count >= 1
    assert count == 1 or count * one <= free_bytes
    if context and not explicit:
        assert (count - 1) * BLOCK_TOKENS < streams * (context + BLOCK_TOKENS)
