"""The pauses between attempts to reach a server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Pauses of an opener or a health check that waits for a server."""


def retry_pauses(pauses: Sequence[float] = ()) -> Iterator[float]:
    """Yield the pauses, or RETRY_S, in order, then the last one forever."""
    pauses = pauses or RETRY_S
    yield from pauses
    yield from itertools.repeat(pauses[-1])
