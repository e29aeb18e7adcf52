"""Blocking work in a thread, for whoever may be cancelled meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """Run work that ends soon after `stop` was called. Cancelled, however often, this ends once the thread has: what it
    writes until then is nobody else's yet."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop()
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):  # it is raised below
                await asyncio.wait({running})
        if not running.cancelled():
            running.exception()  # asked for, so that asyncio does not report it as overlooked
        raise
