"""Bounds of response sizes: every valid answer fits, and larger ones are not decoded."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shoal.backends.base import response_limit as room_module
from shoal.backends.base.http_client import MAX_ANSWER_BYTES, Client
from shoal.backends.base.response_limit import ResponseLimit
from shoal.backends.tei.engine import TeiEngine
from shoal.backends.tei.http_link import HttpLink
from shoal.backends.tei.info import Info
from shoal.errors import UpstreamFailed
from shoal.types import Array
from tests.fakes.openai_server import FakeUpstream, answer
from tests.unit.backends.tei.kit import FakeAdmission, ask, close

WHERE = "http://gpu:8080"
MB = 2**20


@pytest.fixture(autouse=True)
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check small bodies against the bound too."""
    monkeypatch.setattr(room_module, "FEW_BYTES", 0)


def check(limit: ResponseLimit, body: bytes) -> None:
    assert len(body) <= limit.size
    limit.check(body, WHERE)


DOUBLES = st.floats(allow_nan=False, allow_infinity=False)


@given(arrays.arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=DOUBLES))
def test_vectors_fit(rows: Array) -> None:
    """Numbers have the length of a double, with one space after each comma."""
    count, width = rows.shape
    body = orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)
    check(ResponseLimit.of_vectors(count, width), body)
    check(ResponseLimit.of_vectors(count, width), body.replace(b",", b", "))
    check(ResponseLimit.of_vectors(count, None), body)
    tokens = orjson.dumps([rows.tolist()] * 3)
    check(ResponseLimit.of_tokens(3, count, width), tokens)
    check(ResponseLimit.of_tokens(3, count + 7, None), tokens)


@given(st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=6, unique=True), st.integers(1, 4))
def test_scores_fit(labels: list[str], count: int) -> None:
    """Scores fit whatever the labels are."""
    row = [{"score": -1.2345678901234567e-300, "label": label} for label in labels]
    check(ResponseLimit.of_scores(count, labels), orjson.dumps([row] * count))
    lone = [{"score": 1.0, "label": "another, [unknown] name, " * 9}]
    check(ResponseLimit.of_scores(count, ["LABEL_0"]), orjson.dumps([lone] * count))


def test_sparse_vectors_fit() -> None:
    row = [{"index": 10**6 + at, "value": 0.12345678901234567} for at in range(room_module.MAX_SPARSE_TERMS)]
    check(ResponseLimit.of_sparse(1), orjson.dumps([row]))


@pytest.mark.parametrize(
    ("limit", "body"),
    [
        (ResponseLimit.of_vectors(2, 3), b"[0,0,0,0,0,0,0]"),
        (ResponseLimit.of_vectors(2, 3), b"[[0,0,0],[0,0,0,0]]"),
        (ResponseLimit.of_vectors(2, 3), b"[[],[],[]]"),
        (ResponseLimit.of_tokens(1, 2, 3), b"[[[],[],[]]]"),
        (ResponseLimit.of_tokens(1, 2, 3), b"[[[0,0,0],[0,0,0,0]]]"),
        (ResponseLimit.of_scores(1, ["a", "b"]), b"[[],[],[]]"),
        (
            ResponseLimit.of_scores(1, ["a", "b"]),
            b'[[{"label":"a","score":0},{"label":"a","score":0},{"label":"a","score":0}]]',
        ),
    ],
)
def test_larger_answers_are_refused(limit: ResponseLimit, body: bytes) -> None:
    with pytest.raises(UpstreamFailed, match="more rows or numbers than were requested"):
        limit.check(body, WHERE)


def test_no_limit_exceeds_the_largest_answer() -> None:
    for limit in (
        ResponseLimit.of_vectors(10**6, 4096),
        ResponseLimit.of_tokens(512, 8192, None),
        ResponseLimit.of_sparse(10**6),
    ):
        assert limit.size == MAX_ANSWER_BYTES


class TestHostileServers:
    """An engine that asked for one row gets 8 MB. The loop stays free: each answer would take seconds in full."""

    @pytest.fixture
    async def server(self) -> AsyncIterator[FakeUpstream]:
        async with FakeUpstream() as made:
            yield made

    @pytest.mark.parametrize(
        ("output", "path", "body"),
        [
            ("embedding", "/embed", b"[" + b"0," * 4 * MB + b"0]"),
            ("embedding", "/embed", b"[[" + b"0," * 4 * MB + b"0]]"),
            ("tokens", "/embed_all", b"[[" + b"[]," * 2 * MB + b"[]]]"),
            ("sparse", "/embed_sparse", b"[[" + b'{"index":0,"value":0},' * 400_000 + b'{"index":1,"value":0}]]'),
            ("scores", "/predict", b"[[" + b'{"label":"","score":0},' * 400_000 + b'{"label":"a","score":0}]]'),
        ],
        ids=["flat", "row", "nested", "sparse", "scores"],
    )
    async def test_nothing_of_it_is_decoded(self, server: FakeUpstream, output: str, path: str, body: bytes) -> None:
        kinds: dict[str, Any] = {"sparse": "splade", "scores": "classifier"}
        server.on(path, answer(body))
        info = Info(kind=kinds.get(output, "embedding"), model_id="m", labels=("a", "b"), max_input_length=512)
        engine = TeiEngine(HttpLink(Client(server.base)), info, "m", admit=FakeAdmission(), serving=True)
        engine.dimension = 1024
        with pytest.raises(UpstreamFailed, match=r"returned more (than \d+ bytes|rows or numbers)"):
            await ask(engine, ["hi"], output)
        await close(engine)

    async def test_words_of_any_size(self, server: FakeUpstream) -> None:
        """Only the beginning of an error message is read, once."""
        server.on("/embed", answer(b'{"error":[' + b"[]," * 2 * MB + b"[]]}", status=500))
        engine = TeiEngine(
            HttpLink(Client(server.base)),
            Info(kind="embedding", model_id="m"),
            "m",
            admit=FakeAdmission(),
            serving=True,
        )
        tracemalloc.start()
        try:
            with pytest.raises(UpstreamFailed, match="status 500") as failed:
                await ask(engine, ["hi"])
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(failed.value.message) < 1000
        assert peak < 32 * MB  # all of it, decoded, takes four times that
        await close(engine)
