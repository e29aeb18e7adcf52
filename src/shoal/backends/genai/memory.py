"""Computes the memory budget of the KV cache and its number of blocks."""

from __future__ import annotations

from collections.abc import Iterable

BLOCK_TOKENS = 32
"""Tokens per cache block on a CPU."""

SHARE = 4
MOST_BYTES = 4 * 2**30
LEAST_BYTES = 64 * 2**20
"""Default budget: a quarter of the free memory, within these bounds."""

_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


def block_bytes(heads: Iterable[tuple[int, int]], precision: str) -> int:
    """Return the bytes of one block of all cached tensors, given as (heads, width of a head), keys and values
    alternating.

    In 8 bits, the library's default, keys have an f32 scale and zero point per channel of the block, values per token.
    """
    total = 0
    for number, (count, width) in enumerate(heads):
        if precision in _BYTES:
            total += count * BLOCK_TOKENS * width * _BYTES[precision]
        elif number % 2:
            total += count * BLOCK_TOKENS * (width + 8)
        else:
            total += count * (BLOCK_TOKENS + 8) * width
    return total


def cache_budget(configured_mb: int, available: int) -> int:
    """Return the bytes for contexts: the operator's setting, else a share of the free memory."""
    return configured_mb * 2**20 if configured_mb else min(MOST_BYTES, max(LEAST_BYTES, available // SHARE))


def count_blocks(budget_bytes: int, one: int, *, explicit: bool, context_tokens: int | None, streams: int) -> int:
    """Return the blocks that fit into the budget: at least one and, unless `explicit`, no more than can be used."""
    count = max(1, budget_bytes // one)
    if context_tokens and not explicit:
        count = min(count, streams * -(-context_tokens // BLOCK_TOKENS))
    return count
