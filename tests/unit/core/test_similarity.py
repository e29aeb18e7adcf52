"""Reranking by the vectors of a model that only embeds."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import similarity
from shoal.core.protocols import ModelFacts
from shoal.core.threads import Threads
from shoal.errors import DeadlineExceeded, EngineFailed, InputRejected, InvalidValue, ShoalError, TooLong, Unsupported
from shoal.types import (
    Array,
    BatchFacts,
    BatchTask,
    Chunk,
    Context,
    Embed,
    Embedded,
    Generate,
    Rerank,
    Result,
    Scored,
    VectorKind,
)

CTX = Context(id="r", deadline=1e12)
T = TypeVar("T")

DENSE = {"north": [0.0, 2.0], "up": [0.0, 1.0], "east": [3.0, 0.0], "south": [0.0, -1.0], "none": [0.0, 0.0]}
MULTI = {"north": [[0.0, 1.0], [1.0, 0.0]], "up": [[0.0, 1.0]], "east": [[1.0, 0.0], [0.0, -1.0]], "none": []}


class Compass:
    """Knows the vectors of a few words and records its tasks. The text "south" counts as truncated."""

    def __init__(self, vectors: tuple[VectorKind, ...] = ("dense",), limit: int | None = None) -> None:
        self.facts = ModelFacts(
            source="s", backend="b", tasks=("embed",), vectors=vectors, dimension=2, max_input_tokens=limit
        )
        self.tasks: list[Embed] = []
        self.contexts: list[Context] = []

    async def run(self, task: BatchTask, ctx: Context) -> Result:
        assert isinstance(task, Embed)
        assert all(isinstance(text, str) for text in task.inputs)
        self.tasks.append(task)
        self.contexts.append(ctx)
        words = [str(text) for text in task.inputs]
        dense = "dense" in task.outputs
        size = len(words)
        return Embedded(
            vectors=np.array([DENSE[word] if dense else [] for word in words], dtype=np.float32),
            tokens=[len(word) for word in words],
            truncated=words.count("south"),
            facts=BatchFacts(
                size=size, id=size, batches=1, queue_ms=size, prepare_ms=2 * size, infer_ms=3 * size, cached=4 * size
            ),
            multi_vectors=[] if dense else [np.array(MULTI[word], dtype=np.float32).reshape(-1, 2) for word in words],
        )

    def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        raise AssertionError("it does not talk")

    def ready(self) -> bool:
        return True

    async def aclose(self) -> None: ...


class Hops(Threads):
    """Counts the calls and runs them inline; `before` runs first."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        super().__init__("hops", 1)
        self.calls = 0
        self._before = before

    async def run(self, call: Callable[[], T]) -> T:
        self.calls += 1
        self._before()
        return call()


class Refusing(Compass):
    """Fails the texts in `bad` as a lane does: with the index, if there are several texts."""

    def __init__(self, error: ShoalError, bad: str, vectors: tuple[VectorKind, ...] = ("dense",)) -> None:
        super().__init__(vectors)
        self.error, self.bad = error, bad

    async def run(self, task: BatchTask, ctx: Context) -> Result:
        assert isinstance(task, Embed)
        if self.bad in task.inputs:
            one = len(task.inputs) == 1 or isinstance(self.error, EngineFailed)
            raise self.error if one else self.error.at_input(task.inputs.index(self.bad))
        return await super().run(task, ctx)


async def rank(model: Compass, task: Rerank, threads: Threads | None = None) -> Scored:
    return await similarity.rerank(model, task, CTX, threads=threads or Hops())


async def test_one_query_is_compared_with_each_document() -> None:
    found = await rank(
        model := Compass(),
        Rerank(model="m", queries=["north"], documents=["up", "east", "south", "none", "up"]),
    )
    assert found.scores.tolist() == [[1.0], [0.0], [-1.0], [0.0], [1.0]]
    assert found.scores.dtype == np.float32
    assert found.tokens == [7, 9, 10, 9, 7]
    assert [task.inputs for task in model.tasks] == [["north"], ["up", "east", "south", "none", "up"]]


async def test_facts_are_of_both_sides() -> None:
    """Times of both embeddings are summed; the batch is the larger one."""
    task = Rerank(model="m", queries=["north"], documents=["up", "east", "up"])
    assert (await rank(Compass(), task)).facts == BatchFacts(
        size=3, id=3, batches=2, queue_ms=4, prepare_ms=8, infer_ms=12, cached=16
    )


@pytest.mark.parametrize(
    ("queries", "documents", "cut"),
    [
        (["north"], ["south", "up", "south"], 2),
        (["south"], ["up", "up", "south"], 3),
        (["north", "south", "south"], ["south", "up", "south"], 3),
        (["south", "north"], ["up", "up"], 1),
    ],
)
async def test_what_was_cut_is_counted_by_document(queries: list[str], documents: list[str], cut: int) -> None:
    """A duplicate text counts twice, and a query as often as it is compared."""
    assert (await rank(Compass(), Rerank(model="m", queries=queries, documents=documents))).truncated == cut


@pytest.mark.parametrize("several", [True, False])
async def test_errors_name_the_text_of_the_request(monkeypatch: pytest.MonkeyPatch, several: bool) -> None:
    """The error has the document's index in the request, duplicates included, or names the query."""
    if several:
        monkeypatch.setattr(similarity, "NUMBERS", 4)  # two documents a chunk, one pair
    error = TooLong("too long", param="input")
    documents = ["up", "up", "east", "up", "none"]

    async def message(queries: list[str], bad: str, error: ShoalError = error) -> str:
        with pytest.raises(type(error)) as caught:
            await rank(Refusing(error, bad), Rerank(model="m", queries=queries, documents=documents))
        assert (caught.value.message, caught.value.param) == (str(caught.value), error.param)
        return caught.value.message

    assert await message(["north"], "east") == "input 2: too long"
    assert await message(["north"], "none") == "input 4: too long"
    assert await message(["north"], "north") == "the query: too long"
    assert await message(["up", "up", "up", "up", "south"], "south") == "input 4: the query: too long"
    assert await message(["north"], "none", InputRejected("no")) == "input 4: no"
    assert await message(["north"], "none", EngineFailed("died")) == "died"
    assert error.message == "too long"


async def test_errors_of_the_whole_task_name_no_text() -> None:
    """An error of the model names no text, and neither does an error of the only document."""
    task = Rerank(model="m", queries=["north"], documents=["up"])
    with pytest.raises(Unsupported, match=r"^leave it out"):
        await rank(Refusing(Unsupported("leave it out"), "north"), task)
    with pytest.raises(InvalidValue, match=r"^bad"):
        await rank(Refusing(InvalidValue("bad"), "up"), task)


@pytest.mark.parametrize("queries", [["north"], ["north", "up", "north", "east", "none", "north", "up"]])
@pytest.mark.parametrize("vectors", [("dense",), ("multi",)])
async def test_documents_come_in_chunks(
    monkeypatch: pytest.MonkeyPatch, queries: list[str], vectors: tuple[VectorKind, ...]
) -> None:
    """Chunks bound the memory of the vectors; the scores are the same, and one query is embedded once."""
    task = Rerank(model="m", queries=queries, documents=["up", "east", "none", "north", "up", "up", "north"])
    whole = await rank(Compass(vectors), task)
    monkeypatch.setattr(similarity, "NUMBERS", 12 if vectors == ("dense",) else 6 * 2 * 16)
    parts = await rank(model := Compass(vectors), task)
    assert np.array_equal(parts.scores, whole.scores)
    assert (parts.tokens, parts.truncated) == (whole.tokens, whole.truncated)
    sizes = [len(each_task.inputs) for each_task in model.tasks]
    assert sizes in ([1, 5, 2], [1, 6, 1], [2, 2, 2, 2, 2, 2, 1, 1], [3, 3, 3, 3, 1, 1])
    assert [each_task.input_type for each_task in model.tasks].count("query") == (
        1 if len(queries) == 1 else len(sizes) / 2
    )
    assert {ctx.traffic for ctx in model.contexts} == {"interactive"}


async def test_chunks_are_of_the_class_of_the_whole() -> None:
    await rank(model := Compass(), Rerank(model="m", queries=["north"], documents=["up"] * 9))
    assert [ctx.traffic for ctx in model.contexts] == ["bulk", "bulk"]


async def test_a_document_that_alone_is_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document may be as long as the model allows."""
    monkeypatch.setattr(similarity, "NUMBERS", 1)
    task = Rerank(model="m", queries=["north"], documents=["up", "none"])
    assert len((await rank(model := Compass(("multi",)), task)).scores) == 2
    assert len(model.tasks) == 3
    monkeypatch.setattr(similarity, "NUMBERS", 2 * 2 * 3)
    await rank(model := Compass(("multi",), limit=3), task)
    assert len(model.tasks) == 2


@pytest.mark.parametrize("vectors", [("dense",), ("multi",)])
async def test_much_is_compared_in_threads_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch, vectors: tuple[VectorKind, ...]
) -> None:
    """The scores are the same as in one piece; small inputs use no thread."""
    documents = ["up", "east", "north", "none", "north"]
    for queries in (["north"], ["up", "north", "none", "east", "north"]):
        task = Rerank(model="m", queries=queries, documents=documents)
        whole = await rank(Compass(vectors), task, threads := Hops())
        assert threads.calls == 0
        with monkeypatch.context() as patch:
            patch.setattr(similarity, "PIECE", 300)
            patch.setattr(similarity, "PRODUCTS", 4)
            patch.setattr(similarity, "INLINE", 0)
            parts = await rank(Compass(vectors), task, threads := Hops())
        assert threads.calls >= 2
        assert np.array_equal(parts.scores, whole.scores)


async def test_the_deadline_ends_it_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request past its deadline computes nothing more."""
    monkeypatch.setattr(similarity, "PRODUCTS", 2)
    monkeypatch.setattr(similarity, "INLINE", 0)
    now = [0.0]
    threads = Hops(lambda: now.append(now[-1] + 1))
    task = Rerank(model="m", queries=["north"], documents=["up"] * 10)
    with pytest.raises(DeadlineExceeded, match="allow more time"):
        ctx = Context(id="r", deadline=3.0)
        await similarity.rerank(Compass(), task, ctx, threads=threads, clock=lambda: now[-1])
    assert threads.calls == 3


async def test_as_many_queries_as_documents_are_compared_in_pairs() -> None:
    found = await rank(
        model := Compass(),
        Rerank(model="m", queries=["north", "east", "north"], documents=["up", "up", "south"]),
    )
    assert found.scores[:, 0].tolist() == [1.0, 0.0, -1.0]
    assert [task.inputs for task in model.tasks] == [["north", "east", "north"], ["up", "up", "south"]]


async def test_each_side_has_its_role_and_the_options() -> None:
    task = Rerank(model="m", queries=["north"], documents=["up"], truncate=False, truncation_direction="left")
    await rank(model := Compass(), task)
    assert [each_task.input_type for each_task in model.tasks] == ["query", "document"]
    assert all(each_task.truncate is False and each_task.truncation_direction == "left" for each_task in model.tasks)
    assert all(each_task.outputs == ("dense",) for each_task in model.tasks)


async def test_late_interaction_adds_the_best_of_each_query_vector() -> None:
    found = await rank(
        model := Compass(("multi", "dense")),
        Rerank(model="m", queries=["north"], documents=["up", "east", "none", "north"]),
    )
    assert found.scores[:, 0].tolist() == [1.0, 1.0, 0.0, 2.0]
    assert all(each_task.outputs == ("multi",) for each_task in model.tasks)


async def test_documents_cannot_be_cut_by_themselves() -> None:
    task = Rerank(model="m", queries=["north"], documents=["up"], max_document_tokens=3)
    with pytest.raises(Unsupported, match="omit the document limit"):
        await rank(Compass(), task)


@pytest.mark.parametrize(
    ("vectors", "able"), [(("dense",), True), (("multi",), True), (("sparse", "tokens"), False), ((), False)]
)
def test_which_vectors_can_rank(vectors: tuple[VectorKind, ...], able: bool) -> None:
    assert similarity.can_rerank(ModelFacts(source="s", backend="b", tasks=("embed",), vectors=vectors)) is able
    assert not similarity.can_rerank(ModelFacts(source="s", backend="b", tasks=("generate",), vectors=vectors))


def matrices() -> st.SearchStrategy[tuple[Array, Array]]:
    number = st.floats(-1e3, 1e3, width=32)
    row = st.lists(number, min_size=3, max_size=3)
    rows = st.lists(row, min_size=1, max_size=5).map(lambda each: np.array(each, dtype=np.float32))
    return st.tuples(rows, rows)


@given(matrices())
def test_max_sim_is_the_sum_of_the_largest_products(pair: tuple[Array, Array]) -> None:
    query, document = pair
    slow = sum(max(float(np.dot(q, d)) for d in document) for q in query)
    assert similarity.max_sims([(query, document)])[0] == pytest.approx(slow, rel=1e-4, abs=1e-1)


@given(st.lists(matrices(), max_size=6), st.booleans())
def test_pairs_are_scored_as_each_alone(pairs: list[tuple[Array, Array]], shared: bool) -> None:
    """The same holds for pairs that share a query, and for pairs with an empty side."""
    if shared:
        pairs = [(pairs[0][0], document) for _, document in pairs]
        pairs += [(query, np.empty((0, 3), np.float32)) for query, _ in pairs[:1]]
    found = similarity.max_sims(pairs)
    assert (found.dtype, found.shape) == (np.dtype(np.float32), (len(pairs),))
    each = [similarity.max_sims([pair])[0] for pair in pairs]
    assert np.allclose(found, each, rtol=1e-4, atol=1e-1)


@given(matrices())
def test_cosines_stay_between_the_bounds(pair: tuple[Array, Array]) -> None:
    query, document = pair
    size = min(len(query), len(document))
    found = similarity.cosines(query[:size], document[:size])
    assert found.shape == (size,)
    assert (np.abs(found) <= 1.0).all()
    assert np.array_equal(found, similarity.cosines(document[:size], query[:size]))
