"""Estimates tokens per input where a server counts them per call or not at all."""

from __future__ import annotations

from collections.abc import Sequence

BYTES_PER_TOKEN = 4
"""Estimated bytes per token, for usage where the server does not count."""


def split_proportionally(total: int, sizes: Sequence[int]) -> list[int]:
    """Split `total` into integers proportional to `sizes`. Their sum is `total`."""
    whole = sum(sizes) or 1
    parts: list[int] = []
    seen = assigned = 0
    for size in sizes:
        seen += size
        parts.append(total * seen // whole - assigned)
        assigned += parts[-1]
    if assigned < total and parts:  # all sizes are zero
        parts[-1] += total - assigned
    return parts


def utf8_size(text: str) -> int:
    """Return the size in bytes in UTF-8."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
