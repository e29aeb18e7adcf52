"""Convert rows of an engine's output to the requested vectors: truncate to `dimensions` first, then normalize."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from shoal.errors import InvalidValue, NotFinite, ShoalError, Unsupported
from shoal.types import Array, Embed

Shape: TypeAlias = tuple[int | None, bool]
"""(dimensions to keep, or None for all; whether to normalize)."""

WHOLE: Shape = (None, False)
"""The shape of rows that stay as they are."""

TINY = 1e-12
"""Minimum norm to divide by, as in torch.nn.functional.normalize: a zero vector stays zero."""


def resolve_shape(task: Embed, dimension: int, *, gives_raw: bool, normalize: bool | None) -> Shape:
    """Return the shape of the dense vectors that a task requests.

    `normalize` False is the operator's setting to leave rows as the model returns them. Raises InvalidValue if
    `dimensions` is not between 1 and `dimension`, and Unsupported for `normalize=False` if the model only has
    normalized vectors (`gives_raw` false).
    """
    if "dense" not in task.outputs:
        return WHOLE
    if task.dimensions is not None and not 1 <= task.dimensions <= dimension:
        raise InvalidValue(
            f"dimensions must be between 1 and {dimension}, the model's own (got {task.dimensions})", param="dimensions"
        )
    if not task.normalize and not gives_raw:
        raise Unsupported("the model only returns normalized vectors; omit normalize", param="normalize")
    dimensions = None if task.dimensions == dimension else task.dimensions
    return (dimensions, task.normalize and normalize is not False)


def shape_rows(rows: Array, shapes: Sequence[Shape]) -> list[Array | ShoalError]:
    """Return one float32 vector per row, or NotFinite for a row that holds NaN or infinity.

    When all shapes are equal the vectors are views of one C-contiguous array.
    """
    rows = rows.astype(np.float32, copy=False)
    squares = np.einsum("ij,ij->i", rows, rows)
    bad: list[int] = []
    if not np.isfinite(squares).all():  # bad rows, or finite ones whose squares overflow float32
        bad = np.flatnonzero(~np.isfinite(rows).all(axis=1)).tolist()
        rows = rows.astype(np.float64)
        rows[bad] = 0.0
        squares = np.einsum("ij,ij->i", rows, rows)
    vectors: list[Array | ShoalError] = [rows[0]] * len(shapes)
    for shape in set(shapes):
        places = [place for place, other in enumerate(shapes) if other == shape]
        own, own_squares = (rows, squares) if len(places) == len(shapes) else (rows[places], squares[places])
        dimensions, normalize = shape
        if dimensions is not None:
            own = own[:, :dimensions]
            own_squares = np.einsum("ij,ij->i", own, own) if normalize else own_squares
        if normalize:
            own = np.divide(own, np.maximum(np.sqrt(own_squares), TINY)[:, None], order="C")
        for place, vector in zip(places, np.ascontiguousarray(own, dtype=np.float32), strict=True):
            vectors[place] = vector
    for place in bad:
        vectors[place] = not_finite_error()
    return vectors


def not_finite_error() -> NotFinite:
    """The error for an item whose result holds NaN or infinity."""
    return NotFinite("the model returned NaN or infinity for this input; try another input, or precision f32")
