"""Durations in Go's format."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.durations import parse_duration

UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300.0), ("1h30m", 5400.0), ("-1h", -3600.0), ("+.5s", 0.5), ("1.s", 1.0), ("0", 0.0), ("-0", 0.0)],
)
def test_durations(text: str, seconds: float) -> None:
    """The grammar of time.ParseDuration."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "m", "5 m", "5M", "1d", "--1s", "1s-", ".s", "5m\n", "٣s"])
def test_invalid_durations(text: str) -> None:
    """A number needs a unit; only 0 does not."""
    assert parse_duration(text) is None


@given(parts=st.lists(st.tuples(st.integers(0, 999), st.sampled_from(sorted(UNITS))), min_size=1, max_size=4))
def test_parts_add_up(parts: list[tuple[int, str]]) -> None:
    """Parts may come in any order and repeat."""
    text = "".join(f"{number}{unit}" for number, unit in parts)
    assert parse_duration(text) == pytest.approx(sum(number * UNITS[unit] for number, unit in parts))
    assert parse_duration(f"-{text}") == -(parse_duration(text) or 0.0)
