"""Cancellation of work in a thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shoal.downloads.cancellation import run_in_thread
from shoal.errors import Cancelled


async def test_result_or_error() -> None:
    """The result or the exception of the function."""

    def fail() -> None:
        raise OSError("broken")

    assert await run_in_thread(lambda: 7, lambda: None) == 7
    with pytest.raises(OSError, match="broken"):
        await run_in_thread(fail, lambda: None)


async def test_repeated_cancellation_waits_for_the_thread() -> None:
    """Otherwise it could still write while its successor runs."""
    begun, stop, release, ended = (threading.Event() for _ in range(4))

    def work() -> None:
        begun.set()
        release.wait(30)
        ended.set()
        raise Cancelled("stopped")

    task = asyncio.create_task(run_in_thread(work, stop.set))
    await asyncio.to_thread(begun.wait, 30)
    for _ in range(3):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
    assert stop.is_set()
    assert not task.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


def test_a_loop_that_ends_leaves_no_thread_behind() -> None:
    """The loop cancels all running work at once."""
    stop, begun = threading.Event(), threading.Event()
    order: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []

    def work() -> None:
        begun.set()
        stop.wait(30)
        for _ in range(10):  # the loop continues meanwhile
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loops[0]).result(30)
        order.append("thread")

    async def load() -> None:
        try:
            await run_in_thread(work, stop.set)
        finally:
            order.append("caller")

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        loading = asyncio.create_task(load())
        await asyncio.to_thread(begun.wait, 30)
        assert not loading.done()

    asyncio.run(main())
    assert order == ["thread", "caller"]
