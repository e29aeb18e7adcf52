"""Probes a model on Triton, of any kind, with a few inputs."""

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
"""Timeout in seconds for the first inputs of a model: a GPU may build its kernels with them."""

ProbeResult: TypeAlias = ProbeVectors | ProbeSparseVectors | ProbeScores


async def probe_model(
    engine: TritonEngine, pipeline: Pipeline, kinds: Sequence[VectorKind], *, pairs: bool = False
) -> ProbeResult:
    """Return the answers of one replica. `kinds`: the vectors that the model returns, none if it scores; `pairs`: it
    scores pairs of texts. Raises as the engine and the pipeline do."""
    deadline = time.monotonic() + PROBE_S
    if not kinds:
        return await probe_scores(engine, pipeline, deadline, PAIRS if pairs else TEXTS)
    if "dense" in kinds:
        return await probe(engine, pipeline, deadline)
    if "sparse" in kinds:
        return await probe_sparse(engine, pipeline, deadline)
    return await probe(engine, _MeanPipeline(pipeline), deadline)


def check_agreement(reference: ProbeResult, answered: ProbeResult, name: str) -> None:
    """Raise ConfigError if the replica `name` does not serve the same model as `reference`."""
    # One pipeline probes all replicas of a model, so their answers are of one kind.
    reference.check(answered, name)  # type: ignore[arg-type]


class PipelineWrapper:
    """Delegates to a pipeline; subclasses change one step."""

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
    """A late-interaction pipeline that returns the mean of a text's vectors as its dense one."""

    def prepare(self, items: Sequence[tuple[BatchTask, Item]]) -> list[Prepared | ShoalError]:
        multi_items = [(msgspec.structs.replace(cast(Embed, task), outputs=("multi",)), item) for task, item in items]
        return self._pipeline.prepare(multi_items)

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> Sequence[Row | CountedRow | ShoalError]:
        return [_mean(each) for each in self._pipeline.finish(outputs, batch)]


def _mean(row: Row | CountedRow | ShoalError) -> Row | CountedRow | ShoalError:
    if not isinstance(row, VectorSet) or row.multi is None:
        return row
    mean: Array = np.asarray(row.multi.mean(axis=0))
    return mean
