"""How large an answer may be, from what was asked: whatever is larger is refused before it is decoded, since a decoder
holds the loop, and makes objects of many times the size of the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from shoal.backends.base.http_client import MAX_ANSWER_BYTES, NUMBER_BYTES, bytes_for_numbers
from shoal.errors import UpstreamFailed

MAX_VECTOR_WIDTH = 2**14
"""Numbers of a vector while that of the model is not known: four times those of the widest that there are."""

MAX_SPARSE_TERMS = 2**16
"""Of a sparse vector: real ones have a few hundred."""

LABEL_BYTES = 6
"""Of a character in JSON at most: an escape."""

KEYS_BYTES = 64
"""Around a number that has a name."""

ANY_LABEL_BYTES = 1024
"""For a label whose name is not known."""

INDENT_BYTES = 32
"""Before a number, of servers that write each on a line of its own."""

ENTRY_BYTES = 1024
"""Of an entry beside its numbers: its keys, and what servers add of their own."""

ENTRY_MARKS = 16
"""Of each kind of them, in an entry beside its numbers."""

SPARE_MARKS = 256
"""Of each kind of them, beside all entries: usage, and what servers add of their own."""

FEW_BYTES = 2**19
"""A body of so many bytes is decoded in milliseconds, whatever it holds."""


class ResponseLimit(NamedTuple):
    """What an answer may have: `size` in bytes, `lists` with itself, and `commas`, in and between them; and `objects`,
    where they are not told by the commas."""

    size: int
    lists: int
    commas: int
    objects: int | None = None

    @classmethod
    def of_vectors(cls, count: int, width: int | None) -> Self:
        numbers = count * (width or MAX_VECTOR_WIDTH)
        return cls(_cap_size(bytes_for_numbers(numbers)), 1 + count, numbers - 1)

    @classmethod
    def of_tokens(cls, count: int, tokens: int, width: int | None) -> Self:
        """For `count` texts of at most so many tokens."""
        numbers = count * tokens * (width or MAX_VECTOR_WIDTH)
        return cls(_cap_size(bytes_for_numbers(numbers)), 1 + count + count * tokens, numbers - 1)

    @classmethod
    def of_sparse(cls, count: int) -> Self:
        numbers = count * 2 * MAX_SPARSE_TERMS
        return cls(_cap_size(bytes_for_numbers(numbers)), 1 + count, numbers - 1)

    @classmethod
    def of_scores(cls, count: int, labels: Sequence[str]) -> Self:
        names = ANY_LABEL_BYTES if len(labels) == 1 else LABEL_BYTES * sum(map(len, labels))
        size = bytes_for_numbers(0) + count * (names + len(labels) * (NUMBER_BYTES + KEYS_BYTES))
        # Names may hold both, and that of a lone label anything.
        spare = ANY_LABEL_BYTES if len(labels) == 1 else 0
        lists = 1 + count * (1 + spare + sum(label.count("[") for label in labels))
        commas = count * (2 * len(labels) + spare + sum(label.count(",") for label in labels)) - 1
        return cls(_cap_size(size), lists, commas)

    @classmethod
    def of_entries(cls, count: int, numbers: int, *, named: int = 0, names: bytes = b"", told: bytes = b"") -> Self:
        """For one object that holds `count` entries with so many numbers each, of which `named` are in objects of their
        own. `names` may stand in every entry, and `told`, which is what was sent, once: names and texts hold anything.
        """
        size = bytes_for_numbers(0) + LABEL_BYTES * len(told)
        each = ENTRY_BYTES + (NUMBER_BYTES + INDENT_BYTES) * numbers + KEYS_BYTES * named + LABEL_BYTES * len(names)
        spare = {
            mark: SPARE_MARKS + told.count(mark) + count * (ENTRY_MARKS + names.count(mark))
            for mark in (b"[", b",", b"{")
        }
        return cls(
            _cap_size(size + count * each),
            spare[b"["],
            spare[b","] + count * (numbers + named),
            spare[b"{"] + count * named,
        )

    def check(self, body: bytes, where: str) -> None:
        """Raise UpstreamFailed for a body that holds more. A small one is left to its decoder."""
        if len(body) <= FEW_BYTES:
            return
        data = np.frombuffer(body, dtype=np.uint8)
        most = {"[": self.lists, ",": self.commas, "{": self.objects}
        if any(room is not None and np.count_nonzero(data == ord(mark)) > room for mark, room in most.items()):
            raise UpstreamFailed(f"the server at {where} answered more rows, or numbers, than it was asked for")


def _cap_size(size: int) -> int:
    return min(size, MAX_ANSWER_BYTES)
