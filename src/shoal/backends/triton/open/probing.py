"""What a model on Triton answers for a few inputs, whatever kind of model it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias, cast

import msgspec
import numpy as np

from shoal.backends.triton.engine import TritonEngine
from shoal.core.probe import (
    PAIRS,
    TEXTS,
    ProbeScores,
    ProbeSparseVectors,
    ProbeVectors,
    probe,
    probe_scores,
    probe_sparse,
)
from shoal.core.protocols import CountedRow, EngineFacts, Pipeline, Prepared, Row, Tensors, VectorSet, WorkWeight
from shoal.errors import ShoalError
from shoal.types import Array, BatchTask, Embed, Item, VectorKind

PROBE_S = 60.0
"""For the first texts of a model: a GPU may build its kernels with them."""

ProbeResult: TypeAlias = ProbeVectors | ProbeSparseVectors | ProbeScores


async def probe_model(
    engine: TritonEngine, pipeline: Pipeline, kinds: Sequence[VectorKind], *, pairs: bool = False
) -> ProbeResult:
    """The answers of one replica. `kinds`: the vectors that the model gives, none where it scores; `pairs`: it scores
    two texts together. Raises what the engine and the pipeline raise."""
    deadline = time.monotonic() + PROBE_S
    if not kinds:
        return await probe_scores(engine, pipeline, deadline, PAIRS if pairs else TEXTS)
    if "dense" in kinds:
        return await probe(engine, pipeline, deadline)
    if "sparse" in kinds:
        return await probe_sparse(engine, pipeline, deadline)
    return await probe(engine, _MeanPipeline(pipeline), deadline)


def check_agreement(reference: ProbeResult, answered: ProbeResult, name: str) -> None:
    """Raise ConfigError when a replica, called `name`, is none of the model that `reference` is of."""
    # One pipeline asks all replicas of a model, so that their answers are of one kind.
    reference.check(answered, name)  # type: ignore[arg-type]


class PipelineWrapper:
    """A pipeline as it is, for those that change one step of it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    @property
    def work(self) -> WorkWeight:
        return self._pipeline.work

    def check(self, task: BatchTask) -> None:
        self._pipeline.check(task)

    def estimate(self, item: Item) -> int:
        return self._pipeline.estimate(item)

    def prepare(self, items: Sequence[tuple[BatchTask, Item]]) -> list[Prepared | ShoalError]:
        return self._pipeline.prepare(items)

    def collate(self, batch: Sequence[Prepared], facts: EngineFacts) -> dict[str, Array]:
        return self._pipeline.collate(batch, facts)

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> Sequence[Row | CountedRow | ShoalError]:
        return self._pipeline.finish(outputs, batch)


class _MeanPipeline(PipelineWrapper):
    """A pipeline of late interaction, with the mean of a text's vectors in the place of its dense one."""

    def prepare(self, items: Sequence[tuple[BatchTask, Item]]) -> list[Prepared | ShoalError]:
        asked = [(msgspec.structs.replace(cast(Embed, task), outputs=("multi",)), item) for task, item in items]
        return self._pipeline.prepare(asked)

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> Sequence[Row | CountedRow | ShoalError]:
        return [_mean(each) for each in self._pipeline.finish(outputs, batch)]


def _mean(row: Row | CountedRow | ShoalError) -> Row | CountedRow | ShoalError:
    if not isinstance(row, VectorSet) or row.multi is None:
        return row
    mean: Array = np.asarray(row.multi.mean(axis=0))
    return mean
