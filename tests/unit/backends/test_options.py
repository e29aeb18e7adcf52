"""How the processor is divided."""

from __future__ import annotations

import pytest

from shoal.backends._options import MOST_STREAMS, cores_within, layout, usable_cores


@pytest.mark.parametrize(
    ("asked", "cores", "given"),
    [
        ((0, 0), 1, (1, 1)),
        ((0, 0), 2, (2, 2)),
        ((0, 0), 64, (MOST_STREAMS, 64)),
        ((1, 0), 2, (1, 2)),
        ((0, 3), 16, (3, 3)),
        ((4, 0), 2, (4, 4)),
        ((3, 5), 2, (3, 5)),
    ],
)
def test_layout_fills_in_zeros_only(asked: tuple[int, int], cores: int, given: tuple[int, int]) -> None:
    """What is configured stands; the rest comes from the cores, a thread a stream at least."""
    assert layout(*asked, cores) == given


@pytest.mark.parametrize(
    ("affinity", "cpu_max", "cores"),
    [(8, "max", 8), (8, "max 100000\n", 8), (8, "150000 100000\n", 2), (8, "50000 100000", 1), (2, "800000 100000", 2)],
)
def test_a_quota_narrows_the_affinity(affinity: int, cpu_max: str, cores: int) -> None:
    """Half a core is one, one and a half are two, and a quota never adds any."""
    assert cores_within(affinity, cpu_max) == cores


def test_usable_cores_is_at_least_one() -> None:
    """Whatever the machine, there is a core to run on."""
    assert usable_cores() >= 1
