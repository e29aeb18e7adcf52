"""Limits the size of a response by what was requested.

A larger response is rejected before it is decoded: a decoder blocks the event loop, and its objects take many times the
size of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from shoal.backends.base.http_client import MAX_ANSWER_BYTES, NUMBER_BYTES, bytes_for_numbers
from shoal.errors import UpstreamFailed

MAX_VECTOR_WIDTH = 2**14
"""Assumed vector width while the model's is unknown: four times that of the widest models."""

MAX_SPARSE_TERMS = 2**16
"""Maximum terms in a sparse vector. Real ones have a few hundred."""

LABEL_BYTES = 6
"""Maximum bytes of one character in JSON, which is an escape."""

KEYS_BYTES = 64
"""Bytes around a number that has a name."""

ANY_LABEL_BYTES = 1024
"""Maximum bytes of a label whose name is not known."""

INDENT_BYTES = 32
"""Bytes before each number, for servers that write one number per line."""

ENTRY_BYTES = 1024
"""Bytes of an entry beyond its numbers: its keys and what servers add."""

ENTRY_MARKS = 16
"""Brackets, commas or braces of each kind in one entry beyond its numbers."""

SPARE_MARKS = 256
"""Brackets, commas or braces of each kind beyond all entries: usage and what servers add."""

FEW_BYTES = 2**19
"""A body up to this size decodes in milliseconds, whatever it holds."""


class ResponseLimit(NamedTuple):
    """Limits of one response: `size` in bytes, `lists` including the outer one, and `commas` in and between them.
    `objects` is set where commas do not bound their number."""

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
        """Return the limit for `count` texts of at most `tokens` tokens each."""
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
        # Label names may contain brackets and commas, and an unknown lone label may contain anything.
        spare = ANY_LABEL_BYTES if len(labels) == 1 else 0
        lists = 1 + count * (1 + spare + sum(label.count("[") for label in labels))
        commas = count * (2 * len(labels) + spare + sum(label.count(",") for label in labels)) - 1
        return cls(_cap_size(size), lists, commas)

    @classmethod
    def of_entries(cls, count: int, numbers: int, *, named: int = 0, names: bytes = b"", texts: bytes = b"") -> Self:
        """Return the limit for one object with `count` entries of `numbers` numbers each, `named` of them in objects of
        their own.

        `names` may occur in every entry, and `texts`, the request's texts, once. Names and texts may contain any
        character.
        """
        size = bytes_for_numbers(0) + LABEL_BYTES * len(texts)
        each = ENTRY_BYTES + (NUMBER_BYTES + INDENT_BYTES) * numbers + KEYS_BYTES * named + LABEL_BYTES * len(names)
        spare = {
            mark: SPARE_MARKS + texts.count(mark) + count * (ENTRY_MARKS + names.count(mark))
            for mark in (b"[", b",", b"{")
        }
        return cls(
            _cap_size(size + count * each),
            spare[b"["],
            spare[b","] + count * (numbers + named),
            spare[b"{"] + count * named,
        )

    def check(self, body: bytes, where: str) -> None:
        """Raise UpstreamFailed for a body that exceeds the limits. A small body is left to its decoder."""
        if len(body) <= FEW_BYTES:
            return
        data = np.frombuffer(body, dtype=np.uint8)
        limits = {"[": self.lists, ",": self.commas, "{": self.objects}
        if any(limit is not None and np.count_nonzero(data == ord(mark)) > limit for mark, limit in limits.items()):
            raise UpstreamFailed(f"the server at {where} returned more rows or numbers than were requested")


def _cap_size(size: int) -> int:
    return min(size, MAX_ANSWER_BYTES)
