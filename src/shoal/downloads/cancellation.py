"""Runs blocking work in a thread on behalf of a task that may be canceled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """Run work that ends soon after `stop` is called. If canceled, even repeatedly, return only once the thread has
    ended, because until then it may still write files."""
    # Not a task, unlike `asyncio.to_thread`: a closing loop cancels every task, and this one must finish.
    running = asyncio.get_running_loop().run_in_executor(None, copy_context().run, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop()
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):  # re-raised below
                await asyncio.wait({running})
        if not running.cancelled():
            running.exception()  # retrieved, so that asyncio does not report it as unhandled
        raise
