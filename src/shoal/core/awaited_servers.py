"""Tracks the servers named at startup that have neither answered nor failed to since, so that requests can wait for
them."""

from __future__ import annotations

import asyncio


class AwaitedServers:
    """The sources of models that were asked at startup and whose first answer is still awaited.

    A refused connection, a timeout or an error is an answer too: from then on the reason is known, and requests are
    rejected with it.
    """

    def __init__(self) -> None:
        self._pending: set[str] = set()
        self._next_answer = asyncio.Event()

    def expect(self, source: str) -> None:
        self._pending.add(source)

    def settle(self, source: str) -> None:
        """Record the first answer of a source and wake all waiters. Later answers have no effect."""
        if source in self._pending:
            self._pending.remove(source)
            self._next_answer.set()
            self._next_answer = asyncio.Event()

    async def wait(self, seconds: float) -> bool:
        """Wait until the next source settles. Returns False if none is awaited, or none settles in time."""
        if not self._pending:
            return False
        try:
            async with asyncio.timeout(seconds):
                await self._next_answer.wait()
        except TimeoutError:
            return False
        return True
