"""The gateway and its models in a thread of their own, for callers in every other thread and on every other loop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Sequence
from concurrent import futures
from contextlib import aclosing, asynccontextmanager
from itertools import accumulate, count
from typing import Any, Protocol, TypeVar

import uvloop

from shoal.app import RunningModels, open_models
from shoal.config import LoadedConfig
from shoal.config.settings import Settings
from shoal.core.gateway import Gateway
from shoal.core.input_errors import parse_input_index
from shoal.errors import BackendError, CapacityError, InternalError, SetupError, ShoalError, Unavailable
from shoal.models.progress import Progress
from shoal.types import BatchTask, Chunk, Context, Generate

T = TypeVar("T")

CALL_TIMEOUT_S = 86400.0
"""Nobody waits for a proxy here: who does not want to wait so long cancels, or closes."""

_log = logging.getLogger("shoal")
_ids = count(1)


class Abandonable(Protocol):
    async def abandon(self) -> None:
        """End what nobody waits for."""


class Background:
    """Starts at once, and is closed by `close`, at the latest when the interpreter ends.

    `streams`: those that began, for its loop. `wait` and `wait_async` run a coroutine on its loop, for synchronous
    callers and for coroutines on other loops. They raise what it raises, SetupError when a model could not be loaded,
    and Unavailable once it is closed, or in a child of the process that made it, which has none of its threads.
    """

    def __init__(self, loaded: LoadedConfig, progress: Progress | None = None) -> None:
        self._loaded = loaded
        self._progress = progress
        self._process = os.getpid()
        self._ready: futures.Future[RunningModels] = futures.Future()
        self._closing = threading.Lock()
        self._closed = False
        self._has_ended = False
        self.streams: set[Abandonable] = set()
        self._calls: dict[futures.Future[Any], Coroutine[Any, Any, Any]] = {}
        # Made here, so that nobody waits for the thread to begin.
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._main: asyncio.Task[Any] | None = None
        self._thread = threading.Thread(target=self._run, name="shoal", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def gateway(self) -> Gateway:
        """For coroutines on its loop alone."""
        return self._ready.result().gateway

    def wait_ready(self) -> None:
        """Return when every model is loaded."""
        self.check_usable()
        self._ready.result()

    async def ready(self) -> None:
        """As `wait_ready`."""
        self.check_usable()
        await asyncio.shield(asyncio.wrap_future(self._ready))

    def check_usable(self) -> None:
        """Raise Unavailable in a child of the process, and once it is closed."""
        if os.getpid() != self._process:
            raise Unavailable("this Shoal belongs to the process that opened it: open a new one after the fork")
        if self._closed:
            raise _closed_error()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            self.wait_ready()
        except BaseException:  # a coroutine that never ran complains
            work.close()
            raise
        future = self._submit(work)
        try:
            return future.result()
        except futures.CancelledError:
            raise _closed_error() from None
        except (CapacityError, BackendError) as error:
            raise self._explain(error) from None
        except BaseException:  # an interrupt is the caller's wish to leave
            future.cancel()
            raise

    def _explain(self, error: ShoalError) -> ShoalError:
        """What a call fails with while its models close is no fault of theirs, and no server's."""
        return _closed_error() if self._closed else error

    async def wait_async(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            await self.ready()
        except BaseException:  # as in `wait`
            work.close()
            raise
        future = self._submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _closed_error() from None
        except (CapacityError, BackendError) as error:
            raise self._explain(error) from None

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Run it without waiting; not at all once this is closed, or before the models are loaded."""
        try:
            self.check_usable()
            self._submit(work)
        except Unavailable:
            work.close()

    async def results(self, tasks: Sequence[BatchTask]) -> list[Any]:
        """One result a task, in order; the first that fails cancels the others. On its loop.

        The tasks are parts of one list, and an error counts the inputs of all of it.
        """
        if len(tasks) == 1:
            return [await self._run_task(tasks[0])]
        starts = accumulate((len(task.items) for task in tasks), initial=0)
        try:
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(self._run_part(task, start)) for task, start in zip(tasks, starts, strict=False)
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in running]

    async def _run_task(self, task: BatchTask) -> Any:
        async with self._limiter.admit(len(task.items)):
            return await self.gateway.run(task, _build_context())

    async def stream(self, task: Generate) -> AsyncGenerator[Chunk]:
        """Generate chunks as they are read, on its loop; more streams than the gateway takes wait."""
        async with self._stream_limiter.admit(1), aclosing(self.gateway.stream(task, _build_context())) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _run_part(self, task: BatchTask, start: int) -> Any:
        try:
            return await self._run_task(task)
        except ShoalError as error:
            place, message = parse_input_index(error)
            if place is None:
                raise
            error.message = f"input {start + place}: {message}"
            error.args = (error.message,)
            raise

    def close(self) -> None:
        """Free everything; what runs fails with Unavailable. A second call waits for the first, and one in a child of
        the process does nothing."""
        if os.getpid() != self._process:
            return  # the loop and its sockets are the parent's, and the lock may have been held when it forked
        with self._closing:
            if not self._closed:
                self._closed = True
                atexit.unregister(self.close)
                with contextlib.suppress(RuntimeError):  # the loop has ended: it could not start
                    self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    def _submit(self, work: Coroutine[Any, Any, T]) -> futures.Future[T]:
        """Without a lock: a caller's loop may not wait for one."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise _closed_error() from None
        self._calls[future] = work
        future.add_done_callback(self._calls.pop)
        if self._has_ended:
            self._cancel_pending()
        return future

    def _cancel_pending(self) -> None:
        """What came to the loop too late to be cancelled there."""
        for future, work in list(self._calls.items()):
            if future.cancel():
                work.close()

    def _stop(self) -> None:
        if self._main is not None:
            self._main.cancel()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._run_models())
        except asyncio.CancelledError:
            return  # it was closed
        finally:
            self._has_ended = True
            self._cancel_pending()
            if not self._ready.done():
                self._ready.set_exception(_closed_error())

    async def _run_models(self) -> None:
        """Until it is cancelled."""
        self._main = asyncio.current_task()
        if self._closed:  # before it began
            return
        try:
            async with open_models(self._loaded, self._loaded.served, self._progress) as running:
                await running.wait_until_loaded()
                check_loaded(running)
                self._limiter = _ItemLimiter(max_items(self._loaded))
                self._stream_limiter = _ItemLimiter(max_streams(self._loaded))
                self._ready.set_result(running)
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    for stream in [*self.streams]:
                        await stream.abandon()
        except Exception as error:  # whatever it is, whoever waits has to hear of it
            if self._ready.done():
                _log.exception("closing failed")
                return
            known = isinstance(error, ShoalError)
            self._ready.set_exception(error if known else InternalError(f"starting failed: {error!r}"))


class _ItemLimiter:
    """Lets so many items be at the gateway at once: others wait here, where a server would refuse them. First come,
    first served: a large call is not passed by small ones for ever."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._admitted = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def admit(self, items: int) -> AsyncGenerator[None]:
        if self._waiters or not self._fits(items):
            await self._wait_for_turn(items)
        else:
            self._admitted += items
        try:
            yield
        finally:
            self._release(items)

    async def _wait_for_turn(self, items: int) -> None:
        """Return once they are inside."""
        place = asyncio.get_running_loop().create_future()
        self._waiters.append((items, place))
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._admit_waiting()  # it may have been the one that the others wait for
            else:
                self._release(items)
            raise

    def _fits(self, items: int) -> bool:
        return not self._admitted or self._admitted + items <= self._max_items

    def _release(self, items: int) -> None:
        self._admitted -= items
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiters and (self._waiters[0][1].done() or self._fits(self._waiters[0][0])):
            items, place = self._waiters.popleft()
            if not place.done():
                self._admitted += items
                place.set_result(None)


def check_loaded(running: RunningModels) -> None:
    """Raise SetupError for a model that was named and cannot run, or a server that does not tell its models."""
    failed = {card.name: card.error for card in running.gateway.models() if card.state == "failed"}
    failed |= running.gateway.pending_sources
    if failed:
        raise SetupError("; ".join(f"{name}: {reason}" for name, reason in failed.items()))


def max_items(loaded: LoadedConfig) -> int:
    """Half of the smallest queue: what the gateway lets one caller have."""
    return max(1, min(each.max_queue_items for each in _all_settings(loaded)) // 2)


def max_streams(loaded: LoadedConfig) -> int:
    """Generations in flight, and half of the smallest queue for them."""
    return min(each.max_streams + each.max_queued_streams // 2 for each in _all_settings(loaded))


def _all_settings(loaded: LoadedConfig) -> list[Settings]:
    return [loaded.settings, *(loaded.for_model(name) for name in loaded.models)]


def _build_context() -> Context:
    return Context(id=f"call-{next(_ids)}", deadline=time.monotonic() + CALL_TIMEOUT_S)


def _closed_error() -> Unavailable:
    return Unavailable("this Shoal is closed: open a new one")
