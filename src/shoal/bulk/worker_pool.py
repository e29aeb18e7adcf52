"""Calls of a task spread over worker processes, which may die: a call of a dead one runs again on another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

from shoal.bulk.computing import Column, Texts
from shoal.errors import Crashed, SetupError, ShoalError

ATTEMPTS = 3
"""Workers that may die of a call, or while they load the model, before it fails."""

logger = logging.getLogger("shoal")


class WorkerDied(Exception):
    """The process of a worker ended, or cannot be reached. The message says why, as far as it is known."""


class Worker(Protocol):
    """A process that has the model."""

    async def call(self, texts: Sequence[Texts]) -> Mapping[str, Column]:
        """As `Call`. Raises WorkerDied as well."""

    async def close(self) -> None:
        """End the process; it may have ended."""


W = TypeVar("W", bound=Worker)


class WorkerPool(Generic[W]):
    """Sends each call to the worker with the fewest, at most `calls_per_worker` each. Use it in `open`.

    A worker that dies is replaced. Its calls run again, each alone on a worker, so that a text that kills workers does
    not have others fail. Raises Crashed for a call of which ATTEMPTS workers died, and SetupError once a worker that is
    needed cannot be started.
    """

    def __init__(self, start: Callable[[], Awaitable[W]], workers: int, calls_per_worker: int) -> None:
        self._start = start
        self._workers = workers
        self._room = calls_per_worker
        self._running: dict[W, int] = {}
        self._alone = 0
        self._failure: ShoalError | None = None
        self._changed = asyncio.Condition()
        self._starting: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[WorkerPool[W]]:
        """Start the workers, and close them in the end. They join as they are ready."""
        try:
            for _ in range(self._workers):
                self._add()
            yield self
        finally:
            for task in self._starting:
                task.cancel()
            await asyncio.gather(*self._starting, return_exceptions=True)
            await asyncio.gather(*(worker.close() for worker in self._running), return_exceptions=True)

    async def wait_for_first(self) -> W:
        """Return a worker once one is ready. Raises the error of the first that cannot be started."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure or self._running)
        if self._failure is not None:
            raise self._failure
        return next(iter(self._running))

    async def call(self, texts: Sequence[Texts]) -> Mapping[str, Column]:
        """Run a call on some worker."""
        reason = ""
        for attempt in range(ATTEMPTS):
            weight = self._room if attempt else 1
            worker = await self._take(weight)
            try:
                return await worker.call(texts)
            except WorkerDied as died:
                reason = str(died)
                await self._replace(worker, reason)
            finally:
                await self._release(worker, weight)
        raise Crashed(f"{ATTEMPTS} workers died of it: {reason}")

    async def _take(self, weight: int) -> W:
        """Return the worker with the fewest calls that has room for `weight` more, and count them as its own."""
        alone = weight == self._room
        async with self._changed:
            self._alone += alone
            try:
                await self._changed.wait_for(lambda: self._failure or self._find(weight, alone))
            finally:
                self._alone -= alone
                self._changed.notify_all()
            if self._failure is not None:
                raise SetupError(self._failure.message)
            worker = self._find(weight, alone)
            assert worker is not None
            self._running[worker] += weight
            return worker

    def _find(self, weight: int, alone: bool) -> W | None:
        """Return None if the call has to wait: for room, or for those that need a worker for themselves."""
        if self._alone and not alone:
            return None
        worker = min(self._running, key=lambda each: self._running[each], default=None)
        return worker if worker is not None and self._running[worker] + weight <= self._room else None

    async def _release(self, worker: W, weight: int) -> None:
        async with self._changed:
            if worker in self._running:
                self._running[worker] -= weight
            self._changed.notify_all()

    async def _replace(self, worker: W, reason: str) -> None:
        if self._running.pop(worker, None) is None:
            return  # another of its calls did
        logger.warning("a worker died, its texts are computed again: %s", reason)
        self._add()
        await worker.close()

    def _add(self) -> None:
        task = asyncio.create_task(self._start_one(), name="start worker")
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start_one(self) -> None:
        worker, failure = None, None
        try:
            worker = await _start_alive(self._start)
        except ShoalError as error:
            failure = error
        async with self._changed:
            if worker is not None:
                self._running[worker] = 0
            self._failure = self._failure or failure
            self._changed.notify_all()


async def _start_alive(start: Callable[[], Awaitable[W]]) -> W:
    """Start a worker, again if it dies on the way. Raises the ShoalErrors of `start`, and SetupError if it keeps
    dying."""
    reason = ""
    for _ in range(ATTEMPTS):
        try:
            return await start()
        except WorkerDied as died:
            reason = str(died)
            logger.warning("a worker died while it loaded the model: %s", reason)
    raise SetupError(f"{ATTEMPTS} workers died while they loaded the model: {reason}")
