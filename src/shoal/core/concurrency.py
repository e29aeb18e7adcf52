"""Run coroutines concurrently, with no task outliving the call, and share slots among clients."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from shoal.core.scheduling.fair_queue import Rotation

T = TypeVar("T")


class FairSlots:
    """Slots for concurrent work. A freed one goes to the waiting clients in rotation, whatever the number of their
    waiting calls. `free` and `waiting` count slots and calls."""

    def __init__(self, count: int) -> None:
        self.free = count
        self.waiting = 0
        self._waiters: Rotation[asyncio.Future[None]] = Rotation()

    async def acquire(self, client: str) -> None:
        """Take a slot, which must be given back with `leave`."""
        if self.free:
            self.free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting += 1
        self._waiters.add(client, place)
        try:
            await asyncio.shield(place)
        except asyncio.CancelledError:
            if place.done():  # granted at the same moment: it goes to the next one
                self.leave()
            else:
                self._waiters.discard(client, place)
                self.waiting -= 1
            raise

    def leave(self) -> None:
        """Hand the slot to the client whose turn it is."""
        if not self.waiting:
            self.free += 1
            return
        client, place = self._waiters.turn()
        self._waiters.discard(client, place)
        self.waiting -= 1
        place.set_result(None)


async def run_concurrently(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Return the results of all coroutines. If one fails or this call is cancelled, cancel the others and wait for them
    to end before raising."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
