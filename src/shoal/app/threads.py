"""The thread pools of a process. Part of the composition root."""

from __future__ import annotations

from contextlib import AsyncExitStack, ExitStack

from shoal.core.threads import Threads

PREPARE_THREADS = 2
"""Tokenising jobs side by side: two keep one going while the other's result is handed out; more would take the
processors that the engine needs."""


def open_threads(stack: AsyncExitStack | ExitStack, name: str, count: int) -> Threads:
    """Open a pool until the stack is left."""
    made = Threads(name, count)
    stack.callback(made.close)
    return made
