"""Prepare the items of admitted requests: requests that arrive in one tick of the event loop share a tokenizing job.

The numbers are measured:

- A thread hop costs about 110 us and tokenizing a short text about 30 us, so small jobs run inline.
- A large job holds the interpreter between its parts, so jobs are cut at `JOB_ITEMS`.
- A bulk request is prepared at most `AHEAD` items in advance, so that thousands of its texts do not delay a single one.
- A text cannot be split. Texts that exceed a job alone (`JOB_TOKENS`) leave one thread to the others, and new short
  texts are prepared inline when all threads are busy.
- Pipelines with "light" work prepare in microseconds: one job per tick, on the event loop.
- Each item of "heavy" work counts as a text that exceeds a job. Heavy items may use every thread, until the pipeline's
  limit of held items is reached. That limit may keep most of them from the planner, so they are prepared in its order
  of classes and clients.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from math import inf

from shoal.core.protocols import BoundedPipeline, Pipeline, Prepared
from shoal.core.scheduling.fair_queue import WEIGHTS, ClassShare, Rotation, enter_class, order_classes
from shoal.core.scheduling.request_state import RequestState
from shoal.core.threads import Threads
from shoal.errors import InternalError, ShoalError
from shoal.types import TrafficClass

logger = logging.getLogger("shoal.core")

JOB_ITEMS = 64
JOB_TOKENS = 1024 * JOB_ITEMS
INLINE_TOKENS = 512
AHEAD = 256

Outcome = tuple[RequestState, int, Prepared | ShoalError]


@dataclass(slots=True)
class _LargeClass(ClassShare):
    """A traffic class with its requests, which are its items."""

    rotation: Rotation[RequestState] = field(default_factory=Rotation)


class LargeQueue:
    """Requests whose next item is a job of its own. Classes are served by their shares, clients and their requests in
    turn, one item each. Pure: the caller passes the time as `now`.

    A request stays until it is discarded, or is done when its turn comes.
    """

    def __init__(self, max_age_ms: float) -> None:
        self.requests = 0
        self._max_age_ms = max_age_ms
        self._classes: dict[TrafficClass, _LargeClass] = {name: _LargeClass(weight) for name, weight in WEIGHTS.items()}

    def add(self, request: RequestState, now: float) -> None:
        share = self._classes[request.traffic]
        if not share.items:
            enter_class(self._classes, share, now)
        share.rotation.add(request.ctx.client, request)
        share.items += 1
        self.requests += 1

    def discard(self, request: RequestState) -> None:
        """Remove a request; does nothing if it is not queued."""
        share = self._classes[request.traffic]
        if share.rotation.discard(request.ctx.client, request):
            share.items -= 1
            self.requests -= 1

    def turn(self, now: float) -> RequestState | None:
        """Return the request whose item is next, and charge its class; done requests are removed."""
        while self.requests:
            share = self._classes[order_classes(self._classes, now, self._max_age_ms)[0]]
            _, request = share.rotation.turn()
            if not request.done:
                share.vtime += 1 / share.weight
                share.last_served = now
                return request
            self.discard(request)
        return None


class Preparer:
    """Calls `deliver` with one outcome for every item of every added request, in no guaranteed order.

    `count_held` returns the number of items delivered but not answered, for a pipeline that limits them
    (BoundedPipeline). Call `resume` when that number decreases. `max_age_ms` is that of the planner's Limits.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        threads: Threads,
        *,
        deliver: Callable[[list[Outcome]], None],
        count_held: Callable[[], int],
        max_age_ms: float,
        clock: Callable[[], float],
    ) -> None:
        self._pipeline = pipeline
        self._max_held = pipeline.max_held_items if isinstance(pipeline, BoundedPipeline) else inf
        self._count_held = count_held
        self._is_light = pipeline.work == "light"
        self._is_heavy = pipeline.work == "heavy"
        self._large_above = -inf if self._is_heavy else inf if self._is_light else JOB_TOKENS
        self._threads = threads
        self._deliver = deliver
        self._clock = clock
        self._queues: dict[TrafficClass, deque[RequestState]] = {"interactive": deque(), "bulk": deque()}
        self._large_queue = LargeQueue(max_age_ms)
        self._new_requests: deque[RequestState] = deque()
        self._jobs = 0
        self._large_jobs = 0
        self._is_scheduled = False

    def add(self, request: RequestState) -> None:
        self._put(request)
        if request.traffic == "interactive" and not (self._is_light or self._is_heavy):
            self._new_requests.append(request)
        self._schedule()

    def record_dispatched(self, request: RequestState, items: int) -> None:
        """Record that `items` prepared items of the request left for an engine; prepare more if few are left."""
        request.ahead -= items
        if not request.waiting and request.cursor < len(request.tokens) and request.ahead <= AHEAD // 2:
            self.add(request)

    def discard(self, request: RequestState) -> None:
        """Drop a request that is done, so that its inputs are freed even if no large item can start."""
        self._large_queue.discard(request)

    def resume(self) -> None:
        """Continue with large items, for which there may be room again."""
        if self._large_queue.requests:
            self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._tick)

    def _put(self, request: RequestState) -> None:
        request.waiting = True
        if request.estimates[request.cursor] > self._large_above:
            self._large_queue.add(request, self._clock())
        else:
            self._queues[request.traffic].append(request)

    def _tick(self) -> None:
        self._is_scheduled = False
        if self._is_light:
            job, _ = self._collect(inf)
            if job:
                if any(self._queues.values()):
                    self._schedule()
                self._finish(job, self._prepare(job))
            return
        inline = INLINE_TOKENS
        threads = self._threads.count
        most_large = threads if self._is_heavy else max(1, threads - 1)
        queue = self._large_queue
        while queue.requests and self._jobs < threads and self._large_jobs < most_large and self._has_room():
            request = queue.turn(self._clock())
            if request is not None:
                self._submit(_take_items(request, 1)[0], large=True)
                if not _can_prepare_more(request) or _next_tokens(request) <= self._large_above:
                    queue.discard(request)
                    request.waiting = False
                    self._put_back(request)
        while self._jobs < threads:
            job, tokens = self._collect(JOB_TOKENS) if any(self._queues.values()) else ([], 0)
            if not job:
                self._new_requests.clear()
                return
            if tokens <= inline:
                inline -= tokens
                self._finish(job, self._prepare(job))
            else:
                self._submit(job)
        self._prepare_short(inline)

    def _has_room(self) -> bool:
        return self._large_jobs + self._count_held() < self._max_held

    def _prepare_short(self, inline: int) -> None:
        """Prepare new, short items inline while all threads are busy."""
        job: list[tuple[RequestState, int]] = []
        while self._new_requests and len(job) < JOB_ITEMS:
            request = self._new_requests[0]
            if not _can_prepare_more(request) or _next_tokens(request) > INLINE_TOKENS:
                self._new_requests.popleft()
                continue
            piece, tokens = _take_items(request, JOB_ITEMS - len(job), inline)
            if not piece:
                break  # over this tick's inline limit: the next tick prepares it
            inline -= tokens
            job += piece
        if self._new_requests:
            self._schedule()
        if job:
            self._finish(job, self._prepare(job))

    def _submit(self, job: list[tuple[RequestState, int]], *, large: bool = False) -> None:
        self._jobs += 1
        self._large_jobs += large
        future = asyncio.ensure_future(self._threads.run(partial(self._prepare, job)))
        future.add_done_callback(partial(self._finish_job, job, large))

    def _collect(self, max_tokens: float) -> tuple[list[tuple[RequestState, int]], int]:
        """Return the next items, with `max_tokens` tokens in total at most, and their tokens.

        Interactive requests come first, then a piece of each bulk request in turn.
        """
        job: list[tuple[RequestState, int]] = []
        tokens = 0
        for queue in self._queues.values():
            for _ in range(len(queue)):
                if len(job) == JOB_ITEMS:
                    return job, tokens
                request = queue.popleft()
                request.waiting = False
                if not request.future.done():
                    piece, taken = _take_items(request, JOB_ITEMS - len(job), max_tokens - tokens)
                    tokens += taken
                    job += piece
                    if request.cursor < len(request.tokens):
                        self._put_back(request)
        return job, tokens

    def _put_back(self, request: RequestState) -> None:
        if _can_prepare_more(request):
            self._put(request)

    def _prepare(self, job: list[tuple[RequestState, int]]) -> tuple[list[Prepared | ShoalError], float]:
        started = time.perf_counter()
        try:
            outcomes = self._pipeline.prepare([(request.task, request.task_items[index]) for request, index in job])
            if len(outcomes) != len(job):
                raise ValueError(f"{len(outcomes)} outcomes for {len(job)} items")
        except Exception as error:  # a bug in a pipeline must fail the request that triggers it, not hang it
            logger.exception("preparing inputs failed")
            outcomes = self._prepare_separately(job, error)
        return outcomes, time.perf_counter() - started

    def _prepare_separately(self, job: list[tuple[RequestState, int]], error: Exception) -> list[Prepared | ShoalError]:
        """Prepare each request of a failed job separately."""
        parts = [list(part) for _, part in groupby(job, key=lambda one: id(one[0]))]
        if len(parts) == 1:
            return [InternalError(f"preparing the input failed: {error!r}")] * len(job)
        return [outcome for part in parts for outcome in self._prepare(part)[0]]

    def _finish_job(
        self,
        job: list[tuple[RequestState, int]],
        large: bool,
        future: asyncio.Future[tuple[list[Prepared | ShoalError], float]],
    ) -> None:
        self._jobs -= 1
        self._large_jobs -= large
        if not future.cancelled():
            error = future.exception()
            # No thread was available, so the job never started: report the error to its requests here.
            self._finish(job, ([copy(error) for _ in job], 0.0) if isinstance(error, ShoalError) else future.result())
        self._schedule()

    def _finish(self, job: list[tuple[RequestState, int]], prepared: tuple[list[Prepared | ShoalError], float]) -> None:
        outcomes, seconds = prepared
        for request, _ in job:
            request.prepare_seconds = max(request.prepare_seconds, seconds)
        self._deliver([(request, index, outcome) for (request, index), outcome in zip(job, outcomes, strict=True)])


def _take_items(
    request: RequestState, items: int, max_tokens: float = inf
) -> tuple[list[tuple[RequestState, int]], int]:
    """Take the request's next items: at most `items`, with at most `max_tokens` tokens, within AHEAD. Returns them and
    their tokens. `items` is 1 or more."""
    estimates = request.estimates
    if len(estimates) == 1 and not request.cursor:  # most requests
        if estimates[0] > max_tokens:
            return [], 0
        request.cursor = request.ahead = 1
        return [(request, 0)], estimates[0]
    tokens = 0
    start = stop = request.cursor
    end = min(start + items, start + AHEAD - request.ahead, len(request.tokens))
    while stop < end and tokens + estimates[stop] <= max_tokens:
        tokens += estimates[stop]
        stop += 1
    request.cursor = stop
    request.ahead += stop - start
    return [(request, index) for index in range(start, stop)], tokens


def _next_tokens(request: RequestState) -> int:
    return request.estimates[request.cursor]


def _can_prepare_more(request: RequestState) -> bool:
    """Whether more items of the request may be prepared now."""
    return not request.done and request.cursor < len(request.tokens) and request.ahead < AHEAD
