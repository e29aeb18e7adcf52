"""How large an answer may be, from what was asked: whatever is larger is refused before it is decoded, since a decoder
holds the loop, and makes objects of many times the size of the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from shoal.backends._http_client import MAX_ANSWER_BYTES, NUMBER_BYTES, bytes_of
from shoal.errors import EngineFailed

MOST_WIDTH = 2**14
"""Numbers of a vector while that of the model is not known: four times those of the widest that there are."""

MOST_TERMS = 2**16
"""Of a sparse vector: real ones have a few hundred."""

LABEL_BYTES = 6
"""Of a character in JSON at most: an escape."""

KEYS_BYTES = 64
"""Around a number that has a name."""

ANY_LABEL_BYTES = 1024
"""For a label whose name is not known."""

FEW_BYTES = 2**19
"""A body of so many bytes is decoded in milliseconds, whatever it holds."""


class Room(NamedTuple):
    """What an answer may have: `size` in bytes, `lists` with itself, and `commas`, in and between them."""

    size: int
    lists: int
    commas: int

    @classmethod
    def of_vectors(cls, count: int, width: int | None) -> Self:
        numbers = count * (width or MOST_WIDTH)
        return cls(_capped(bytes_of(numbers)), 1 + count, numbers - 1)

    @classmethod
    def of_tokens(cls, count: int, tokens: int, width: int | None) -> Self:
        """For `count` texts of at most so many tokens."""
        numbers = count * tokens * (width or MOST_WIDTH)
        return cls(_capped(bytes_of(numbers)), 1 + count + count * tokens, numbers - 1)

    @classmethod
    def of_sparse(cls, count: int) -> Self:
        numbers = count * 2 * MOST_TERMS
        return cls(_capped(bytes_of(numbers)), 1 + count, numbers - 1)

    @classmethod
    def of_scores(cls, count: int, labels: Sequence[str]) -> Self:
        names = ANY_LABEL_BYTES if len(labels) == 1 else LABEL_BYTES * sum(map(len, labels))
        size = bytes_of(0) + count * (names + len(labels) * (NUMBER_BYTES + KEYS_BYTES))
        # Names may hold both, and that of a lone label anything.
        spare = ANY_LABEL_BYTES if len(labels) == 1 else 0
        lists = 1 + count * (1 + spare + sum(label.count("[") for label in labels))
        commas = count * (2 * len(labels) + spare + sum(label.count(",") for label in labels)) - 1
        return cls(_capped(size), lists, commas)

    def check(self, body: bytes, where: str) -> None:
        """Raise EngineFailed for a body that holds more. A small one is left to its decoder."""
        if len(body) <= FEW_BYTES:
            return
        data = np.frombuffer(body, dtype=np.uint8)
        if np.count_nonzero(data == ord("[")) > self.lists or np.count_nonzero(data == ord(",")) > self.commas:
            raise EngineFailed(f"the server at {where} answered more rows, or numbers, than it was asked for")


def _capped(size: int) -> int:
    return min(size, MAX_ANSWER_BYTES)
