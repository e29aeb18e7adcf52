"""Bounds of response sizes: every valid answer fits, however it is formatted, and larger ones are not decoded."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.base import response_limit as room_module
from shoal.backends.base.http_client import Client
from shoal.backends.openai.calls import RouteCalls
from shoal.backends.openai.engine import UpstreamEngine
from shoal.backends.openai.scores import ClassifyCalls, LabelNames, RerankCalls, ScoreCalls
from shoal.backends.openai.vectors import EmbeddingCalls
from shoal.errors import UpstreamFailed
from tests.fakes.openai_server import FakeUpstream, answer

USAGE = {"prompt_tokens": 9, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}
LONG = -1.2345678901234567e-300
MB = 2**20
TEXTS = st.lists(st.text(max_size=9), min_size=1, max_size=6)


@pytest.fixture(autouse=True, scope="module")
def everything() -> Any:
    """Check small bodies against the bound too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room_module, "FEW_BYTES", 0)
        yield


def check(calls: RouteCalls, items: Sequence[Any], reply: Any, width: int | None = None) -> None:
    """Check the most compact and the largest form of an answer."""
    limit = calls.response_limit(len(items), msgspec.json.encode(calls.body("m", items)), width)
    for indent in (None, 4):
        for ascii_alone in (True, False):
            body = json.dumps(reply, indent=indent, ensure_ascii=ascii_alone).encode(errors="replace")
            assert len(body) <= limit.size
            limit.check(body, "here")


@given(st.integers(1, 5), st.integers(1, 40))
def test_vectors_fit(count: int, width: int) -> None:
    data = [{"object": "embedding", "index": at, "embedding": [LONG] * width} for at in range(count)]
    reply = {"object": "list", "data": data, "model": "up/model", "usage": USAGE}
    check(EmbeddingCalls(), ["text"] * count, reply, width)
    check(EmbeddingCalls(), ["text"] * count, reply)


@given(TEXTS)
def test_scores_fit_with_their_documents(documents: list[str]) -> None:
    """Some servers return the documents with the scores."""
    pairs = [("q", document) for document in documents]
    results = [
        {"index": at, "document": {"text": document, "multi_modal": None}, "relevance_score": LONG}
        for at, document in enumerate(documents)
    ]
    check(RerankCalls("/rerank"), pairs, {"id": "x", "results": results, "usage": USAGE})
    data = [{"index": at, "object": "score", "score": LONG} for at in range(len(pairs))]
    check(ScoreCalls("/score"), pairs, {"data": data, "usage": USAGE})


def test_long_documents_fit() -> None:
    documents = ['{"a": [1, 2, 3]}, \x01 é ' * 500] * 3
    results = [{"index": at, "document": document, "relevance_score": 0.5} for at, document in enumerate(documents)]
    check(RerankCalls("/rerank"), [("q", document) for document in documents], {"results": results})


@given(st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=40, unique=True), st.integers(1, 4))
def test_classes_fit(labels: list[str], count: int) -> None:
    named = [[{"label": label, "score": LONG} for label in labels]] * count
    probs = [{"index": 0, "label": labels[0], "probs": [LONG] * len(labels), "num_classes": len(labels)}] * count
    for known in (LabelNames(), LabelNames(labels)):
        for data in (named, probs):
            check(ClassifyCalls("/classify", known), ["text"] * count, {"object": "list", "data": data, "usage": USAGE})


class TestHostileServers:
    """An engine that gets megabytes for a few texts."""

    @pytest.fixture
    async def server(self) -> AsyncIterator[FakeUpstream]:
        async with FakeUpstream() as made:
            yield made

    async def ask(self, server: FakeUpstream, calls: RouteCalls, items: Sequence[Any], width: int | None) -> None:
        async def admit(engine: UpstreamEngine) -> None:
            raise AssertionError("nobody watches it")

        client = Client(server.base)
        engine = UpstreamEngine(client, "m", "m-0", admit=admit, calls=[calls], serving=True)
        engine.dimension = width
        sides = [item if isinstance(item, tuple) else (item, None) for item in items]
        inputs = {
            name: np.array([side[at] for side in sides], dtype=object) for at, name in enumerate(("text", "pair"))
        }
        try:
            with pytest.raises(UpstreamFailed, match=r"returned more (than \d+ bytes|rows or numbers)"):
                await engine.infer(inputs, engine.facts.outputs[:1], {}, time.monotonic() + 10)
        finally:
            await engine.aclose()
            await client.aclose()

    @pytest.mark.parametrize("width", [None, 8])
    @pytest.mark.parametrize(
        "entry",
        [b'{"embedding":0}', b'{"embedding":[' + b"0," * MB + b"0]}", b'{"embedding":"' + b"A" * 8 * MB + b'"}'],
        ids=["entries", "numbers", "base64"],
    )
    async def test_vectors(self, server: FakeUpstream, entry: bytes, width: int | None) -> None:
        times = 100_000 if len(entry) < 20 else 1
        server.on("/embeddings", answer(b'{"data":[' + (entry + b",") * times + entry + b"]}"))
        await self.ask(server, EmbeddingCalls(), list("abcdefgh"), width)

    async def test_scores(self, server: FakeUpstream) -> None:
        entries = b'{"data":[' + b'{"score":0},' * 100_000 + b'{"score":0}]}'
        for calls in (ScoreCalls("/score"), RerankCalls("/score")):
            server.on("/score", answer(entries))
            await self.ask(server, calls, [("q", "a"), ("q", "b")], None)

    @pytest.mark.parametrize("names", [(), ("a", "b")])
    async def test_classes(self, server: FakeUpstream, names: tuple[str, ...]) -> None:
        row = b"[" + b'{"label":"a","score":0},' * 200_000 + b'{"label":"b","score":0}]'
        server.on("/classify", answer(b'{"data":[' + row + b"]}"))
        await self.ask(server, ClassifyCalls("/classify", LabelNames(names)), ["a"], None)
