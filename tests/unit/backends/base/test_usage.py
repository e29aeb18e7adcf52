"""Token counts of single inputs for servers that count whole calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.base.usage import split_proportionally, utf8_size


@given(st.integers(0, 10**6), st.lists(st.integers(0, 10**5), min_size=1, max_size=20))
def test_parts_have_the_sum(total: int, sizes: list[int]) -> None:
    parts = split_proportionally(total, sizes)
    assert sum(parts) == total
    assert len(parts) == len(sizes)
    whole = sum(sizes)
    if whole:
        assert all(abs(part - total * size / whole) < 1 for part, size in zip(parts, sizes, strict=True))
    assert min(parts) >= 0


def test_sizes_of_nothing_but_zeros() -> None:
    assert split_proportionally(5, [0, 0]) == [0, 5]
    assert split_proportionally(0, []) == []


@pytest.mark.parametrize(("text", "size"), [("", 0), ("abc", 3), ("für", 4), ("日", 3), ("\ud800", 3)])
def test_sizes_are_bytes(text: str, size: int) -> None:
    assert utf8_size(text) == size
