"""The order of scores, and the pieces of which replies are put together."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.surfaces.shared import ranking
from shoal.surfaces.shared.input_types import normalize_role, resolve_purpose
from tests.unit.surfaces.shared.test_truncation import card


@given(st.lists(st.integers(-3, 3), max_size=40), st.integers(0, 50) | st.none())
def test_order(values: list[int], limit: int | None) -> None:
    """Falling, by place where equal, cut to the best; as sorting says it."""
    expected = sorted(range(len(values)), key=lambda at: (-values[at], at))
    assert ranking.sort_descending(np.array(values, dtype=np.float32), limit) == (
        expected[:limit] if limit else expected
    )


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize(("head", "tail"), [({}, {}), ({"a": 1}, {}), ({}, {"z": "é"}), ({"a": [1]}, {"z": {}})])
async def test_an_object_around_a_list(count: int, head: dict[str, Any], tail: dict[str, Any]) -> None:
    """Whole JSON with the keys in order, whatever is around the list and however long it is."""
    scores = np.arange(count, dtype=np.float32) / 10
    listed = await ranking.encode_results(range(count), lambda at: {"index": at, "score": scores[at]})
    body = ranking.wrap_body(ranking.open_object(head, "rows"), listed, ranking.close_object(tail))
    assert isinstance(body, bytes | list)
    assert isinstance(body, list) == (count > 64)
    reply = orjson.loads(b"".join(body) if isinstance(body, list) else body)
    assert list(reply) == [*head, "rows", *tail]
    assert {name: reply[name] for name in (*head, *tail)} == {**head, **tail}
    assert reply["rows"] == [{"index": at, "score": at / 10} for at in range(count)]


def test_roles() -> None:
    """Every dialect's name for a side is one of two; a use that the model has no prompt for changes nothing."""
    assert [normalize_role(name) for name in ("query", "passage", "search_query", "other")] == [
        "query",
        "document",
        "query",
        "other",
    ]
    assert resolve_purpose("search_document", card(1), "task").input_type == "document"
    for known in (True, False):
        assert resolve_purpose("clustering", card(1, known=known), "input_type") == (None, None)


def test_searches() -> None:
    """A hundred documents are one."""
    units = [ranking.search_meta("2", count, 7)["billed_units"]["search_units"] for count in (1, 100, 101)]
    assert units == [1, 1, 2]
