"""Several streams as one, in the order in which their chunks come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

AHEAD = 16
"""Chunks that may lie ready, over all streams together: a reader that stops, stops them."""


async def merge_streams(streams: Sequence[AsyncGenerator[T]], *, at_once: int) -> AsyncGenerator[T]:
    """The chunks of all streams, of which at most `at_once` run side by side, the first ones first.

    When one fails, the others are closed and its error is raised. Closing this closes all of them.
    """
    ready: asyncio.Queue[T | BaseException | None] = asyncio.Queue(AHEAD)
    waiting = iter(streams)

    async def pump() -> None:
        """One stream after the other, until there are no more."""
        try:
            for stream in waiting:
                async with aclosing(stream):
                    async for chunk in stream:
                        await ready.put(chunk)
            await ready.put(None)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # whatever it is, it is the reader's to know
            await ready.put(error)

    pumps = [asyncio.create_task(pump()) for _ in range(min(at_once, len(streams)))]
    try:
        left = len(pumps)
        while left:
            chunk = await ready.get()
            if chunk is None:
                left -= 1
            elif isinstance(chunk, BaseException):
                raise chunk
            else:
                yield chunk
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for stream in streams:  # those that never began have nobody else to close them
            await stream.aclose()
