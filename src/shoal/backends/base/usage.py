"""Tokens of single inputs, where a server counts those of a whole call or none at all."""

from __future__ import annotations

from collections.abc import Sequence

BYTES_PER_TOKEN = 4
"""For usage where the server does not count."""


def split_proportionally(total: int, sizes: Sequence[int]) -> list[int]:
    """`total` in parts as large as the sizes are to each other; their sum is `total`."""
    whole = sum(sizes) or 1
    parts: list[int] = []
    seen = given = 0
    for size in sizes:
        seen += size
        parts.append(total * seen // whole - given)
        given += parts[-1]
    if given < total and parts:  # sizes of nothing but zeros
        parts[-1] += total - given
    return parts


def utf8_size(text: str) -> int:
    """Bytes in UTF-8."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
