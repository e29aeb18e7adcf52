"""The engine over workers: wide lane, warm-up, rebuild and close."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from shoal.backends.local import engine
from shoal.backends.local.engine import SOLO_ITEMS, Lanes, LocalEngine
from shoal.backends.local.lane_choice import LONGEST_WAIT
from shoal.backends.local.shapes import Shape, WarmUp
from shoal.backends.local.slots import Slots
from shoal.backends.local.tensor_inputs import Port
from shoal.core.protocols import CostModel, EngineFacts
from shoal.errors import DeadlineExceeded, EngineFailed, InputRejected, ModelFileError, TransportFailed
from shoal.types import Array
from tests.unit.backends.local.test_slots import ticks
from tests.unit.backends.workers import StepWorker

PLAN = [Shape(1, 8), Shape(1, 16), Shape(3, 8), Shape(16, 8)]


class EngineHarness:
    """An engine of `streams` workers and, with `wide`, one more."""

    def __init__(
        self,
        *,
        streams: int = 2,
        wide: bool = True,
        at_once: bool = True,
        warm: WarmUp | None = None,
        rebuilds: bool = False,
    ) -> None:
        self.narrow = [StepWorker(at_once) for _ in range(streams)]
        self.wide = StepWorker(at_once)
        self.ended = 0
        self.rebuilt = 0
        self.lost: Exception | None = None
        self.may_rebuild = asyncio.Event()
        facts = EngineFacts(name="rig", inputs=("x",), outputs=("y",), slots=streams)
        self.engine = LocalEngine(
            facts,
            [Port("x", np.dtype(np.int64), (None, None))],
            Lanes(Slots(self.narrow), Slots([self.wide]) if wide else None),
            max_length=64,
            warm=warm or WarmUp([], 1.0),
            rebuild=self._rebuild if rebuilds else None,
            end=self._end,
        )

    async def _rebuild(self) -> Lanes:
        self.rebuilt += 1
        await self.may_rebuild.wait()
        if self.lost is not None:
            raise self.lost
        self.narrow = [StepWorker(at_once=True) for _ in self.narrow]
        return Lanes(Slots(self.narrow))

    def _end(self) -> None:
        self.ended += 1

    async def infer(self, size: int = 1, length: int = 8, seconds: float = 30.0) -> dict[str, Array]:
        return await self.engine.infer({"x": np.ones((size, length), np.int64)}, ["y"], {}, time.monotonic() + seconds)

    def counts(self) -> tuple[int, int]:
        """Return the number of batches that ran (narrow, wide)."""
        return sum(worker.batches for worker in self.narrow), self.wide.batches


async def test_a_lone_small_batch_runs_wide() -> None:
    """Sequential small batches each run on all cores."""
    harness = EngineHarness()
    for _ in range(3):
        await harness.infer(SOLO_ITEMS)
    assert harness.counts() == (0, 3)


async def test_bulk_runs_narrow_even_alone() -> None:
    """A batch of more than SOLO_ITEMS items never runs on the wide lane."""
    harness = EngineHarness()
    await harness.infer(SOLO_ITEMS + 1)
    assert harness.counts() == (1, 0)


async def test_batches_of_one_loop_tick_share_the_cores() -> None:
    """Two batches that start in the same tick both run narrow."""
    harness = EngineHarness()
    await asyncio.gather(harness.infer(), harness.infer())
    assert harness.counts() == (2, 0)


async def test_a_batch_beside_another_runs_narrow() -> None:
    """While the wide lane is busy, the next batch runs on a stream without waiting."""
    harness = EngineHarness(at_once=False)
    first = asyncio.create_task(harness.infer())
    await ticks()
    second = asyncio.create_task(harness.infer())
    await ticks()
    assert harness.counts() == (1, 1)
    harness.wide.finish()
    next(worker for worker in harness.narrow if worker.running).finish()
    await asyncio.gather(first, second)


async def test_without_a_wide_lane_all_run_narrow() -> None:
    """An engine with one stream has only the narrow lane."""
    harness = EngineHarness(wide=False)
    await harness.infer()
    assert harness.counts() == (1, 0)


async def test_an_unknown_output_is_refused() -> None:
    """The error names the unknown output, and no batch runs."""
    harness = EngineHarness()
    with pytest.raises(InputRejected, match="no output 'z'; it has y"):
        await harness.engine.infer({"x": np.ones((1, 1), np.int64)}, ["z"], {}, time.monotonic() + 30)
    assert harness.counts() == (0, 0)


async def test_warming_runs_every_shape_on_every_worker() -> None:
    """Each stream compiles its own kernels, so each runs all shapes; the wide lane runs only small batches."""
    harness = EngineHarness(warm=WarmUp(PLAN, 10.0))
    await harness.engine.warm_up(60.0)
    for worker in harness.narrow:
        assert set(worker.shapes) == set(PLAN)
    assert set(harness.wide.shapes) == {shape for shape in PLAN if shape.size <= SOLO_ITEMS}


async def test_warming_states_the_cost() -> None:
    """Warm-up puts the measured cost into the facts, which stay the same object until it changes."""
    harness = EngineHarness(warm=WarmUp(PLAN, 10.0))
    assert harness.engine.facts.cost == CostModel()
    await harness.engine.warm_up(60.0)
    assert harness.engine.facts.cost != CostModel()
    assert harness.engine.facts is harness.engine.facts


async def test_no_time_means_no_warming() -> None:
    """With a budget of 0 seconds no shape is run, now or later."""
    harness = EngineHarness(warm=WarmUp(PLAN, 10.0))
    await harness.engine.warm_up(0.0)
    await ticks(20)
    assert harness.counts() == (0, 0)


async def test_what_the_budget_left_is_warmed_only_while_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the background no shape starts while a batch is in flight; the rest is warmed afterwards."""
    monkeypatch.setattr(engine, "QUIET_S", 0.0)
    warm = WarmUp(PLAN, 10.0)
    harness = EngineHarness(warm=warm, at_once=False)
    busy = asyncio.create_task(harness.infer())
    await ticks()
    await harness.engine.warm_up(1e-9)
    await ticks(50)
    assert (warm.done, harness.counts()) == (0, (0, 1))
    for worker in (*harness.narrow, harness.wide):
        worker.at_once = True
    harness.wide.finish()
    await busy
    await ticks(500)
    assert warm.done == len(PLAN)
    await harness.engine.aclose()


class SlowWorker(StepWorker):
    """Each batch moves the clock of the engine."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        super().__init__(at_once=True)
        self.clock = clock
        self.seconds = seconds

    def finish(self) -> None:
        self.clock[0] += self.seconds
        super().finish()


@pytest.mark.parametrize(("wide_s", "expected"), [(0.6, (0, 1)), (2.0, (1, 0))])
async def test_lone_batches_run_on_the_lane_measured_as_faster(
    wide_s: float, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison in the background comes before the first lone batches; then their own times correct it."""
    clock = [0.0]
    monkeypatch.setattr(engine, "QUIET_S", 0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    harness = EngineHarness()
    narrow, wide = SlowWorker(clock, 1.0), SlowWorker(clock, wide_s)
    harness.engine._lanes = Lanes(Slots([narrow]), Slots([wide]))

    async def infer_and_count() -> tuple[int, int]:
        before = (narrow.batches, wide.batches)
        await harness.infer(length=64)
        return narrow.batches - before[0], wide.batches - before[1]

    await harness.engine.warm_up(60.0)
    await ticks(500)
    assert {length for _, length in wide.shapes} == {16, 64}  # of LENGTHS, what the model takes
    assert await infer_and_count() == expected
    wide.seconds = 2.6 - wide_s
    for _ in range(3 * LONGEST_WAIT):
        await harness.infer(length=64)
    assert await infer_and_count() == expected[::-1]
    await harness.engine.aclose()


async def test_a_shape_that_the_graph_refuses_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison goes on with the next length."""
    monkeypatch.setattr(engine, "QUIET_S", 0.0)
    harness = EngineHarness()
    harness.wide.error = RuntimeError("shape mismatch")
    await harness.engine.warm_up(60.0)
    await ticks(500)
    assert (harness.wide.shapes, harness.counts()) == ([(1, 16), (1, 64)], (0, 2))
    await harness.engine.aclose()


async def test_a_shape_that_the_graph_refuses_does_not_end_the_warming() -> None:
    """An error in one shape does not stop the warm-up of the others."""
    warm = WarmUp(PLAN, 10.0)
    harness = EngineHarness(warm=warm)
    harness.narrow[0].error = RuntimeError("shape mismatch")
    await harness.engine.warm_up(60.0)
    assert warm.done == len(PLAN)
    assert set(harness.narrow[1].shapes) == set(PLAN)
    assert harness.engine.facts.cost == CostModel()


async def test_closing_waits_for_batches_and_happens_once() -> None:
    """A batch in flight completes, later ones are rejected, and resources are released once."""
    harness = EngineHarness(at_once=False)
    running = asyncio.create_task(harness.infer())
    await ticks()
    closing = asyncio.create_task(harness.engine.aclose())
    await ticks()
    assert (harness.engine.ready(), closing.done()) == (False, False)
    with pytest.raises(TransportFailed):
        await harness.infer()
    harness.wide.finish()
    assert "y" in await running
    await closing
    await harness.engine.aclose()
    assert harness.ended == 1


async def test_closing_ends_the_warming() -> None:
    """The background warm-up ends with the engine."""
    harness = EngineHarness(warm=WarmUp(PLAN, 10.0))
    await harness.engine.warm_up(1e-9)
    before = asyncio.all_tasks()
    await harness.engine.aclose()
    assert {task for task in before if not task.done()} == {asyncio.current_task()}


async def test_after_a_failed_batch_the_lanes_are_replaced() -> None:
    """The failed batch returns at once; later ones wait for the new lanes and run there."""
    harness = EngineHarness(wide=False, streams=1, rebuilds=True)
    harness.narrow[0].error = RuntimeError("odd")
    with pytest.raises(EngineFailed):
        await harness.infer()
    failed = harness.narrow[0]
    waiting = [asyncio.create_task(harness.infer()) for _ in range(2)]
    await ticks()
    assert (failed.batches, harness.rebuilt) == (1, 1)
    harness.may_rebuild.set()
    await asyncio.gather(*waiting)
    assert (failed.batches, harness.counts()[0], harness.rebuilt) == (1, 2, 1)


async def test_refused_inputs_replace_nothing() -> None:
    """Inputs rejected before they reach the engine do not replace its lanes."""
    harness = EngineHarness(rebuilds=True)
    with pytest.raises(InputRejected):
        await harness.infer(length=65)
    await ticks()
    assert harness.rebuilt == 0


async def test_two_failures_at_once_replace_once() -> None:
    """Concurrent failures cause one rebuild; a late failure on the old lanes causes none."""
    harness = EngineHarness(wide=False, rebuilds=True, at_once=False)
    running = [asyncio.create_task(harness.infer()) for _ in range(2)]
    await ticks()
    old = harness.narrow
    for worker in old:
        worker.error = RuntimeError("odd")
    harness.may_rebuild.set()
    old[0].finish()
    await ticks(20)
    old[1].finish()
    results = await asyncio.gather(*running, return_exceptions=True)
    assert [type(result) for result in results] == [EngineFailed, EngineFailed]
    await harness.infer()
    assert harness.rebuilt == 1


async def test_waiting_for_new_lanes_ends_at_the_deadline() -> None:
    """A batch that waits for a slow rebuild fails at its deadline."""
    harness = EngineHarness(wide=False, streams=1, rebuilds=True)
    harness.narrow[0].error = RuntimeError("odd")
    with pytest.raises(EngineFailed):
        await harness.infer()
    with pytest.raises(DeadlineExceeded):
        await harness.infer(seconds=0.002)
    harness.may_rebuild.set()
    await harness.engine.aclose()


@pytest.mark.parametrize("error", [ModelFileError("gone", file="model.onnx"), RuntimeError("gone for a bug")])
async def test_an_engine_that_cannot_be_rebuilt_is_not_ready(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """When a rebuild fails, waiting batches fail, the engine is not ready, and the log has the reason."""
    harness = EngineHarness(wide=False, streams=1, rebuilds=True)
    harness.lost = error
    harness.narrow[0].error = RuntimeError("odd")
    with pytest.raises(EngineFailed):
        await harness.infer()
    waiting = asyncio.create_task(harness.infer())
    await ticks()
    harness.may_rebuild.set()
    with pytest.raises(TransportFailed):
        await waiting
    assert not harness.engine.ready()
    assert "rig is out of service" in caplog.text and "gone" in caplog.text
    await harness.engine.aclose()
