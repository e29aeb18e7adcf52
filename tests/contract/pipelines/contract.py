"""What any Pipeline must do. A new one falls under it by a subclass with four fixtures (see test_pipelines.py)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shoal.core.protocols import Counted, EngineFacts, Pipeline, Prepared
from shoal.errors import InvalidValue, NotFinite, ShoalError
from shoal.types import Array, Embed, TextItem

TEXTS: list[TextItem] = ["a fox", "the quick brown fox jumps over the lazy dog " * 3, "dogs", [5, 6, 7], "", "a fox"]


def embed(**fields: Any) -> Embed:
    return Embed(model="m", inputs=[], **fields)


def prepared(pipeline: Pipeline, items: list[TextItem], **fields: Any) -> list[Prepared]:
    answers = pipeline.prepare([(embed(**fields), item) for item in items])
    assert all(isinstance(answer, Prepared) for answer in answers)
    return [answer for answer in answers if isinstance(answer, Prepared)]


def vectors(answers: Sequence[Array | Counted | ShoalError]) -> list[Array]:
    rows = [answer.row if isinstance(answer, Counted) else answer for answer in answers]
    assert all(isinstance(row, np.ndarray) for row in rows)
    return [row for row in rows if isinstance(row, np.ndarray)]


def some_vectors(rows: int, dimension: int) -> Array:
    """Other numbers in every row."""
    return np.random.default_rng(1).normal(size=(rows, dimension)).astype(np.float32)


class PipelineContract:
    """Subclasses give `pipeline`, `facts`, `dimension` of its vectors, and `bad`: an item that it refuses.

    `texts` are items that it takes, the first and the last being equal. `padded`: an item's arrays are as long as it
    costs, and a batch is as long as its longest item. `outputs` may be overridden for engines that answer otherwise.
    """

    texts = TEXTS
    padded = True

    @pytest.fixture
    def pipeline(self) -> Pipeline:
        raise NotImplementedError

    @pytest.fixture
    def facts(self) -> EngineFacts:
        raise NotImplementedError

    @pytest.fixture
    def dimension(self) -> int:
        raise NotImplementedError

    @pytest.fixture
    def bad(self) -> TextItem:
        raise NotImplementedError

    def outputs(self, batch: list[Prepared], vectors: Array) -> dict[str, Array]:
        """What an engine could answer that has these vectors [rows, dimension] for a batch."""
        return dict.fromkeys(batch[0].outputs, vectors)

    def answers(self, pipeline: Pipeline, batch: list[Prepared], vectors: Array) -> Sequence[Any]:
        return pipeline.finish(self.outputs(batch, vectors), batch)

    def test_check_passes_a_plain_task_and_names_a_bad_field(self, pipeline: Pipeline, dimension: int) -> None:
        """What is wrong with the whole task is raised at once, with the field's name."""
        pipeline.check(embed())
        pipeline.check(embed(dimensions=dimension))
        for wrong in (0, dimension + 1):
            with pytest.raises(InvalidValue) as caught:
                pipeline.check(embed(dimensions=wrong))
            assert caught.value.param == "dimensions"

    def test_estimates_are_positive(self, pipeline: Pipeline) -> None:
        """Every item costs something before it is known how much."""
        assert all(pipeline.estimate(item) >= 1 for item in self.texts)

    def test_one_entry_an_item_in_order(self, pipeline: Pipeline) -> None:
        """Items prepared together are as each is alone."""
        together = prepared(pipeline, self.texts)
        alone = [prepared(pipeline, [item])[0] for item in self.texts]
        assert [p.key for p in together] == [p.key for p in alone]
        assert [p.cost for p in together] == [p.cost for p in alone]

    def test_no_items_give_no_entries(self, pipeline: Pipeline) -> None:
        """An empty job is answered with nothing."""
        assert pipeline.prepare([]) == []

    def test_prepared_items_are_whole(self, pipeline: Pipeline) -> None:
        """Costs are lengths of the tensors; groups and keys can be looked up; some output is wanted."""
        for item in prepared(pipeline, self.texts):
            assert item.cost >= 1
            assert item.tokens >= 0
            assert item.outputs
            assert {len(tensor) for tensor in item.tensors.values()} == {item.cost if self.padded else 1}
            assert isinstance(hash(item.group), int)
            assert isinstance(hash(item.key), int)

    def test_keys_tell_work_apart(self, pipeline: Pipeline) -> None:
        """Equal items have equal keys; another text, or another shape of the answer, has another."""
        keys = [p.key for p in prepared(pipeline, self.texts)]
        assert keys[0] == keys[-1]
        assert len(set(keys)) == len(self.texts) - 1
        assert prepared(pipeline, ["a fox"], dimensions=2)[0].key != keys[0]
        assert prepared(pipeline, ["a fox"], normalize=False)[0].key != keys[0]

    def test_a_bad_item_fails_alone(self, pipeline: Pipeline, bad: TextItem) -> None:
        """Its entry is a ShoalError; the others are as without it."""
        answers = pipeline.prepare([(embed(), "a fox"), (embed(), bad), (embed(), "dogs")])
        assert isinstance(answers[1], ShoalError)
        kept = [answer.key for answer in answers if isinstance(answer, Prepared)]
        assert kept == [p.key for p in prepared(pipeline, ["a fox", "dogs"])]

    def test_batches_are_rectangular_and_bucketed(self, pipeline: Pipeline, facts: EngineFacts) -> None:
        """All arrays share rows and length; each is a bucket, or as it is above the last or without any."""
        batch = prepared(pipeline, self.texts[:3])
        tensors = pipeline.collate(batch, facts)
        ((rows, *lengths),) = {tensor.shape[:2] for tensor in tensors.values()}
        assert rows in facts.size_buckets or rows == len(batch)
        if self.padded:
            assert lengths[0] in facts.length_buckets or lengths[0] == max(item.cost for item in batch)
        assert all(tensor.flags.c_contiguous for tensor in tensors.values())

    def test_rows_go_back_in_order(self, pipeline: Pipeline, facts: EngineFacts, dimension: int) -> None:
        """One row an item, in order, whatever the padding rows hold."""
        batch = prepared(pipeline, self.texts[:3], normalize=False)
        rows = len(next(iter(pipeline.collate(batch, facts).values())))
        source = some_vectors(rows, dimension)
        answers = vectors(self.answers(pipeline, batch, source))
        assert len(answers) == len(batch)
        for row, answer in zip(source, answers, strict=False):
            np.testing.assert_array_equal(answer, row)

    def test_vectors_are_cut_then_normalised(self, pipeline: Pipeline, dimension: int) -> None:
        """`dimensions` first, so that the vector that is left has length 1; float32 in one dimension."""
        batch = prepared(pipeline, self.texts[:3], dimensions=2)
        for answer in vectors(self.answers(pipeline, batch, some_vectors(3, dimension))):
            assert answer.shape == (2,)
            assert answer.dtype == np.float32
            assert np.linalg.norm(answer) == pytest.approx(1.0)

    def test_a_row_that_is_not_finite_fails_alone(self, pipeline: Pipeline, dimension: int) -> None:
        """NaN in one row is NotFinite for one item."""
        batch = prepared(pipeline, self.texts[:3])
        values = some_vectors(4, dimension)
        values[1, 0] = np.nan
        values[3] = np.inf
        first, second, third = self.answers(pipeline, batch, values)
        assert isinstance(second, NotFinite)
        assert len(vectors([first, third])) == 2

    def test_threads_may_share_it(self, pipeline: Pipeline) -> None:
        """Called from several threads at once it answers what it answers alone."""
        jobs: list[list[TextItem]] = [[f"fox {n}", *self.texts, "dogs " * n] for n in range(1, 13)]

        def keys(job: list[TextItem]) -> list[object]:
            return [p.key for p in prepared(pipeline, job)]

        alone = [keys(job) for job in jobs]
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(keys, jobs)) == alone
