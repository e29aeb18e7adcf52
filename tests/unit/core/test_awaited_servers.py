"""Waiting for the first answers of servers that were named at startup."""

from __future__ import annotations

import asyncio
import math

from shoal.core.awaited_servers import AwaitedServers


async def test_nothing_to_wait_for() -> None:
    """There is no wait before any server is expected, nor after all have settled, however often they do."""
    answers = AwaitedServers()
    assert not await answers.wait(math.inf)
    answers.settle("a")
    assert not await answers.wait(math.inf)
    answers.expect("a")
    answers.settle("a")
    answers.settle("a")
    assert not await answers.wait(math.inf)


async def test_each_answer_wakes_all_waiters() -> None:
    """A waiter that still finds no model waits for the next answer."""
    answers = AwaitedServers()
    answers.expect("a")
    answers.expect("b")
    for source in ("a", "b"):
        waiters = [asyncio.create_task(answers.wait(60)) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(waiter.done() for waiter in waiters)
        answers.settle(source)
        assert await asyncio.gather(*waiters) == [True] * 3
    assert not await answers.wait(math.inf)


async def test_the_deadline_ends_the_wait() -> None:
    """A wait ends at its deadline, also if that has passed."""
    answers = AwaitedServers()
    answers.expect("a")
    assert not await answers.wait(0.001)
    assert not await answers.wait(-1.0)
