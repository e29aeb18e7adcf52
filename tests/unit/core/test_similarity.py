"""Reranking by the vectors of a model that only embeds."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import similarity
from shoal.core.protocols import ModelFacts
from shoal.errors import Unsupported
from shoal.types import (
    Array,
    Batched,
    BatchFacts,
    Chunk,
    Context,
    Embed,
    Embedded,
    Generate,
    Rerank,
    Result,
    VectorKind,
)

CTX = Context(id="r", deadline=1e12)

DENSE = {"north": [0.0, 2.0], "up": [0.0, 1.0], "east": [3.0, 0.0], "south": [0.0, -1.0], "none": [0.0, 0.0]}
MULTI = {"north": [[0.0, 1.0], [1.0, 0.0]], "up": [[0.0, 1.0]], "east": [[1.0, 0.0], [0.0, -1.0]], "none": []}


class Compass:
    """Knows the vectors of a few words; `asked` keeps the tasks."""

    def __init__(self, vectors: tuple[VectorKind, ...] = ("dense",)) -> None:
        self.facts = ModelFacts(source="s", backend="b", tasks=("embed",), vectors=vectors)
        self.asked: list[Embed] = []

    async def run(self, task: Batched, ctx: Context) -> Result:
        assert isinstance(task, Embed)
        assert all(isinstance(text, str) for text in task.inputs)
        self.asked.append(task)
        words = [str(text) for text in task.inputs]
        dense = "dense" in task.outputs
        return Embedded(
            vectors=np.array([DENSE[word] if dense else [] for word in words], dtype=np.float32),
            tokens=[len(word) for word in words],
            truncated=len(self.asked),
            facts=BatchFacts(size=len(words), queue_ms=float(len(words))),
            multi_vectors=[] if dense else [np.array(MULTI[word], dtype=np.float32).reshape(-1, 2) for word in words],
        )

    def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        raise AssertionError("it does not talk")

    def ready(self) -> bool:
        return True

    async def aclose(self) -> None: ...


async def test_one_query_is_compared_with_each_document() -> None:
    found = await similarity.rerank(
        model := Compass(),
        Rerank(model="m", queries=["north"], documents=["up", "east", "south", "none", "up"]),
        CTX,
    )
    assert found.scores.tolist() == [[1.0], [0.0], [-1.0], [0.0], [1.0]]
    assert found.scores.dtype == np.float32
    assert found.tokens == [7, 9, 10, 9, 7]
    assert found.truncated == 3
    assert found.facts.size == 4, "facts are of the slower side"
    assert [task.inputs for task in model.asked] == [["north"], ["up", "east", "south", "none"]]


async def test_as_many_queries_as_documents_are_compared_in_pairs() -> None:
    found = await similarity.rerank(
        model := Compass(),
        Rerank(model="m", queries=["north", "east", "north"], documents=["up", "up", "south"]),
        CTX,
    )
    assert found.scores[:, 0].tolist() == [1.0, 0.0, -1.0]
    assert [task.inputs for task in model.asked] == [["north", "east"], ["up", "south"]]


async def test_each_side_has_its_role_and_the_options() -> None:
    task = Rerank(model="m", queries=["north"], documents=["up"], truncate=False, truncation_direction="left")
    await similarity.rerank(model := Compass(), task, CTX)
    assert [asked.input_type for asked in model.asked] == ["query", "document"]
    assert all(asked.truncate is False and asked.truncation_direction == "left" for asked in model.asked)
    assert all(asked.outputs == ("dense",) for asked in model.asked)


async def test_late_interaction_adds_the_best_of_each_query_vector() -> None:
    found = await similarity.rerank(
        model := Compass(("multi", "dense")),
        Rerank(model="m", queries=["north"], documents=["up", "east", "none", "north"]),
        CTX,
    )
    assert found.scores[:, 0].tolist() == [1.0, 1.0, 0.0, 2.0]
    assert all(asked.outputs == ("multi",) for asked in model.asked)


async def test_documents_cannot_be_cut_by_themselves() -> None:
    task = Rerank(model="m", queries=["north"], documents=["up"], max_document_tokens=3)
    with pytest.raises(Unsupported, match="leave the limit of a document out"):
        await similarity.rerank(Compass(), task, CTX)


@pytest.mark.parametrize(
    ("vectors", "able"), [(("dense",), True), (("multi",), True), (("sparse", "tokens"), False), ((), False)]
)
def test_which_vectors_can_rank(vectors: tuple[VectorKind, ...], able: bool) -> None:
    assert similarity.can(ModelFacts(source="s", backend="b", tasks=("embed",), vectors=vectors)) is able
    assert not similarity.can(ModelFacts(source="s", backend="b", tasks=("generate",), vectors=vectors))


def matrices() -> st.SearchStrategy[tuple[Array, Array]]:
    number = st.floats(-1e3, 1e3, width=32)
    row = st.lists(number, min_size=3, max_size=3)
    rows = st.lists(row, min_size=1, max_size=5).map(lambda each: np.array(each, dtype=np.float32))
    return st.tuples(rows, rows)


@given(matrices())
def test_max_sim_is_the_sum_of_the_largest_products(pair: tuple[Array, Array]) -> None:
    query, document = pair
    slow = sum(max(float(np.dot(q, d)) for d in document) for q in query)
    assert similarity.max_sim(query, document) == pytest.approx(slow, rel=1e-4, abs=1e-1)


@given(matrices())
def test_cosines_stay_between_the_bounds(pair: tuple[Array, Array]) -> None:
    query, document = pair
    size = min(len(query), len(document))
    found = similarity.cosines(query[:size], document[:size])
    assert found.shape == (size,)
    assert (np.abs(found) <= 1.0).all()
    assert np.array_equal(found, similarity.cosines(document[:size], query[:size]))
