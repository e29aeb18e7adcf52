"""Checks the width of a model's vectors. If it changes, the server runs another model, whose vectors must not be
served."""

from __future__ import annotations

import numpy as np

from shoal.backends.base.presence import Presence
from shoal.errors import UpstreamFailed
from shoal.types import Vectors

TINY = 1e-12


def check_width(presence: Presence, found: int, expected: int, where: str) -> None:
    """Raise UpstreamFailed for vectors of an unexpected width, and take the server out of service until it is
    readmitted."""
    if found == expected:
        return
    error = UpstreamFailed(
        f"the server at {where} returned vectors of {found} numbers instead of {expected}: it is a different model; "
        "serve it under a separate name, or reload the model"
    )
    if presence.ready:  # other replicas may be right; this one is checked before it serves again
        presence.mark_lost(error)
    raise error


def cut_vectors(rows: Vectors, dimensions: int | None, *, normalize: bool) -> Vectors:
    """Cut rows to `dimensions` for a server that does not do so itself. The result equals that of servers that can."""
    if dimensions is None or rows.shape[1] <= dimensions:
        return rows
    rows = np.ascontiguousarray(rows[:, :dimensions])
    if not normalize:
        return rows
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    found: Vectors = np.divide(rows, np.maximum(norms, np.float32(TINY)))
    return found
