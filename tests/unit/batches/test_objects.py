"""Pages of lists."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.batches.objects import paginate
from shoal.errors import InvalidValue


class Item(NamedTuple):
    id: str


@given(st.integers(0, 30), st.integers(1, 10))
def test_pages_cover_the_list(count: int, limit: int) -> None:
    """Page by page, each item comes once, in order; only the last page says that nothing follows."""
    items = [Item(str(each)) for each in range(count)]
    seen: list[Item] = []
    after, has_more = None, True
    while has_more:
        page, has_more = paginate(items, after, limit)
        assert len(page) == limit or not has_more
        seen += page
        after = page[-1].id if page else None
    assert seen == items


def test_an_unknown_start() -> None:
    with pytest.raises(InvalidValue, match="list from the beginning"):
        paginate([Item("a")], "b", 1)
