"""The probe of a replica, which decides whether it may join the other replicas."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from shoal.core.probe import (
    PAIRS,
    TEXTS,
    ProbeScores,
    ProbeSparseVectors,
    ProbeVectors,
    least_cosine,
    probe,
    probe_scores,
    probe_sparse,
)
from shoal.core.protocols import CountedRow, EngineFacts, Prepared, Row, Tensors, VectorSet, WorkWeight
from shoal.errors import ConfigError, EngineFailed, NotFinite, ShoalError, TooLong
from shoal.types import Array, BatchTask, Classify, Embed, SparseVector
from shoal.types import Item as AnyItem


class Scripted:
    """Pipeline and engine in one: row i of the answer is row i of `rows`."""

    def __init__(self, rows: Array, *, max_batch_size: int = 64) -> None:
        self.rows = rows
        self.facts = EngineFacts(name="probed", inputs=("at",), outputs=("row",), max_batch_size=max_batch_size)
        self.work: WorkWeight = "light"
        self.sizes: list[int] = []
        self.refuse: ShoalError | None = None
        self.bad: ShoalError | None = None
        self.counted = False
        self.params: list[Mapping[str, Any]] = []

    def check(self, task: BatchTask) -> None: ...

    def estimate(self, item: AnyItem) -> int:
        return 1

    def prepare(self, items: Sequence[tuple[BatchTask, AnyItem]]) -> list[Prepared | ShoalError]:
        assert [text for _, text in items] == list(TEXTS)
        assert not any(isinstance(task, Embed) and task.normalize for task, _ in items), (
            "the rows are judged as the model gives them"
        )
        answers: list[Prepared | ShoalError] = [
            Prepared(
                {"at": np.array([at])}, cost=1, group=(), outputs=("row",), tokens=1, params={"input_type": "passage"}
            )
            for at in range(len(items))
        ]
        if self.refuse is not None:
            answers[1] = self.refuse
        return answers

    def collate(self, batch: Sequence[Prepared], facts: EngineFacts) -> dict[str, Array]:
        return {"at": np.stack([item.tensors["at"] for item in batch])}

    async def infer(
        self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        self.sizes.append(len(inputs["at"]))
        self.params.append(params)
        return {"row": self.rows[inputs["at"][:, 0]]}

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> list[Row | ShoalError | CountedRow]:
        if self.bad is not None:
            return [self.bad] * len(batch)
        rows = list(outputs["row"])
        return [CountedRow(row, 3) for row in rows] if self.counted else rows[: len(rows)]

    def ready(self) -> bool:
        return False

    async def aclose(self) -> None: ...


def soon() -> float:
    return time.monotonic() + 5


ROWS = np.array([[3, 4, 0], [0, 1, 2], [1, 1, 1], [2, 0, 1]], dtype=np.float32)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("max_batch_size", [1, 3, 64])
async def test_rows_come_as_the_model_gives_them(max_batch_size: int, counted: bool) -> None:
    """The probe uses batches of the replica's size and the pipeline's parameters; the replica need not be ready."""
    model = Scripted(ROWS, max_batch_size=max_batch_size)
    model.counted = counted
    probed = await probe(model, model, soon())
    assert np.array_equal(probed.vectors, ROWS)
    assert (probed.dimension, probed.unit) == (3, False)
    assert max(model.sizes) <= max_batch_size
    assert model.params[0] == {"input_type": "passage"}


def test_unit_rows_are_known() -> None:
    units = ROWS / np.linalg.norm(ROWS, axis=1, keepdims=True)
    assert ProbeVectors(units).unit
    assert ProbeVectors(units.astype(np.float16).astype(np.float32)).unit
    assert not ProbeVectors(np.vstack([units[:3], [[2.0, 0, 0]]]).astype(np.float32)).unit


async def test_what_fails_is_raised() -> None:
    """An item error of the pipeline or the engine is raised, and so is an answer with too few rows."""
    model = Scripted(ROWS)
    model.refuse = TooLong("one text is too long")
    with pytest.raises(TooLong):
        await probe(model, model, soon())
    model.refuse, model.bad = None, NotFinite("NaN")
    with pytest.raises(NotFinite):
        await probe(model, model, soon())

    class Short(Scripted):
        def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> list[Row | ShoalError | CountedRow]:
            return list(outputs["row"])[1:]

    short = Short(ROWS)
    with pytest.raises(EngineFailed, match="3 rows for 4 inputs"):
        await probe(short, short, soon())


def test_peers_agree_within_precision() -> None:
    """A scaled or half-precision copy agrees; another direction, dimension or an empty vector does not."""
    one = ProbeVectors(ROWS)
    one.check(ProbeVectors(ROWS * 2), "b")
    one.check(ProbeVectors((ROWS + np.float32(0.01)).astype(np.float16).astype(np.float32)), "b")
    with pytest.raises(ConfigError, match="2 dimensions, but the other replicas return 3"):
        one.check(ProbeVectors(ROWS[:, :2]), "b")
    with pytest.raises(ConfigError, match=r"b returns different vectors than the other replicas \(cosine 0\."):
        one.check(ProbeVectors(ROWS[:, ::-1].copy()), "b")
    with pytest.raises(ConfigError, match="cosine nan"):
        one.check(ProbeVectors(np.zeros_like(ROWS)), "b")
    with pytest.raises(ConfigError, match="cosine nan"):
        one.check(ProbeVectors(ROWS * np.float32("nan")), "b")
    assert one.of(2).vectors.tolist() == [[1, 1, 1]]


def test_least_cosine_is_the_worst_row() -> None:
    other = ROWS.copy()
    other[2] = -other[2]
    assert least_cosine(ROWS, other) == pytest.approx(-1.0)


class OfKind(Scripted):
    """Answers `rows` of another kind, whatever the inputs are."""

    def __init__(self, rows: Sequence[Any], *, max_batch_size: int = 64) -> None:
        super().__init__(np.zeros((len(rows), 1)), max_batch_size=max_batch_size)
        self.answers = rows
        self.calls: list[tuple[BatchTask, AnyItem]] = []

    def prepare(self, items: Sequence[tuple[BatchTask, AnyItem]]) -> list[Prepared | ShoalError]:
        self.calls += items
        return [
            Prepared({"at": np.array([at])}, cost=1, group=(), outputs=("row",), tokens=1) for at in range(len(items))
        ]

    async def infer(
        self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        rows = np.empty(len(inputs["at"]), dtype=object)
        for place, at in enumerate(inputs["at"][:, 0].tolist()):
            rows[place] = self.answers[at]
        return {"row": rows}


def sparse(weights: Mapping[int, float]) -> SparseVector:
    return SparseVector(
        np.array(sorted(weights), np.int32), np.array([weights[i] for i in sorted(weights)], np.float32)
    )


SPARSE = [sparse({1: 1.0, 7: 2.0}), sparse({5: 0.5}), sparse({0: 1.0, 30521: 3.0}), sparse({2: 1.0})]
SCORES = [np.array([score, -score], dtype=np.float32) for score in (1.0, -2.0, 8.0, 0.1)]


async def probed_sparse(vectors: Sequence[SparseVector]) -> ProbeSparseVectors:
    model = OfKind([VectorSet(sparse=vector) for vector in vectors])
    found = await probe_sparse(model, model, soon())
    assert all(isinstance(task, Embed) and task.outputs == ("sparse",) for task, _ in model.calls)
    return found


async def test_sparse_vectors_are_compared_by_their_angle() -> None:
    one = await probed_sparse(SPARSE)
    one.check(await probed_sparse([sparse({1: 1.001, 7: 2.0}), *SPARSE[1:]]), "b")
    one.check(await probed_sparse([sparse({1: 1.0, 7: 2.0, 9: 1e-4}), *SPARSE[1:]]), "b")
    for other in (sparse({1: 1.0}), sparse({3: 1.0, 8: 2.0}), sparse({})):
        with pytest.raises(ConfigError, match="b returns different vectors than the other replicas"):
            one.check(await probed_sparse([other, *SPARSE[1:]]), "b")
    assert one.of(1).vectors == SPARSE[1:2]


async def test_two_vectors_of_nothing_agree() -> None:
    """A text without a term has an empty vector on every replica; all other rows are compared too."""
    one = await probed_sparse([sparse({}), *SPARSE[1:]])
    one.check(await probed_sparse([sparse({}), *SPARSE[1:]]), "b")
    for other in (SPARSE, [sparse({}), sparse({}), *SPARSE[2:]], [sparse({}), sparse({6: 0.5}), *SPARSE[2:]]):
        with pytest.raises(ConfigError, match="b returns different vectors than the other replicas"):
            one.check(await probed_sparse(other), "b")
    nothing = await probed_sparse([sparse({})] * 4)
    nothing.check(await probed_sparse([sparse({})] * 4), "b")
    assert len(nothing.digest) == 16


async def test_an_index_costs_no_memory() -> None:
    far = await probed_sparse([sparse({2**31 - 1: 1.0}), *SPARSE[1:]])
    far.check(far, "b")
    assert far.digest != (await probed_sparse(SPARSE)).digest


async def test_digests_tell_models_apart() -> None:
    """Digests differ between models, and not between answers of one model."""
    one = ProbeVectors(ROWS)
    assert (
        one.digest == ProbeVectors(ROWS * np.float32(1.0001)).digest == ProbeVectors(-(-ROWS - np.float32(1e-6))).digest
    )
    others = [ROWS[:, ::-1].copy(), ROWS[::-1].copy(), ROWS[:, :2], np.zeros_like(ROWS), ROWS.reshape(3, 4)]
    assert len({one.digest, *(ProbeVectors(other).digest for other in others)}) == 6
    terms = await probed_sparse(SPARSE)
    assert terms.digest == (await probed_sparse([sparse({1: 1.0, 7: 2.0, 9: 1e-4}), *SPARSE[1:]])).digest
    for changed in ([sparse({2: 1.0, 7: 2.0}), *SPARSE[1:]], SPARSE[::-1]):
        assert terms.digest != (await probed_sparse(changed)).digest


async def test_some_of_the_texts() -> None:
    model = OfKind([VectorSet(sparse=vector) for vector in SPARSE])
    assert len((await probe_sparse(model, model, soon(), TEXTS[1:3])).vectors) == 2
    assert [item for _, item in model.calls] == list(TEXTS[1:3])
    dense = OfKind(list(ROWS))
    assert np.array_equal((await probe(dense, dense, soon(), TEXTS[:1])).vectors, ROWS[:1])
    assert [item for _, item in dense.calls] == [TEXTS[0]]


@pytest.mark.parametrize(("items", "max_batch_size"), [(PAIRS, 64), (TEXTS, 3)])
async def test_scores_are_requested_raw(items: Sequence[Any], max_batch_size: int) -> None:
    model = OfKind(SCORES, max_batch_size=max_batch_size)
    found = await probe_scores(model, model, soon(), items)
    assert np.array_equal(found.scores, np.stack(SCORES))
    assert [item for _, item in model.calls] == list(items)
    assert all(isinstance(task, Classify) and task.raw_scores for task, _ in model.calls)


def test_scores_agree_within_precision() -> None:
    scores = np.stack(SCORES)
    one = ProbeScores(scores)
    assert np.array_equal(one.of(3).scores, scores[3:])
    one.check(ProbeScores(scores.astype(np.float16).astype(np.float32) + np.float32(0.05)), "b")
    with pytest.raises(
        ConfigError,
        match=r"b returns different scores than the other replicas \(differing by up to 1\.000\): its "
        r"weights differ",
    ):
        one.check(ProbeScores(scores + np.array([[0, 0], [0, 0], [0, 0], [1, 0]], dtype=np.float32)), "b")
    with pytest.raises(ConfigError, match="1 labels, but the other replicas score 2"):
        one.check(ProbeScores(scores[:, :1]), "b")
    with pytest.raises(ConfigError, match="scores than the other replicas"):
        one.check(ProbeScores(scores * np.float32("nan")), "b")
