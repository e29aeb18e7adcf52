"""How long inputs may be, as the files of a model say it: with the place that says so, and within bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.errors import ModelFileError

LONGEST = 1_048_576
"""Tokens of one input. Far above any model's, and so low that what is held ready for one input has an end."""

LONGEST_QUERY = 8_192
"""Tokens of a late-interaction model's query: a query of one letter may be filled up to so many."""


class Length(NamedTuple):
    """So many tokens, special ones included, as `key` of `file` says."""

    tokens: int
    file: str
    key: str


def within(tokens: int, file: str, key: str, most: int = LONGEST) -> int:
    """The same tokens. Raises ModelFileError for less than one, and for more than `most`."""
    if not 1 <= tokens <= most:
        raise ModelFileError(f"must be 1 to {most} tokens, not {tokens}", file=file, key=key)
    return tokens


def shortest(lengths: Sequence[Length]) -> Length:
    """The length that counts where several are stated. Raises ModelFileError when it is out of bounds."""
    least = min(lengths, key=lambda length: length.tokens)
    within(*least)
    return least
