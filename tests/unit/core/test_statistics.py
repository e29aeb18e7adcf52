from __future__ import annotations

import time

import numpy as np
import pytest

from shoal.core.gateway import Gateway
from shoal.core.protocols import BatchReport, GenerationReport, Observer, Statistics
from shoal.core.registry import Model, Registry
from shoal.core.statistics import MAX_MODELS, Counts
from shoal.errors import ModelNotFound, ShoalError, TransportFailed
from shoal.types import (
    BatchFacts,
    BatchStats,
    DurationStat,
    Embedded,
    InferenceStats,
    ModelStats,
    Result,
    TaskKind,
    TrafficClass,
)
from tests.unit.core.runners import Embedder


def answer(queue_ms: float, prepare_ms: float, infer_ms: float) -> Embedded:
    facts = BatchFacts(queue_ms=queue_ms, prepare_ms=prepare_ms, infer_ms=infer_ms)
    return Embedded(vectors=np.zeros((1, 2), np.float32), tokens=[1], facts=facts)


def batch(items: int, seconds: float, error: str | None = None, finish: float | None = None) -> BatchReport:
    return BatchReport("m", "r", items, 10, 16, "idle", seconds, error, finish)


def test_requests_and_batches_are_counted_where_their_time_went() -> None:
    """Counts and nanoseconds are kept, batches by size, and failures separately; cancelled requests are not counted."""
    counts = Counts()
    counts.batched(batch(8, 0.5, finish=0.125))
    counts.batched(batch(2, 0.25))
    counts.batched(batch(8, 0.5))
    counts.batched(batch(4, 9.0, "backend"))
    counts.finished("m", "embed", "ok", 1.0, answer(250, 125, 500))
    counts.finished("m", "embed", "ok", 2.0, answer(250, 125, 500))
    counts.finished("m", "embed", "backend", 0.5, None)
    counts.finished("m", "embed", "cancelled", 9.0, None)
    stats = counts.stats_for("m")
    assert (stats.name, stats.inference_count, stats.execution_count) == ("m", 18, 3)
    assert stats.inference_stats == InferenceStats(
        success=DurationStat(count=2, ns=3_000_000_000),
        fail=DurationStat(count=1, ns=500_000_000),
        queue=DurationStat(count=2, ns=500_000_000),
        compute_input=DurationStat(count=2, ns=250_000_000),
        compute_infer=DurationStat(count=2, ns=1_000_000_000),
        compute_output=DurationStat(count=1, ns=125_000_000),
    )
    assert stats.batch_stats == [
        BatchStats(batch_size=2, compute_infer=DurationStat(count=1, ns=250_000_000)),
        BatchStats(batch_size=8, compute_infer=DurationStat(count=2, ns=1_000_000_000)),
    ]
    assert abs(stats.last_inference / 1000 - time.time()) < 60


def test_generation_counts_by_request() -> None:
    """Each generation that succeeded is one inference; there are no batches."""
    counts = Counts()
    counts.finished("m", "generate", "ok", 1.0, None)
    stats = counts.stats_for("m")
    assert (stats.inference_count, stats.execution_count, stats.last_inference > 0) == (1, 0, True)
    assert stats.inference_stats.success == DurationStat(count=1, ns=1_000_000_000)


def test_a_model_that_did_nothing_has_zeros() -> None:
    """A model without requests, or a removed one, has zero counts."""
    counts = Counts()
    assert counts.stats_for("m") == ModelStats(name="m")
    counts.batched(batch(1, 1.0))
    counts.forget("m")
    counts.forget("m")
    assert counts.stats_for("m") == ModelStats(name="m")


def test_ever_new_names_do_not_add_up() -> None:
    """The oldest name is evicted."""
    counts = Counts()
    for number in range(MAX_MODELS + 1):
        counts.finished(f"m{number}", "embed", "backend", 1.0, None)
    assert counts.stats_for("m0") == ModelStats(name="m0")
    assert counts.stats_for(f"m{MAX_MODELS}").inference_stats.fail.count == 1
    assert counts.stats_for("m1").inference_stats.fail.count == 1


def test_everything_is_passed_on() -> None:
    """Calls pass through unchanged."""
    reports: list[tuple[object, ...]] = []

    class Recorder(Observer):
        def refused(self, reason: str, surface: str = "") -> None:
            reports.append(("refused", reason, surface))

        def accepted(self, model: str, task: TaskKind, items: int, traffic: TrafficClass, surface: str = "") -> None:
            reports.append(("accepted", model, task, items, traffic, surface))

        def batched(self, report: BatchReport) -> None:
            reports.append(("batched", report))

        def generated(self, report: GenerationReport) -> None:
            reports.append(("generated", report))

        def finished(
            self, model: str, task: TaskKind, outcome: str, seconds: float, result: Result | None, surface: str = ""
        ) -> None:
            reports.append(("finished", model, task, outcome, seconds, result, surface))

    counts = Counts(Recorder())
    counts.refused("x", "tei")
    counts.accepted("m", "embed", 3, "bulk", "tei")
    counts.batched(report := batch(3, 1.0))
    counts.generated(spoken := GenerationReport("m", 3, 5, 0.1, 0.5))
    counts.finished("m", "embed", "cancelled", 2.0, None, "tei")
    assert reports == [
        ("refused", "x", "tei"),
        ("accepted", "m", "embed", 3, "bulk", "tei"),
        ("batched", report),
        ("generated", spoken),
        ("finished", "m", "embed", "cancelled", 2.0, None, "tei"),
    ]


class CountingRunner(Embedder):
    """A runner whose backend counts; `fault` is raised when it cannot be reached."""

    fault: ShoalError | None = None

    async def statistics(self) -> list[ModelStats]:
        if self.fault is not None:
            raise self.fault
        return [ModelStats(name="theirs", version=version, execution_count=7) for version in ("1", "2")]


async def test_the_gateway_asks_the_backend_and_else_counts_itself() -> None:
    """For one model or all; an unreachable backend does not fail the page."""
    counts, registry = Counts(), Registry()
    own = CountingRunner()
    for name, runner in (("mine", Embedder()), ("theirs", own), ("loading", None)):
        registry.add(model := Model(name))
        if runner is not None:
            model.mark_loaded(runner)
    gateway = Gateway(registry, counts)
    assert isinstance(own, Statistics)
    counts.finished("mine", "generate", "ok", 1.0, None)
    counts.finished("theirs", "generate", "ok", 1.0, None)
    every = await gateway.statistics()
    assert [(each.name, each.version, each.execution_count) for each in every] == [
        ("mine", "", 0),
        ("theirs", "1", 7),
        ("theirs", "2", 7),
        ("loading", "", 0),
    ]
    assert await gateway.statistics("mine") == [counts.stats_for("mine")]
    own.fault = TransportFailed("triton is away")
    assert await gateway.statistics("theirs") == [counts.stats_for("theirs")]
    with pytest.raises(ModelNotFound):
        await gateway.statistics("nobody")
