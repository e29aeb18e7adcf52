"""Permits for generations in flight, shared fairly among clients."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from shoal.core.concurrency import FairSlots
from shoal.core.scheduling.admission import LATE_PART, wait_before_retry
from shoal.errors import DeadlineExceeded, Overloaded
from shoal.types import Context

LEAST_HANDED = 4
"""Minimum recent handovers for a pace estimate; at least `limit` are needed. Streams that start together end together,
so fewer handovers say nothing."""


class StreamLimit(FairSlots):
    """Admits at most `limit` streams at once and queues up to `queued`, of which one client may hold at most half.

    Free slots go to the waiting clients in rotation, whatever the number of their waiting requests. A request is
    rejected if it would get a slot too late at the recent pace.
    """

    def __init__(self, limit: int = 256, queued: int = 1024, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(limit)
        self._max_queued = queued
        self._clock = clock
        self._handovers: deque[float] = deque(maxlen=max(limit, LEAST_HANDED))

    async def enter(self, ctx: Context) -> None:
        """Take a slot, which must be given back with `leave`. Raises Overloaded when the queue is full or the wait too
        long, and DeadlineExceeded when no slot came in time."""
        if self.free:
            self.free -= 1
            return
        self._check_room(ctx)
        try:
            async with asyncio.timeout(ctx.remaining(self._clock())):
                await self.acquire(ctx.client)
        except TimeoutError:
            raise DeadlineExceeded("no stream slot became free in time: try again later") from None

    def _check_room(self, ctx: Context) -> None:
        mine = len(self._waiters.clients.get(ctx.client, ()))
        now = self._clock()
        seconds = self._estimate_wait_s(ctx.client, now)
        if self.waiting >= self._max_queued:
            raise Overloaded(
                f"all stream slots are in use and the queue is full (max_queued_streams is {self._max_queued}): try "
                "again later",
                retry_after=wait_before_retry(seconds / (self.waiting + 1)),
            )
        if mine and mine >= self._max_queued // 2:
            raise Overloaded(
                f"this client already has {mine} of {self._max_queued} queued streams, its half of "
                "max_queued_streams: wait for answers before sending more",
                retry_after=wait_before_retry(seconds / (mine + 1)),
            )
        left = LATE_PART * ctx.remaining(now)
        if seconds > left:
            raise Overloaded(
                f"the next stream slot is free in about {seconds:.1f} s, too late for a request with "
                f"{ctx.remaining(now):.1f} s left: try again later, or allow more time",
                retry_after=wait_before_retry(seconds - left),
            )

    def _estimate_wait_s(self, client: str, now: float) -> float:
        """Estimate the seconds until this client gets one more slot, clients in turn; 0 while the pace is unknown."""
        handed = self._handovers
        if len(handed) != handed.maxlen:
            return 0.0
        turns = len(self._waiters.clients.get(client, ())) + 1
        before = sum(min(len(queue), turns) for name, queue in self._waiters.clients.items() if name != client)
        pace = max((handed[-1] - handed[0]) / (len(handed) - 1), (now - handed[0]) / len(handed))
        return (before + turns) * pace

    def leave(self) -> None:
        """Hand the slot to the client whose turn it is."""
        if self.waiting:
            self._handovers.append(self._clock())
        else:
            self._handovers.clear()
        super().leave()
