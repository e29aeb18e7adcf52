"""Permits for generations in flight, shared fairly among clients."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shoal.errors import DeadlineExceeded, Overloaded
from shoal.types import Context

WORTH_ANOTHER_TRY_S = 1.0
"""When the queue is full: streams last for seconds, and how many end in one cannot be known."""


class StreamLimit:
    """At most `limit` streams at once, and `queued` that wait, of which one client holds at most half. When a place is
    free it goes to the clients that wait in turn, not to the one that asks most."""

    def __init__(self, limit: int = 256, queued: int = 1024) -> None:
        self.free = limit
        self.waiting = 0
        self._queued = queued
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def permit(self, ctx: Context) -> AsyncIterator[None]:
        """Hold a place; raises Overloaded when too many wait for one, DeadlineExceeded when none came in time."""
        await self._enter(ctx)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, ctx: Context) -> None:
        if self.free:
            self.free -= 1
            return
        self._check_room(ctx.client)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting += 1
        self._waiting.setdefault(ctx.client, deque()).append(place)
        try:
            async with asyncio.timeout(ctx.remaining()):
                await asyncio.shield(place)
        except TimeoutError:
            self._give_up(ctx.client, place)
            raise DeadlineExceeded("no place for another stream came free in time: try again later") from None
        except asyncio.CancelledError:
            self._give_up(ctx.client, place)
            raise

    def _check_room(self, client: str) -> None:
        mine = len(self._waiting.get(client, ()))
        if self.waiting >= self._queued:
            raise Overloaded(
                f"no place is free, nor one to wait for it (max_queued_streams is {self._queued}): try again later",
                retry_after=WORTH_ANOTHER_TRY_S,
            )
        if mine and mine >= self._queued // 2:
            raise Overloaded(
                f"this client has its half of max_queued_streams ({mine} of {self._queued}) waiting for a place: wait "
                "for answers before asking for more",
                retry_after=WORTH_ANOTHER_TRY_S,
            )

    def _give_up(self, client: str, place: asyncio.Future[None]) -> None:
        """Stop waiting; a place that was handed over in the same moment goes on to the next."""
        if place.done():
            self._leave()
            return
        queue = self._waiting[client]
        queue.remove(place)
        self.waiting -= 1
        if not queue:
            del self._waiting[client]

    def _leave(self) -> None:
        """Hand the place to the client that has waited longest for its turn, and put that client last."""
        if not self._waiting:
            self.free += 1
            return
        client, queue = next(iter(self._waiting.items()))
        place = queue.popleft()
        self.waiting -= 1
        del self._waiting[client]
        if queue:
            self._waiting[client] = queue
        place.set_result(None)
