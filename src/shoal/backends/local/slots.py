"""Tracks batches in flight on workers outside the event loop: starts, cancellations and free workers."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeAlias

from shoal.backends.local.errors import engine_error
from shoal.core.protocols import Tensors
from shoal.errors import BackendError, DeadlineExceeded
from shoal.types import Array

Outputs: TypeAlias = dict[str, Array]
TIMEOUT_MESSAGE = "the batch did not finish in time; send fewer or shorter inputs, or raise the timeout"


class Worker(Protocol):
    """Runs one batch at a time, on threads of its own.

    `start` returns at once. It has `done` called on any thread, exactly once, when the worker is finished with the
    batch. After that, and before the next `start`, `result` returns the outputs, which no later batch changes, or
    raises. `abort` requests an early end if the engine has a safe one; `done` is still called.
    """

    def start(self, feeds: Tensors, outputs: Sequence[str], done: Callable[[], None]) -> None: ...

    def result(self) -> Outputs: ...

    def abort(self) -> None: ...


class PooledWorker(ABC):
    """A Worker that computes each batch on a thread of `pool`, which has one thread per slot."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._outcome: Outputs | Exception = {}

    def start(self, feeds: Tensors, outputs: Sequence[str], done: Callable[[], None]) -> None:
        self._submit(partial(self._compute, feeds, outputs), done)

    def result(self) -> Outputs:
        outcome, self._outcome = self._outcome, {}
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    @abstractmethod
    def abort(self) -> None: ...

    @abstractmethod
    def _compute(self, feeds: Tensors, outputs: Sequence[str]) -> Outputs:
        """Return the outputs of one batch, or raise. Runs on the pool's thread."""

    def _submit(self, compute: Callable[[], Outputs], done: Callable[[], None]) -> None:
        """Take the outputs, or the error, from `compute` on the pool's thread. Raises RuntimeError if none starts."""
        waiting = [compute]
        try:
            self._pool.submit(self._work, waiting, done)
        except RuntimeError:
            # The call stays in the pool's queue: unless one of its threads has taken it by now, none may.
            if not _take(waiting):
                return
            raise

    def _work(self, waiting: list[Callable[[], Outputs]], done: Callable[[], None]) -> None:
        compute = _take(waiting)
        if compute is None:
            return
        try:
            self._outcome = compute()
        except Exception as error:  # raised again by `result`, on the event loop's side
            self._outcome = error.with_traceback(None)  # its frames would keep the batch's memory
        done()


def _take(waiting: list[Callable[[], Outputs]]) -> Callable[[], Outputs] | None:
    try:
        return waiting.pop()
    except IndexError:
        return None


class Slots:
    """Workers that share one queue. The one freed last is used first, because its memory is warm."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._free: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        self.count = 0
        for worker in workers:
            self._free.put_nowait(worker)
            self.count += 1
        self._drained = asyncio.Event()
        self._drained.set()

    @property
    def free(self) -> int:
        return self._free.qsize()

    async def run(self, feeds: Tensors, outputs: Sequence[str], deadline: float) -> Outputs:
        """Run one batch; waits for a worker if none is free.

        Raises DeadlineExceeded as soon as the deadline passes; the worker stays taken until it is done. The worker's
        own errors are raised as `engine_error` maps them. A canceled call waits until the worker is finished with the
        batch.
        """
        if deadline <= time.monotonic():
            raise DeadlineExceeded(TIMEOUT_MESSAGE)
        try:
            worker = self._free.get_nowait()
        except asyncio.QueueEmpty:
            worker = await self._wait_for_worker(deadline)
        self._drained.clear()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Outputs | BackendError] = loop.create_future()
        try:
            worker.start(feeds, outputs, partial(_schedule, loop, partial(self._settle, worker, done)))
        except Exception as error:  # engines raise anything on a bad batch; `engine_error` maps it
            self._put(worker)
            raise engine_error(error) from error
        try:
            # Neither a timeout nor a cancellation may cancel `done`, which reports when the worker is free.
            await asyncio.wait((done,), timeout=deadline - time.monotonic())
        except asyncio.CancelledError:
            worker.abort()
            await _wait_uninterrupted(done)
            raise
        if not done.done():
            worker.abort()
            raise DeadlineExceeded(TIMEOUT_MESSAGE)
        outcome = done.result()
        if isinstance(outcome, BackendError):
            raise outcome
        return outcome

    async def drain(self) -> None:
        """Wait until no worker has a batch."""
        await self._drained.wait()

    def clear(self) -> None:
        """Release the workers and what they hold. Nothing may run afterwards."""
        self._free = asyncio.LifoQueue()

    async def _wait_for_worker(self, deadline: float) -> Worker:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await self._free.get()
        except TimeoutError:
            raise DeadlineExceeded(TIMEOUT_MESSAGE) from None

    def _put(self, worker: Worker) -> None:
        self._free.put_nowait(worker)
        if self._free.qsize() == self.count:
            self._drained.set()

    def _settle(self, worker: Worker, done: asyncio.Future[Outputs | BackendError]) -> None:
        """Read the outcome before another batch can start on this worker."""
        try:
            outcome: Outputs | BackendError = worker.result()
        except Exception as error:  # engines raise anything on a bad batch; `engine_error` maps it
            outcome = engine_error(error)
            outcome.__cause__ = error
        done.set_result(outcome)
        self._put(worker)


def _schedule(loop: asyncio.AbstractEventLoop, settle: Callable[[], None]) -> None:
    if not loop.is_closed():  # no task waits on a loop that was closed with batches in flight
        loop.call_soon_threadsafe(settle)


async def _wait_uninterrupted(done: asyncio.Future[Outputs | BackendError]) -> None:
    """Wait for `done` through further cancellations: the caller is already canceled, and the slot is not free yet."""
    while not done.done():
        try:
            await asyncio.wait((done,))
        except asyncio.CancelledError:
            continue
