"""Lanes over fake engines, for tests of the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from shoal.backends.fake.model import FakeEngine, FakePipeline, FakeScript, compute_vector, tokenize_item
from shoal.core.protocols import BatchReport, Observer
from shoal.core.recording import Tracer
from shoal.core.scheduling.lane import Lane, LaneOptions
from shoal.core.scheduling.planner import Limits
from shoal.core.threads import Threads
from shoal.types import Context, Embed, Embedded, TextItem, TrafficClass

T = TypeVar("T")


class Inline(Threads):
    """Threads that run calls inline: a real thread would race with a virtual clock."""

    def __init__(self) -> None:
        super().__init__("inline", 2)

    async def run(self, call: Callable[[], T]) -> T:
        return call()


class Reports(Observer):
    def __init__(self) -> None:
        self.batches: list[BatchReport] = []

    def batched(self, report: BatchReport) -> None:
        self.batches.append(report)


def make_lane(
    *scripts: FakeScript,
    max_items: int = 16384,
    max_queue_s: float = 0.0,
    observer: Observer | None = None,
    pipeline: type[FakePipeline] = FakePipeline,
    engine: type[FakeEngine] = FakeEngine,
    tracer: Tracer | None = None,
    **limits: Any,
) -> Lane:
    engines = [engine(script, f"fake-{number}") for number, script in enumerate(scripts)]
    options = LaneOptions(model="m", limits=Limits(**limits), max_items=max_items, max_queue_s=max_queue_s, space="s")
    loop = asyncio.get_running_loop()
    return Lane(
        pipeline(scripts[0]),
        engines,
        options,
        threads=Inline(),
        observer=observer or Reports(),
        tracer=tracer,
        clock=loop.time,
    )


def engine(lane: Lane, number: int = 0) -> FakeEngine:
    found = lane.replicas[number].engine
    assert isinstance(found, FakeEngine)
    return found


def context(seconds: float = 30.0, client: str = "c", traffic: TrafficClass | None = None) -> Context:
    return Context(id="r", deadline=asyncio.get_running_loop().time() + seconds, client=client, traffic=traffic)


def embed(*inputs: TextItem, normalize: bool = False, dimensions: int | None = None) -> Embed:
    return Embed(model="m", inputs=list(inputs), normalize=normalize, dimensions=dimensions)


def right(answer: Embedded, inputs: Sequence[TextItem], dimension: int = 32) -> bool:
    """Return whether each row is the vector of its own input."""
    expected = np.stack([compute_vector(tokenize_item(item), dimension) for item in inputs])
    return bool(np.array_equal(answer.vectors, expected))
