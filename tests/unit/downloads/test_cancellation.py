"""Work in a thread that is cancelled."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shoal.downloads.cancellation import run_in_thread
from shoal.errors import Cancelled


async def test_what_comes_of_it() -> None:
    """Its answer, or what it raised."""

    def failing() -> None:
        raise OSError("broken")

    assert await run_in_thread(lambda: 7, lambda: None) == 7
    with pytest.raises(OSError, match="broken"):
        await run_in_thread(failing, lambda: None)


async def test_however_often_it_is_cancelled_the_thread_has_ended() -> None:
    """Impatience does not leave it behind: it still writes where the next one is to."""
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
    """It cancels whatever still runs in it, and all of that at once."""
    stop, begun = threading.Event(), threading.Event()
    order: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []

    def work() -> None:
        begun.set()
        stop.wait(30)
        for _ in range(10):  # the loop goes on meanwhile
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
