from __future__ import annotations

import asyncio
import threading

import pytest

from shoal.core.threads import Threads
from shoal.errors import Unavailable
from tests.unit.core.conftest import gathered, until


async def test_work_runs_off_the_loop_in_a_named_thread() -> None:
    """Results and exceptions reach the caller."""
    threads = Threads("test", 2)
    name = await threads.run(lambda: threading.current_thread().name)
    assert name.startswith("shoal-test")
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    threads.close()


async def test_no_more_than_count_at_once_and_close_drops_the_rest() -> None:
    """The third call of two threads waits; closing cancels it, finishes the running ones and accepts no more."""
    threads = Threads("test", 2)
    go, begun = threading.Event(), threading.Semaphore(0)

    def work() -> int:
        begun.release()
        go.wait(5)
        return 1

    calls = [asyncio.create_task(threads.run(work)) for _ in range(3)]
    await until(lambda: begun._value == 2, ticks=1_000_000)
    threads.close()
    go.set()
    outcomes = await gathered(*calls)
    assert outcomes[:2] == [1, 1]
    assert isinstance(outcomes[2], asyncio.CancelledError)
    with pytest.raises(Unavailable, match="cannot start a thread"):
        await threads.run(work)


async def test_none_are_lent_once_the_main_thread_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls from other threads are refused once the main thread has ended."""
    threads = Threads("test", 1)
    threads.close()
    ended = threading.Thread()
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    with pytest.raises(Unavailable, match="after the main thread ends"):
        await threads.run(lambda: 1)
