"""Tasks other than dense embeddings, through lanes and the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest

from shoal.backends.fake.model import FakeScript, compute_scores, compute_vector, tokenize_item
from shoal.core import similarity
from shoal.core.gateway import Gateway
from shoal.core.lane_runner import LaneRunner
from shoal.core.protocols import ModelFacts, Observer
from shoal.core.registry import Model, Registry
from shoal.core.scheduling.admission import BULK_ABOVE, classify_traffic, count_items
from shoal.core.threads import Threads
from shoal.errors import EmptyInput, InvalidValue, ModelNotFound, Unsupported
from shoal.types import (
    Classify,
    Embed,
    Rerank,
    Result,
    TaskKind,
    TextPair,
    TrafficClass,
    VectorKind,
    pack,
    unpack,
)
from tests.unit.core.conftest import Run
from tests.unit.core.lanes import Inline, context, engine, make_lane

T = TypeVar("T")

DOCUMENTS = ["a b", "c", "d e f"]


def rerank(*documents: str, queries: tuple[str, ...] = ("q",), raw: bool = False) -> Rerank:
    return Rerank(model="", queries=list(queries), documents=list(documents), raw_scores=raw)


class Recorder(Observer):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def accepted(self, model: str, task: TaskKind, items: int, traffic: TrafficClass, surface: str = "") -> None:
        self.calls.append((model, task, items, traffic))

    def finished(
        self, model: str, task: TaskKind, outcome: str, seconds: float, result: Result | None, surface: str = ""
    ) -> None:
        self.calls.append((model, task, outcome))


def gateway(threads: Threads | None = None, /, **models: FakeScript) -> tuple[Gateway, Recorder]:
    registry = Registry()
    for name, script in models.items():
        tasks: tuple[TaskKind, ...] = ("embed",)
        if script.labels:
            tasks = ("rerank", "classify") if script.labels == 1 else ("classify",)
        facts = ModelFacts(source="f", backend="f", tasks=tasks, vectors=script.kinds, labels=script.label_names)
        model = Model(name)
        model.mark_loaded(LaneRunner(make_lane(script), facts))
        registry.add(model)
    return Gateway(registry, recorder := Recorder(), threads=threads, clock=asyncio.get_running_loop().time), recorder


def expected(query: str, *documents: str, raw: bool = False, labels: int = 1) -> Any:
    return [compute_scores(tokenize_item((query, document)), labels, raw=raw).tolist() for document in documents]


def test_pairs_are_scored_in_order_and_share_batches(virtual: Run[None]) -> None:
    async def main() -> None:
        lane = make_lane(FakeScript(labels=1, delay_ms=5.0))
        plain, raw, classes = await asyncio.gather(
            lane.run(rerank(*DOCUMENTS), context()),
            lane.run(rerank(*DOCUMENTS, raw=True), context()),
            lane.run(Classify(model="", inputs=["x", ("q", "c")]), context()),
        )
        assert plain.scores.tolist() == expected("q", *DOCUMENTS)
        assert raw.scores.tolist() == expected("q", *DOCUMENTS, raw=True)
        assert classes.scores.tolist() == [
            compute_scores(tokenize_item("x"), 1, raw=False).tolist(),
            *expected("q", "c"),
        ]
        assert plain.tokens == [4, 3, 5]
        assert [size for size, _ in engine(lane).batches] == [7]

    virtual(main)


def test_every_kind_of_vector_comes_with_its_text(virtual: Run[None]) -> None:
    async def main() -> None:
        lane = make_lane(FakeScript(vectors="dense+sparse+multi+tokens", dimension=8))
        kinds: tuple[VectorKind, ...] = ("dense", "sparse", "multi", "tokens")
        both = await lane.run(Embed(model="", inputs=["a b a", "c"], outputs=kinds, normalize=False), context())
        some = await lane.run(Embed(model="", inputs=["a b a"], outputs=("sparse",)), context())
        assert np.array_equal(both.vectors, [compute_vector(tokenize_item(text), 8) for text in ("a b a", "c")])
        a, b = tokenize_item("a b")
        weights = dict(zip(both.sparse[0].indices.tolist(), both.sparse[0].values.tolist(), strict=True))
        assert weights == {a: 2.0, b: 1.0}
        assert [each.shape for each in both.token_vectors] == [(3, 8), (1, 8)]
        assert np.allclose(np.linalg.norm(both.multi_vectors[0], axis=1), 1.0)
        assert some.vectors.shape == (1, 0)
        assert (len(some.sparse), some.token_vectors, some.multi_vectors) == (1, [], [])

    virtual(main)


def test_the_gateway_reports_the_task(virtual: Run[None]) -> None:
    async def main() -> None:
        served, recorder = gateway(embedder=FakeScript(), ranker=FakeScript(labels=1), judge=FakeScript(labels=3))
        ranked = await served.run(rerank(*DOCUMENTS), context())
        await asyncio.sleep(0)  # what was counted is told behind the answer
        judged = await served.run(Classify(model="judge", inputs=["x"]), context())
        assert ranked.scores.tolist() == expected("q", *DOCUMENTS)
        assert judged.scores.shape == (1, 3)
        assert judged.scores.sum() == pytest.approx(1.0)
        await asyncio.sleep(0)
        assert recorder.calls == [
            ("ranker", "rerank", 3, "interactive"),
            ("ranker", "rerank", "ok"),
            ("judge", "classify", 1, "interactive"),
            ("judge", "classify", "ok"),
        ]

    virtual(main)


def test_an_embedder_ranks_by_its_vectors_where_nothing_else_does(virtual: Run[None]) -> None:
    async def main() -> None:
        served, recorder = gateway(judge=FakeScript(labels=3), embedder=FakeScript())
        found = await served.run(rerank("q", "other words"), context())
        assert found.scores[0, 0] == pytest.approx(1.0)
        assert found.scores[1, 0] < 1.0
        assert recorder.calls[0][:2] == ("embedder", "rerank")

    virtual(main)


@pytest.mark.parametrize(
    ("task", "error", "words"),
    [
        (rerank(), EmptyInput, "at least one"),
        (rerank("a", "b", "c", queries=("q", "r")), InvalidValue, "2 queries for 3 documents"),
        (Rerank(model="judge", queries=["q"], documents=["d"]), Unsupported, "cannot rerank; it can: classify"),
        (Classify(model="embedder", inputs=["x"]), Unsupported, "cannot classify; it can: embed"),
        (Classify(model="ranker", inputs=[]), EmptyInput, "at least one"),
        (Embed(model="ranker", inputs=["x"]), Unsupported, "cannot embed; it can: rerank, classify"),
        (Embed(model="embedder", inputs=["x"], outputs=("dense", "sparse")), Unsupported, "no sparse vectors"),
        (Classify(model="nobody", inputs=["x"]), ModelNotFound, "does not exist"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    virtual: Run[None], task: Rerank | Classify | Embed, error: type[Exception], words: str
) -> None:
    async def main() -> None:
        served, _ = gateway(embedder=FakeScript(), ranker=FakeScript(labels=1), judge=FakeScript(labels=3))
        with pytest.raises(error, match=words):
            await served.run(task, context())

    virtual(main)


def test_the_default_is_of_the_task(virtual: Run[None]) -> None:
    async def main() -> None:
        served, _ = gateway(embedder=FakeScript(), judge=FakeScript(labels=3), ranker=FakeScript(labels=1))
        names = {task: served.registry.find("", task).name for task in ("embed", "classify", "rerank")}
        assert names == {"embed": "embedder", "classify": "judge", "rerank": "ranker"}
        alone, _ = gateway(judge=FakeScript(labels=3))
        with pytest.raises(ModelNotFound, match="can rerank"):
            alone.registry.find("", "rerank")

    virtual(main)


def test_large_rankings_by_vectors_are_done_in_the_gateway_s_threads(
    virtual: Run[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large rankings run in threads piece by piece; small ones run on the loop."""

    class Counting(Inline):
        pieces = 0

        async def run(self, call: Callable[[], T]) -> T:
            self.pieces += 1
            return await super().run(call)

    async def main() -> None:
        threads = Counting()
        served, _ = gateway(threads, late=FakeScript(vectors="dense+multi"))
        few = await served.run(rerank(*DOCUMENTS, queries=("a b",)), context())
        assert few.scores[0, 0] == pytest.approx(2.0)
        assert threads.pieces == 0
        monkeypatch.setattr(similarity, "INLINE", 0)
        assert np.array_equal((await served.run(rerank(*DOCUMENTS, queries=("a b",)), context())).scores, few.scores)
        assert threads.pieces == 1

    virtual(main)


def test_size_decides_the_class(virtual: Run[None]) -> None:
    async def main() -> None:
        many = rerank(*("d" for _ in range(BULK_ABOVE + 1)))
        assert count_items(many) == BULK_ABOVE + 1
        assert classify_traffic(context(), count_items(many)) == "bulk"
        assert classify_traffic(context(), count_items(Classify(model="", inputs=["x"] * BULK_ABOVE))) == "interactive"

    virtual(main)


def test_tasks_and_results_travel() -> None:
    pair: TextPair = ("a", "b")
    tasks: list[Rerank | Classify] = [rerank("d", "e"), Classify(model="m", inputs=["a", pair], raw_scores=True)]
    assert [unpack(pack(task), type(task)) for task in tasks] == tasks
    assert [task.kind for task in tasks] == ["rerank", "classify"]
    assert list(tasks[0].items) == [("q", "d"), ("q", "e")]
    assert list(tasks[1].items) == ["a", pair]
    assert list(rerank("d", "e", queries=("p", "q")).items) == [("p", "d"), ("q", "e")]
