"""How much memory contexts may take, and how many blocks of the cache that is."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

BLOCK_TOKENS = 32
"""Tokens of a block of the cache, on a processor."""

SHARE = 4
MOST_BYTES = 4 * 2**30
LEAST_BYTES = 64 * 2**20
"""Of the memory that is free, the fourth part, within these bounds, where the settings leave it open."""

_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


def block_bytes(heads: Iterable[tuple[int, int]], precision: str) -> int:
    """Bytes of one block for all cached tensors, given as (heads, width of a head), keys and values in turn.

    Cached in 8 bits, which is the library's default, a key has a scale and a zero point in f32 for each channel of the
    block, and a value for each token.
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


def cache_budget(asked_mb: int, available: int) -> int:
    """Bytes for contexts: what the operator says, else a share of what is free."""
    return asked_mb * 2**20 if asked_mb else min(MOST_BYTES, max(LEAST_BYTES, available // SHARE))


def count_blocks(budget_bytes: int, one: int, *, asked: bool, context_tokens: int | None, streams: int) -> int:
    """Blocks that fit into the budget; one at least, and unless they were asked for no more than could ever be used."""
    count = max(1, budget_bytes // one)
    if context_tokens and not asked:
        count = min(count, streams * -(-context_tokens // BLOCK_TOKENS))
    return count


def available_bytes() -> int:
    """Bytes that this process may still take: what is free, narrowed by the control group's limit."""
    free = _meminfo(Path("/proc/meminfo"))
    group = Path("/sys/fs/cgroup")
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    return free if limit is None else max(0, min(free, limit - (used or 0)))


def _meminfo(path: Path) -> int:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:  # not on macOS
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return LEAST_BYTES


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
