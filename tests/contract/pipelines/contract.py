"""The contract of `Pipeline`. To test a new one, subclass VectorContract if it embeds or ScoreContract if it scores,
with four fixtures (see test_pipelines.py)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any, ClassVar

import numpy as np
import pytest

from shoal.core.protocols import CountedRow, EngineFacts, Pipeline, Prepared, VectorSet
from shoal.errors import InvalidValue, NotFinite, ShoalError
from shoal.types import Array, BatchTask, Classify, Embed, Item, Rerank, VectorKind

LONG = "the quick brown fox jumps over the lazy dog " * 3
TEXTS: list[Item] = ["a fox", LONG, "dogs", [5, 6, 7], "", "a fox"]
PAIRS: list[Item] = [("a fox", "dogs"), ("the fox", LONG), "dogs", ("dogs", "a fox"), "", ("a fox", "dogs")]


def embed(**fields: Any) -> Embed:
    return Embed(model="m", inputs=[], **fields)


def rows_of(answers: Sequence[Any]) -> list[Any]:
    """The rows without their token counts; fails on an error."""
    rows = [answer.row if isinstance(answer, CountedRow) else answer for answer in answers]
    assert all(isinstance(row, np.ndarray | VectorSet) for row in rows), rows
    return rows


def vectors(answers: Sequence[Any]) -> list[Array]:
    rows = rows_of(answers)
    assert all(isinstance(row, np.ndarray) for row in rows)
    return rows


def some_rows(rows: int, width: int) -> Array:
    """Rows of distinct numbers."""
    return np.random.default_rng(1).normal(size=(rows, width)).astype(np.float32)


class PipelineContract:
    """Subclasses provide `pipeline`, `facts`, `width` of its rows, and `bad`: an item that it rejects.

    `items`: valid items, the first and the last being equal; `good`: two of them, to stand around the bad one. `raw`:
    fields of a task whose rows are the engine's own; `others`: fields of tasks with other rows. `padded`: an item's
    arrays are as long as its cost, and a batch is as long as its longest item. `outputs` may be overridden for engines
    with other outputs.
    """

    items: ClassVar[Sequence[Item]]
    good: ClassVar[tuple[Item, Item]]
    raw: ClassVar[dict[str, Any]]
    others: ClassVar[list[dict[str, Any]]]
    padded = True

    @pytest.fixture
    def pipeline(self) -> Pipeline:
        raise NotImplementedError

    @pytest.fixture
    def facts(self) -> EngineFacts:
        raise NotImplementedError

    @pytest.fixture
    def width(self) -> int:
        raise NotImplementedError

    @pytest.fixture
    def bad(self) -> Item:
        raise NotImplementedError

    def task(self, **fields: Any) -> BatchTask:
        raise NotImplementedError

    def outputs(self, batch: list[Prepared], rows: Array) -> dict[str, Array]:
        """The outputs of an engine with these rows [rows, width] for a batch."""
        return dict.fromkeys(batch[0].outputs, rows)

    def expected(self, batch: list[Prepared], rows: Array) -> Array:
        """The rows that `finish` should return: by default the engine's."""
        return rows

    def prepared(self, pipeline: Pipeline, items: Sequence[Item], **fields: Any) -> list[Prepared]:
        answers = pipeline.prepare([(self.task(**fields), item) for item in items])
        assert all(isinstance(answer, Prepared) for answer in answers), answers
        return [answer for answer in answers if isinstance(answer, Prepared)]

    def answers(self, pipeline: Pipeline, batch: list[Prepared], rows: Array) -> Sequence[Any]:
        return pipeline.finish(self.outputs(batch, rows), batch)

    def test_check_passes_plain_tasks(self, pipeline: Pipeline) -> None:
        """With and without optional fields."""
        for fields in ({}, self.raw, *self.others):
            pipeline.check(self.task(**fields))

    def test_estimates_are_positive(self, pipeline: Pipeline) -> None:
        """Every item has a cost before it is tokenized."""
        assert all(pipeline.estimate(item) >= 1 for item in self.items)

    def test_one_entry_an_item_in_order(self, pipeline: Pipeline) -> None:
        """Preparing items together gives the same as preparing each alone."""
        together = self.prepared(pipeline, self.items)
        alone = [self.prepared(pipeline, [item])[0] for item in self.items]
        assert [p.key for p in together] == [p.key for p in alone]
        assert [p.cost for p in together] == [p.cost for p in alone]

    def test_no_items_give_no_entries(self, pipeline: Pipeline) -> None:
        """An empty job returns an empty list."""
        assert pipeline.prepare([]) == []

    def test_prepared_items_are_whole(self, pipeline: Pipeline) -> None:
        """Costs are lengths of the tensors; groups and keys are hashable; some output is requested."""
        for item in self.prepared(pipeline, self.items):
            assert item.cost >= 1
            assert item.tokens >= 0
            assert item.outputs
            assert {len(tensor) for tensor in item.tensors.values()} == {item.cost if self.padded else 1}
            assert isinstance(hash(item.group), int)
            assert isinstance(hash(item.key), int)

    def test_equal_groups_have_equal_parameters(self, pipeline: Pipeline) -> None:
        """All items of a batch share one set of parameters."""
        params: dict[object, object] = {}
        for fields in ({}, self.raw, *self.others):
            for item in self.prepared(pipeline, self.items[:2], **fields):
                assert params.setdefault(item.group, item.params) == item.params

    def test_keys_are_equal_only_for_equal_work(self, pipeline: Pipeline) -> None:
        """Equal items have equal keys; another item or another option gives another key."""
        keys = [p.key for p in self.prepared(pipeline, self.items)]
        assert keys[0] == keys[-1]
        assert len(set(keys)) == len(self.items) - 1
        fields = [{}, self.raw, *self.others]
        assert len({self.prepared(pipeline, self.items[:1], **each)[0].key for each in fields}) == len(fields)

    def test_a_bad_item_fails_alone(self, pipeline: Pipeline, bad: Item) -> None:
        """Its entry is a ShoalError; the others are unaffected."""
        before, after = self.good
        answers = pipeline.prepare([(self.task(), before), (self.task(), bad), (self.task(), after)])
        assert isinstance(answers[1], ShoalError)
        keys = [answer.key for answer in answers if isinstance(answer, Prepared)]
        assert keys == [p.key for p in self.prepared(pipeline, self.good)]

    def test_batches_are_rectangular_and_bucketed(self, pipeline: Pipeline, facts: EngineFacts) -> None:
        """All arrays share rows and length; each is a bucket, or unpadded above the last one or without any."""
        batch = self.prepared(pipeline, self.items[:3])
        tensors = pipeline.collate(batch, facts)
        ((rows, *lengths),) = {tensor.shape[:2] for tensor in tensors.values()}
        assert rows in facts.size_buckets or rows == len(batch)
        if self.padded:
            assert lengths[0] in facts.length_buckets or lengths[0] == max(item.cost for item in batch)
        assert all(tensor.flags.c_contiguous for tensor in tensors.values())

    def test_rows_go_back_in_order(self, pipeline: Pipeline, facts: EngineFacts, width: int) -> None:
        """One row per item, in order, regardless of padding rows."""
        batch = self.prepared(pipeline, self.items[:3], **self.raw)
        rows = len(next(iter(pipeline.collate(batch, facts).values())))
        source = some_rows(rows, width)
        answers = vectors(self.answers(pipeline, batch, source))
        assert len(answers) == len(batch)
        for row, answer in zip(self.expected(batch, source), answers, strict=False):
            np.testing.assert_array_equal(answer, row)
            assert answer.dtype == np.float32

    def test_a_row_that_is_not_finite_fails_alone(self, pipeline: Pipeline, width: int) -> None:
        """NaN in one row is NotFinite for one item."""
        batch = self.prepared(pipeline, self.items[:3])
        values = some_rows(4, width)
        values[1, 0] = np.nan
        values[3] = np.inf
        first, second, third = self.answers(pipeline, batch, values)
        assert isinstance(second, NotFinite)
        assert len(vectors([first, third])) == 2

    def test_threads_may_share_it(self, pipeline: Pipeline) -> None:
        """Concurrent calls from several threads give the same answers as single ones."""
        jobs: list[list[Item]] = [[f"fox {n}", *self.items, "dogs " * n] for n in range(1, 13)]

        def keys(job: list[Item]) -> list[object]:
            return [p.key for p in self.prepared(pipeline, job)]

        alone = [keys(job) for job in jobs]
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(keys, jobs)) == alone


class VectorContract(PipelineContract):
    """The contract of a pipeline that embeds.

    `kinds`: its kinds of vectors; override `sets` if it gives more than dense ones: an engine's outputs for all of
    them, with `length` rows per token.
    """

    items: ClassVar[Sequence[Item]] = TEXTS
    good: ClassVar[tuple[Item, Item]] = ("a fox", "dogs")
    raw: ClassVar[dict[str, Any]] = {"normalize": False}
    others: ClassVar[list[dict[str, Any]]] = [{"dimensions": 2}]
    kinds: tuple[VectorKind, ...] = ("dense",)

    def task(self, **fields: Any) -> Embed:
        return embed(**fields)

    def sets(self, batch: list[Prepared], rows: Array) -> dict[str, Array]:
        return self.outputs(batch, rows)

    def test_bad_dimensions_are_named(self, pipeline: Pipeline, width: int) -> None:
        """An error in the whole task is raised at once, with the field's name."""
        pipeline.check(embed(dimensions=width))
        for wrong in (0, width + 1):
            with pytest.raises(InvalidValue) as caught:
                pipeline.check(embed(dimensions=wrong))
            assert caught.value.param == "dimensions"

    def test_vectors_are_cut_then_normalised(self, pipeline: Pipeline, width: int) -> None:
        """`dimensions` comes first, so that the remaining vector has length 1; float32 in one dimension."""
        batch = self.prepared(pipeline, self.items[:3], dimensions=2)
        for answer in vectors(self.answers(pipeline, batch, some_rows(3, width))):
            assert answer.shape == (2,)
            assert answer.dtype == np.float32
            assert np.linalg.norm(answer) == pytest.approx(1.0)

    def test_several_kinds_come_in_vector_sets(self, pipeline: Pipeline, width: int) -> None:
        """All requested kinds and no others; dense vectors equal those requested alone."""
        sets = [kinds for size in range(1, 5) for kinds in combinations(self.kinds, size) if kinds != ("dense",)]
        keys = {self.prepared(pipeline, self.items[:1])[0].key}
        for kinds in sets:
            pipeline.check(embed(outputs=kinds))
            batch = self.prepared(pipeline, self.items[:3], outputs=kinds)
            keys.add(batch[0].key)
            source = some_rows(4, width)
            plain = vectors(self.answers(pipeline, self.prepared(pipeline, self.items[:3]), source))
            for row, dense in zip(rows_of(pipeline.finish(self.sets(batch, source), batch)), plain, strict=True):
                assert isinstance(row, VectorSet)
                assert {kind for kind in self.kinds if getattr(row, kind) is not None} == set(kinds)
                _check_set(row)
                if row.dense is not None:
                    np.testing.assert_array_equal(row.dense, dense)
        assert len(keys) == len(sets) + 1

    def test_kinds_it_lacks_are_refused(self, pipeline: Pipeline) -> None:
        """An item that asks for such a kind gets an error as its entry."""
        lacking: list[VectorKind] = [kind for kind in ("sparse", "multi", "tokens") if kind not in self.kinds]
        for kind in lacking:
            assert isinstance(pipeline.prepare([(embed(outputs=(kind,)), "a fox")])[0], ShoalError)


def _check_set(row: VectorSet) -> None:
    for matrix in (row.tokens, row.multi):
        assert matrix is None or (matrix.dtype == np.float32 and matrix.ndim == 2)
    if row.sparse is not None:
        assert row.sparse.indices.dtype == np.int32
        assert row.sparse.values.dtype == np.float32
        assert row.sparse.values.all()
        assert (np.diff(row.sparse.indices) > 0).all()


class ScoreContract(PipelineContract):
    """The contract of a pipeline that scores: pairs and single texts, for both tasks."""

    items: ClassVar[Sequence[Item]] = PAIRS
    good: ClassVar[tuple[Item, Item]] = (("a fox", "dogs"), "dogs")
    raw: ClassVar[dict[str, Any]] = {"raw_scores": True}
    others: ClassVar[list[dict[str, Any]]] = []

    def task(self, **fields: Any) -> Rerank | Classify:
        return Classify(model="m", inputs=[], **fields)

    def test_both_tasks_are_the_same_work(self, pipeline: Pipeline) -> None:
        """A reranker's score is that of its only label."""
        pairs = [item for item in self.items if isinstance(item, tuple)]
        ranked = pipeline.prepare([(Rerank(model="m", queries=[], documents=[]), pair) for pair in pairs])
        keys = [answer.key for answer in ranked if isinstance(answer, Prepared)]
        assert keys == [p.key for p in self.prepared(pipeline, pairs)]

    def test_scores_are_of_every_label_and_between_0_and_1(self, pipeline: Pipeline, width: int) -> None:
        """Unless raw scores are requested: float32 [labels], from any logits."""
        batch = self.prepared(pipeline, self.items[:3])
        for row in vectors(self.answers(pipeline, batch, some_rows(4, width) * 200)):
            assert row.shape == (width,)
            assert row.dtype == np.float32
            assert ((row >= 0) & (row <= 1)).all()

    def test_raw_scores_and_others_share_a_call(self, pipeline: Pipeline) -> None:
        """The activation runs after the engine."""
        raw, plain = (self.prepared(pipeline, self.items[:1], **fields)[0] for fields in (self.raw, {}))
        assert (raw.group, raw.outputs) == (plain.group, plain.outputs)
