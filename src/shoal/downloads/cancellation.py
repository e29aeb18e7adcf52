"""Blocking work in a thread, for whoever may be cancelled meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """Run work that ends soon after `stop` was called. Cancelled, however often, this ends once the thread has: what it
    writes until then is nobody else's yet."""
    # No task, as `asyncio.to_thread` would be one: a loop that ends cancels every task, and this one must not be.
    running = asyncio.get_running_loop().run_in_executor(None, copy_context().run, work)
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
