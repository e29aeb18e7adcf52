"""Batches in flight: waiting, errors, deadlines, cancellation and free workers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shoal.backends.local.slots import Outputs, PooledWorker, Slots
from shoal.core.protocols import Tensors
from shoal.errors import BackendError, DeadlineExceeded, EngineFailed, InputRejected, OutOfMemory
from tests.unit.backends.workers import StepWorker

FEEDS = {"x": np.ones((1, 2))}


SHORT_S = 0.02


def begin(slots: Slots, seconds: float = 30.0) -> asyncio.Task[Outputs]:
    async def run() -> Outputs:
        # The time counts from here, so that a busy machine does not let it pass before the batch starts.
        return await slots.run(FEEDS, ["y"], time.monotonic() + seconds)

    return asyncio.create_task(run())


async def ticks(count: int = 5) -> None:
    """Let all ready callbacks run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_batch_is_answered_and_its_worker_freed() -> None:
    """The outputs have the requested names, and the slot is free."""
    worker = StepWorker()
    slots = Slots([worker])
    task = begin(slots)
    await ticks()
    assert slots.free == 0
    worker.finish()
    assert (await task)["y"] is FEEDS["x"]
    assert slots.free == 1


async def test_batches_beyond_the_workers_wait_their_turn() -> None:
    """With two workers, the third batch starts when one of them is free."""
    workers = [StepWorker(), StepWorker()]
    slots = Slots(workers)
    tasks = [begin(slots) for _ in range(3)]
    await ticks()
    assert [worker.batches for worker in workers] == [1, 1]
    workers[0].finish()
    await ticks()
    assert [worker.batches for worker in workers] == [2, 1]
    for worker in workers:
        worker.finish()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("when", ["start", "result"])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("shape mismatch"), InputRejected),
        (MemoryError(), OutOfMemory),
        (RuntimeError("odd"), EngineFailed),
    ],
)
async def test_errors_cross_by_the_table_and_free_the_worker(
    when: str, error: Exception, kind: type[Exception]
) -> None:
    """A worker's error is raised as Shoal's error with its cause, and the next batch runs."""
    worker = StepWorker(at_once=True)
    slots = Slots([worker])
    worker.refuse, worker.error = (error, None) if when == "start" else (None, error)
    with pytest.raises(kind) as caught:
        await begin(slots)
    assert caught.value.__cause__ is error
    worker.refuse = worker.error = None
    assert "y" in await begin(slots)


async def test_the_deadline_answers_at_once_and_keeps_the_worker() -> None:
    """The caller gets DeadlineExceeded while the engine is busy; the worker stays taken until it is done."""
    worker = StepWorker()
    slots = Slots([worker])
    with pytest.raises(DeadlineExceeded):
        await begin(slots, SHORT_S)
    assert (worker.aborts, slots.free) == (1, 0)
    later = begin(slots)
    await ticks()
    assert worker.batches == 1
    worker.finish()
    await ticks()
    assert worker.batches == 2
    worker.finish()
    await later


async def test_a_deadline_in_the_past_starts_nothing() -> None:
    """A batch with a past deadline is not started."""
    worker = StepWorker()
    with pytest.raises(DeadlineExceeded):
        await begin(Slots([worker]), -1.0)
    assert worker.batches == 0


async def test_the_deadline_holds_while_waiting_for_a_worker() -> None:
    """A batch still waiting for a worker ends with DeadlineExceeded and takes no worker."""
    worker = StepWorker()
    slots = Slots([worker])
    first = begin(slots)
    await ticks()
    with pytest.raises(DeadlineExceeded):
        await begin(slots, SHORT_S)
    worker.finish()
    await first
    assert slots.free == 1


async def test_cancelling_waits_until_the_worker_is_free() -> None:
    """A call that is cancelled repeatedly ends only when the worker is done with the batch."""
    worker = StepWorker()
    slots = Slots([worker])
    task = begin(slots)
    await ticks()
    for _ in range(3):
        task.cancel()
        await ticks()
        assert not task.done()
    assert worker.aborts >= 1
    worker.finish()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slots.free == 1


async def test_cancelling_a_waiting_batch_is_immediate() -> None:
    """A cancelled batch without a worker ends immediately."""
    worker = StepWorker()
    slots = Slots([worker])
    first = begin(slots)
    await ticks()
    second = begin(slots)
    await ticks()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    worker.finish()
    await first
    assert (worker.batches, slots.free) == (1, 1)


async def test_drained_waits_for_batches_that_nobody_waits_for() -> None:
    """A batch whose caller gave up still counts until its worker is done."""
    worker = StepWorker()
    slots = Slots([worker])
    with pytest.raises(DeadlineExceeded):
        await begin(slots, SHORT_S)
    drained = asyncio.create_task(slots.drain())
    await ticks()
    assert not drained.done()
    worker.finish()
    await drained


def test_a_batch_that_outlives_its_loop_ends_quietly() -> None:
    """A worker that finishes after the loop is closed raises nothing on its thread."""
    worker = StepWorker()

    async def abandon() -> None:
        slots = Slots([worker])
        with pytest.raises(DeadlineExceeded):
            await begin(slots, SHORT_S)

    asyncio.run(abandon())
    worker.finish()
    assert not worker.running


class Sum(PooledWorker):
    """Adds up its input, once `go` is set."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__(pool)
        self.go = threading.Event()

    def abort(self) -> None:
        raise NotImplementedError

    def _compute(self, feeds: Tensors, outputs: Sequence[str]) -> Outputs:
        assert self.go.wait(10)
        return {name: feeds["x"].sum() for name in outputs}


async def test_a_thread_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch fails, and is not computed later; its worker is free once, and takes the next batch."""
    with ThreadPoolExecutor(2) as pool:
        workers = [Sum(pool), Sum(pool)]
        slots = Slots(workers)
        first = begin(slots)
        await ticks()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail_to_start)
            with pytest.raises(BackendError, match="can't start new thread"):
                await begin(slots)
        for worker in workers:
            worker.go.set()
        assert (await first)["y"] == 2
        assert (await begin(slots))["y"] == 2
        async with asyncio.timeout(10):
            await slots.drain()
        assert slots.free == slots.count == 2


def fail_to_start(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
