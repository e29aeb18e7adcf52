"""From admitted requests to prepared items: what arrives in one tick of the loop shares one tokenising job.

Measured reasons for the numbers: a hop to a thread costs about 110 us and tokenising a short text about 30 us, so small
jobs run inline; a large job holds the interpreter between its parts, so jobs are cut at `JOB_ITEMS`; a bulk request is
prepared only `AHEAD` items before it is needed, so that thousands of its texts never stand before somebody's one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from shoal.core.pending import Pending
from shoal.core.protocols import Pipeline, Prepared
from shoal.core.threads import Threads
from shoal.errors import InternalError, ShoalError
from shoal.types import TrafficClass

logger = logging.getLogger("shoal.core")

JOB_ITEMS = 64
INLINE_TOKENS = 512
AHEAD = 256

Outcome = tuple[Pending, int, Prepared | ShoalError]


class Intake:
    """Feeds `deliver` with one outcome for every item of every request added, in no promised order."""

    def __init__(self, pipeline: Pipeline, threads: Threads, deliver: Callable[[list[Outcome]], None]) -> None:
        self._pipeline = pipeline
        self._threads = threads
        self._deliver = deliver
        self._waiting: dict[TrafficClass, deque[Pending]] = {"interactive": deque(), "bulk": deque()}
        self._jobs = 0
        self._scheduled = False

    def add(self, pending: Pending) -> None:
        self._waiting[pending.traffic].append(pending)
        self._schedule()

    def moved(self, pending: Pending, items: int) -> None:
        """So many of the request's prepared items have left for an engine: prepare more when it runs low."""
        was = pending.ahead
        pending.ahead -= items
        if pending.cursor < len(pending.tokens) and was > AHEAD // 2 >= pending.ahead:
            self.add(pending)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        self._scheduled = False
        inline = INLINE_TOKENS
        while self._jobs < self._threads.count:
            job = self._collect()
            if not job:
                return
            tokens = sum(pending.estimates[index] for pending, index in job)
            if tokens <= inline:
                inline -= tokens
                self._finish(job, self._prepare(job))
            else:
                self._jobs += 1
                future = asyncio.ensure_future(self._threads.run(partial(self._prepare, job)))
                future.add_done_callback(partial(self._finish_job, job))

    def _collect(self) -> list[tuple[Pending, int]]:
        """The next items, interactive requests first, then a piece of each bulk request in turn."""
        job: list[tuple[Pending, int]] = []
        for queue in self._waiting.values():
            for _ in range(len(queue)):
                room = JOB_ITEMS - len(job)
                if not room:
                    return job
                pending = queue.popleft()
                if pending.done:
                    continue
                start = pending.cursor
                stop = min(start + room, start + AHEAD - pending.ahead, len(pending.tokens))
                pending.cursor = stop
                pending.ahead += stop - start
                job.extend((pending, index) for index in range(start, stop))
                if stop < len(pending.tokens) and pending.ahead < AHEAD:
                    queue.append(pending)
        return job

    def _prepare(self, job: list[tuple[Pending, int]]) -> tuple[list[Prepared | ShoalError], float]:
        started = time.perf_counter()
        try:
            outcomes = self._pipeline.prepare([(pending.task, pending.task.inputs[index]) for pending, index in job])
            if len(outcomes) != len(job):
                raise ValueError(f"{len(outcomes)} outcomes for {len(job)} items")
        except Exception as error:  # a bug in a pipeline must fail these requests, not leave them waiting
            logger.exception("preparing inputs failed")
            failed = InternalError(f"preparing the input failed: {error!r}")
            outcomes = [failed] * len(job)
        return outcomes, time.perf_counter() - started

    def _finish_job(
        self, job: list[tuple[Pending, int]], future: asyncio.Future[tuple[list[Prepared | ShoalError], float]]
    ) -> None:
        self._jobs -= 1
        if not future.cancelled():
            self._finish(job, future.result())
        self._schedule()

    def _finish(self, job: list[tuple[Pending, int]], prepared: tuple[list[Prepared | ShoalError], float]) -> None:
        outcomes, seconds = prepared
        for pending, _ in job:
            pending.prepare_seconds = max(pending.prepare_seconds, seconds)
        self._deliver([(pending, index, outcome) for (pending, index), outcome in zip(job, outcomes, strict=True)])
