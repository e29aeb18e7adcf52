"""Decoding of answers into arrays."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shoal.backends.tei import answers
from shoal.backends.tei.calls import build_body
from shoal.errors import InternalError, UpstreamFailed
from shoal.types import Vectors

WHERE = "http://gpu:8080"
FLOATS = arrays.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 9)))


def of_width(width: int) -> st.SearchStrategy[Vectors]:
    return arrays.arrays(np.float32, st.tuples(st.integers(1, 5), st.just(width)))


def wire(body: Any) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


@given(FLOATS)
def test_vectors_come_back_to_the_bit(rows: Vectors) -> None:
    """Denormals and -0 are exact; NaN and infinity are null in JSON, which is read as NaN."""
    found = asyncio.run(answers.parse_vectors(wire(rows), len(rows), WHERE))
    assert found.dtype == np.float32
    finite = np.isfinite(rows)
    assert np.array_equal(found.view(np.uint32)[finite], rows.view(np.uint32)[finite])
    assert np.isnan(found[~finite]).all()


@given(st.integers(1, 9).flatmap(lambda width: st.lists(of_width(width), min_size=1, max_size=4)))
def test_token_vectors_come_back_to_the_bit(rows: list[Vectors]) -> None:
    body = wire([matrix.tolist() for matrix in rows])
    found = asyncio.run(answers.parse_token_vectors(body, len(rows), WHERE))
    for one, other in zip(found, rows, strict=True):
        assert one.shape == other.shape
        assert np.array_equal(one[np.isfinite(other)], other[np.isfinite(other)])


@given(st.lists(st.dictionaries(st.integers(0, 30521), st.floats(width=32, min_value=0.125, max_value=9)), min_size=1))
def test_sparse_vectors_are_in_the_order_of_their_indices(rows: list[dict[int, float]]) -> None:
    body = wire([[{"index": index, "value": value} for index, value in row.items()] for row in rows])
    found = asyncio.run(answers.parse_sparse_vectors(body, len(rows), WHERE))
    for one, row in zip(found, rows, strict=True):
        assert (one.indices.dtype, one.values.dtype) == (np.int32, np.float32)
        assert one.indices.tolist() == sorted(row)
        assert one.values.tolist() == [row[index] for index in sorted(row)]


@given(st.lists(st.permutations([0, 1, 2]), min_size=1, max_size=5))
def test_scores_go_by_their_label(orders: list[list[int]]) -> None:
    """The server sends the best label first."""
    names, values = ("a", "b", "c"), (1.5, -2.0, 0.25)
    body = wire([[{"score": values[at], "label": names[at]} for at in order] for order in orders])
    found = asyncio.run(answers.parse_scores(body, len(orders), names, WHERE))
    assert found.tolist() == [list(values)] * len(orders)


async def test_the_one_label_may_have_any_name() -> None:
    body = wire([[{"score": 0.5, "label": "x"}], [{"score": None, "label": "y"}]])
    found = await answers.parse_scores(body, 2, ["LABEL_0"], WHERE)
    assert found[0, 0] == 0.5
    assert np.isnan(found[1, 0])


async def test_large_answers_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tasks run in between, and the rows are the same."""
    monkeypatch.setattr(answers, "PIECE_BYTES", 200)
    rows = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)
    iterations = 0

    async def others() -> None:
        nonlocal iterations
        while True:
            iterations += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    assert np.array_equal(await answers.parse_vectors(wire(rows), 40, WHERE), rows)
    assert iterations >= 20
    matrices = await answers.parse_token_vectors(wire([rows.tolist()] * 3), 3, WHERE)
    assert all(np.array_equal(matrix, rows) for matrix in matrices)
    beside.cancel()


async def test_what_no_float32_holds_is_no_number() -> None:
    """A number outside float32 fails only its own row, later."""
    found = await answers.parse_vectors(b"[[1e300,1.0],[1.0,2.0]]", 2, WHERE)
    assert np.isinf(found[0, 0])
    assert found[1].tolist() == [1.0, 2.0]


NOTHING: list[bytes] = [b"", b"<html>", b"{}", b"null", b"[1]", b'["a"]', b"[" * 5000, b"\xff", b"[]", b"[[]]"]


@pytest.mark.parametrize("body", [*NOTHING, b"[[1.0]]", b'[["1"],["2"]]', b"[[1.0],[1.0,2.0]]", b"[[],[]]"])
async def test_what_are_no_vectors(body: bytes) -> None:
    with pytest.raises(UpstreamFailed, match=WHERE):
        await answers.parse_vectors(body, 2, WHERE)


@pytest.mark.parametrize(
    "body",
    [*NOTHING, b"[[[1.0]]]", b"[[[1.0]],[]]", b"[[[1.0]],[[1.0],[1.0,2.0]]]", b"[[[]],[[]]]", b"[[[1.0]],[[1.0,2.0]]]"],
)
async def test_what_are_no_token_vectors(body: bytes) -> None:
    with pytest.raises(UpstreamFailed, match=WHERE):
        await answers.parse_token_vectors(body, 2, WHERE)


def terms(*indices: Any) -> bytes:
    return json.dumps([[{"index": index, "value": 1.0} for index in indices], []]).encode()


@pytest.mark.parametrize("body", [*NOTHING, terms(-1), terms(2**31), terms(5, 5), terms(1.5), terms("a")])
async def test_what_are_no_sparse_vectors(body: bytes) -> None:
    with pytest.raises(UpstreamFailed, match=WHERE):
        await answers.parse_sparse_vectors(body, 2, WHERE)


def predictions(*labels: str) -> bytes:
    return json.dumps([[{"score": 1.0, "label": label} for label in labels]] * 2).encode()


@pytest.mark.parametrize("body", [*NOTHING, predictions("a"), predictions("a", "x"), predictions("a", "a", "b")])
async def test_what_are_no_scores(body: bytes) -> None:
    with pytest.raises(UpstreamFailed, match=WHERE):
        await answers.parse_scores(body, 2, ("a", "b"), WHERE)


class TestCalls:
    def test_options_are_sent_as_given(self) -> None:
        options = {
            "truncate": False,
            "truncation_direction": "left",
            "prompt_name": "query",
            "normalize": False,
            "dimensions": 8,
        }
        assert json.loads(build_body("/embed", ["a", [1, 2]], options)) == {"inputs": ["a", [1, 2]], **options}
        assert json.loads(build_body("/embed", ["a"], {})) == {"inputs": ["a"]}

    @pytest.mark.parametrize("route", ["/embed_all", "/embed_sparse"])
    def test_no_route_is_sent_what_it_does_not_read(self, route: str) -> None:
        body = json.loads(build_body(route, ["a"], {"normalize": True, "dimensions": 8, "truncate": None}))
        assert body == {"inputs": ["a"]}

    def test_scores_are_requested_raw_and_never_as_one_pair(self) -> None:
        body = json.loads(build_body("/predict", ["a", ("b", "c")], {"truncate": True, "normalize": True}))
        assert body == {"inputs": [["a"], ["b", "c"]], "truncate": True, "raw_scores": True}
        assert json.loads(build_body("/predict", ["a", "b"], {}))["inputs"] == [["a"], ["b"]]

    def test_ids_are_not_scored(self) -> None:
        with pytest.raises(InternalError):
            build_body("/predict", [[1, 2]], {})
