"""Several vectors an input, as entries of a reply's list: some numbers at a time, with the loop free between them."""

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
"""Numbers encoded at once: about 2 ms."""

MAX_NUMBERS = 16_777_216
"""Numbers that one request may be answered with where each token has a vector: 32 texts of 512 tokens at a width of
1,024. They are 64 MB, and about 200 MB of JSON."""

_CHARACTERS_PER_TOKEN = 8
"""Of a text, for each token that is certainly there: hardly any has fewer tokens, code and its spaces included."""

_EMPTY = np.empty((0, 0), np.float32)


def check_inputs(card: ModelCard, inputs: Sequence[TextItem], field: str) -> None:
    """Refuse before the work what is too much by any count: of a text no more tokens are assumed than it surely has.

    Raises TooManyInputs. Nothing is known of a model without a dimension.
    """
    facts = card.facts
    if facts is None or not facts.dimension:
        return
    longest = facts.max_input_tokens or sum(map(len, inputs))
    tokens = sum(
        max(1, min(longest, len(each) // _CHARACTERS_PER_TOKEN if isinstance(each, str) else len(each)))
        for each in inputs
    )
    _check_size(tokens * facts.dimension, field)


def check_matrices(each: Sequence[Array], field: str) -> None:
    """Refuse to write what is too much. Raises TooManyInputs."""
    _check_size(sum(one.size for one in each), field)


def _check_size(numbers: int, field: str) -> None:
    if numbers > MAX_NUMBERS:
        raise TooManyInputs(
            f"'{field}' comes to more than the {MAX_NUMBERS} numbers that one request may be answered with, a vector "
            "for each token: split it.",
            param=field,
        )


def take_matrix(each: list[Array], index: int) -> Array:
    """One of the matrices, contiguous; the list lets go of it, so that it does not stand beside its text."""
    matrix, each[index] = each[index], _EMPTY
    return vector_encoding.to_contiguous(matrix)


async def encode_entries(each: list[Array], head: Callable[[int], bytes]) -> list[bytes]:
    """`HEAD[[...], ...]}` of each float32 [l, width], with commas between; `head` answers what stands before.

    Takes the matrices out of the list as it goes.
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
