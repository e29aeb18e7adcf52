"""Rows of an engine's output to the vectors that were asked for: cut first, then normalised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from shoal.errors import InvalidValue, NotFinite, ShoalError, Unsupported
from shoal.types import Array, Embed, Vectors

Shape: TypeAlias = tuple[int | None, bool]
"""(dimensions to keep, or None for all; whether to normalise)."""

TINY = 1e-12
"""Norms are taken as at least this, as in torch.nn.functional.normalize: a vector of zeros stays one."""


def check_shape(task: Embed, dimension: int, *, gives_raw: bool) -> None:
    """Raise InvalidValue for `dimensions` that a model of `dimension` cannot give, and Unsupported for a `normalize`
    of false where the model has no other vectors than normalised ones (`gives_raw` false)."""
    if task.dimensions is not None and not 1 <= task.dimensions <= dimension:
        raise InvalidValue(
            f"dimensions must be from 1 to {dimension}, the model's own; got {task.dimensions}", param="dimensions"
        )
    if not task.normalize and not gives_raw:
        raise Unsupported("the model only gives normalised vectors; leave normalize out", param="normalize")


def resolve_shape(task: Embed, dimension: int, normalize: bool | None) -> Shape:
    """What a task asks of its rows. `normalize` False: the model's setting that its rows stay as it gives them."""
    dimensions = None if task.dimensions == dimension else task.dimensions
    return (dimensions, task.normalize and normalize is not False)


def shape_rows(rows: Array, shapes: Sequence[Shape]) -> list[Array | ShoalError]:
    """One float32 vector a row, or NotFinite for a row that holds NaN or infinity.

    When all shapes are equal the vectors are views of one C-contiguous array.
    """
    rows = rows.astype(np.float32, copy=False)
    squares = np.einsum("ij,ij->i", rows, rows)
    bad: list[int] = []
    if not np.isfinite(squares).all():  # truly bad rows, or finite ones whose square float32 cannot hold
        bad = np.flatnonzero(~np.isfinite(rows).all(axis=1)).tolist()
        rows = rows.astype(np.float64)
        rows[bad] = 0.0
        squares = np.einsum("ij,ij->i", rows, rows)
    vectors: list[Array | ShoalError]
    if len(shapes) == 1 or all(shape == shapes[0] for shape in shapes):
        vectors = list(_apply_shape(rows, shapes[0], squares))
    else:
        vectors = [rows[0]] * len(shapes)
        for shape in set(shapes):
            members = [i for i, other in enumerate(shapes) if other == shape]
            for i, vector in zip(members, _apply_shape(rows[members], shape, squares[members]), strict=True):
                vectors[i] = vector
    for i in bad:
        vectors[i] = not_finite_error()
    return vectors


def not_finite_error() -> NotFinite:
    """What an item gets whose answer is no number."""
    return NotFinite("the model answered NaN or infinity for this input; try another one or precision f32")


def _apply_shape(rows: Array, shape: Shape, squares: Array) -> Vectors:
    dimensions, normalize = shape
    if dimensions is not None:
        rows = rows[:, :dimensions]
        squares = np.einsum("ij,ij->i", rows, rows) if normalize else squares
    if normalize:
        rows = np.divide(rows, np.maximum(np.sqrt(squares), TINY)[:, None], order="C")
    return np.ascontiguousarray(rows, dtype=np.float32)
