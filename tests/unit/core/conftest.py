"""A virtual clock for tests in core that wait: an hour takes no real time."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
Run = Callable[[Callable[[], Coroutine[Any, Any, T]]], T]


START = 1.0
"""The virtual clock's first time. Not ahead of the real clock, which the deadlines of HTTP requests are read from and
which begins with the machine's start."""


class _Selector(selectors.SelectSelector):
    """A selector that never waits: time jumps to the next timer. Real file descriptors (thread hops) are still
    polled."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            return super().select(0.2)
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time` moves only when all tasks wait."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function on a fresh virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


@pytest.fixture
def virtual() -> Run[Any]:
    """`run_virtual`, as a fixture."""
    return run_virtual


PATIENCE_MS = 10_000


async def until(condition: Callable[[], bool], *, ticks: int = 1000) -> None:
    """Let the loop turn until the condition holds; fails when it never does.

    What waits for a thread may need more than turns: then the thread gets real time, and a virtual clock stands still.
    """
    for _ in range(ticks):
        if condition():
            return
        await asyncio.sleep(0)
    for _ in range(PATIENCE_MS):
        if condition():
            return
        _let_threads_run()
        await asyncio.sleep(0)
    raise AssertionError("the condition never held")


def _let_threads_run() -> None:
    time.sleep(0.001)


async def gathered(*work: Awaitable[Any]) -> list[Any]:
    return await asyncio.gather(*work, return_exceptions=True)
