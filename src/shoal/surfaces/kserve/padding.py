"""Joins vectors of different lengths into tensors with a batch axis. Pure.

Padded, not concatenated with offsets: the first axis of every output is the batch, as the ModelConfig says, so that
clients and ensembles of Triton can cut a response into rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from shoal.surfaces.shared.matrices import check_numbers
from shoal.types import Array

PAD_INDEX = -1
"""The index of padding in sparse vectors. No vocabulary has it: a client that forgets the lengths meets an error, where
0 would overwrite the weight of a token."""


def pad_rows(rows: Sequence[Array], fill: int = 0) -> Array:
    """Return arrays [length, ...] as one [rows, longest, ...], which has at least one place a row.

    Raises TooManyInputs if it would have too many numbers.
    """
    shape = (len(rows), max(1, *map(len, rows)), *rows[0].shape[1:])
    check_numbers(prod(shape), "inputs")
    padded = np.full(shape, fill, rows[0].dtype)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return padded


def count_rows(rows: Sequence[Array]) -> Array:
    """Return the lengths of arrays, int32 [rows, 1]."""
    return np.array([[len(row)] for row in rows], np.int32)
