"""Planning streams and threads."""

from __future__ import annotations

import pytest

from shoal.backends.local.options import MAX_STREAMS, plan_threads


@pytest.mark.parametrize(
    ("requested", "cores", "expected"),
    [
        ((0, 0), 1, (1, 1)),
        ((0, 0), 2, (2, 2)),
        ((0, 0), 64, (MAX_STREAMS, 64)),
        ((1, 0), 2, (1, 2)),
        ((0, 3), 16, (3, 3)),
        ((4, 0), 2, (4, 4)),
        ((3, 5), 2, (3, 5)),
    ],
)
def test_layout_fills_in_zeros_only(requested: tuple[int, int], cores: int, expected: tuple[int, int]) -> None:
    """Configured values are kept; zeros are filled from the cores, with at least one thread per stream."""
    assert plan_threads(*requested, cores) == expected
