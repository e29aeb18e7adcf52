"""Merge several streams into one, in the order in which their chunks arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

AHEAD = 16
"""Maximum chunks buffered over all streams: a reader that pauses also pauses the streams."""


async def merge_streams(streams: Sequence[AsyncGenerator[T]], *, at_once: int) -> AsyncGenerator[T]:
    """Yield the chunks of all streams. At most `at_once` of them run concurrently, started in order.

    When one fails, the others are closed and its error is raised. Closing this generator closes all of them.
    """
    ready: asyncio.Queue[T | BaseException | None] = asyncio.Queue(AHEAD)
    waiting = iter(streams)

    async def pump() -> None:
        """Drain one stream after another until none is left."""
        try:
            for stream in waiting:
                async with aclosing(stream):
                    async for chunk in stream:
                        await ready.put(chunk)
            await ready.put(None)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the reader raises it
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
        for stream in streams:  # nothing else closes the streams that never started
            await stream.aclose()
