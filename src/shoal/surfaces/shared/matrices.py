"""Encode several vectors per input as entries of a reply, in slices, so that the event loop can run in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from shoal.errors import TooManyInputs
from shoal.surfaces.shared import vector_encoding
from shoal.types import Array, TextItem

if TYPE_CHECKING:
    from shoal.core.registry import ModelCard

SLICE_NUMBERS = 65_536
"""Numbers encoded at once, in about 2 ms."""

MAX_NUMBERS = 16_777_216
"""Maximum numbers in one reply with a vector per token: 32 texts of 512 tokens at a width of 1,024. They take 64 MB,
and about 200 MB as JSON."""

_CHARACTERS_PER_TOKEN = 8
"""Characters per token for a lower bound: hardly any text has fewer tokens, including code with its spaces."""

_EMPTY = np.empty((0, 0), np.float32)


def check_inputs(card: ModelCard, inputs: Sequence[TextItem], field: str) -> None:
    """Refuse inputs before inference if even a lower bound of their tokens gives too many numbers.

    Raises TooManyInputs. A model without a known dimension is not checked.
    """
    facts = card.facts
    if facts is None or not facts.dimension:
        return
    longest = facts.max_input_tokens or sum(map(len, inputs))
    tokens = sum(
        max(1, min(longest, len(each) // _CHARACTERS_PER_TOKEN if isinstance(each, str) else len(each)))
        for each in inputs
    )
    check_numbers(tokens * facts.dimension, field)


def check_matrices(each: Sequence[Array], field: str) -> None:
    """Raise TooManyInputs if the matrices hold more than `MAX_NUMBERS` numbers."""
    check_numbers(sum(one.size for one in each), field)


def check_numbers(numbers: int, field: str) -> None:
    """Raise TooManyInputs for a response of more than `MAX_NUMBERS` numbers."""
    if numbers > MAX_NUMBERS:
        raise TooManyInputs(
            f"'{field}' is too large: the response would exceed {MAX_NUMBERS} numbers; split the request.",
            param=field,
        )


def take_matrix(each: list[Array], index: int) -> Array:
    """Take one matrix out of the list, contiguous, so that it is freed once its JSON is written."""
    matrix, each[index] = each[index], _EMPTY
    return vector_encoding.to_contiguous(matrix)


async def encode_entries(each: list[Array], head: Callable[[int], bytes]) -> list[bytes]:
    """Encode each float32 [l, width] as `HEAD[[...], ...]}`, with commas between. `head` returns the HEAD of an index.

    Remove the matrices from the list as they are encoded.
    """
    pieces: list[bytes] = []
    since = 0
    for index in range(len(each)):
        rows = take_matrix(each, index)
        pieces.append((b"," if index else b"") + head(index) + b"[")
        step = max(1, SLICE_NUMBERS // max(1, rows.shape[1]))
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            pieces.append((b"," if start else b"") + vector_encoding.encode_numbers(some)[1:-1])
            since += some.size
            if since >= SLICE_NUMBERS:
                since = 0
                await asyncio.sleep(0)
        pieces.append(b"]}")
    return pieces
