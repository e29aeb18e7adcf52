"""Clients that are slow or leave, and cancellations that have nothing to do with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shoal.errors import Cancelled, RequestTimeout
from shoal.http import disconnect
from shoal.http.disconnect import DisconnectWatch


@pytest.fixture(autouse=True)
async def nothing_stays_behind(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """The watch loses patience at once, and no test leaves a task of its behind."""
    monkeypatch.setattr(disconnect, "WATCH_DELAY_S", 0.0)
    yield
    for _ in range(3):
        await asyncio.sleep(0)
    names = {task.get_coro().__name__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]
    assert DisconnectWatch._wait_for_disconnect.__name__ not in names


class Client:
    """Sends an empty message, and leaves when told to."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.watched = asyncio.Event()
        self._sent = False

    async def receive(self) -> dict[str, Any]:
        self.watched.set()
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}


async def never() -> None:
    await asyncio.Event().wait()


async def test_work_that_is_done() -> None:
    """Nothing happens to work that ends by itself, watched or not yet."""
    client = Client()
    for wait in (False, True):
        with DisconnectWatch(client.receive, 30.0) as watch:
            watch.start()
            if wait:
                await client.watched.wait()


async def test_a_client_that_leaves() -> None:
    """The work is cancelled, the block raises Cancelled, and the task itself is not marked as cancelled."""
    client = Client()
    client.left.set()
    with pytest.raises(Cancelled), DisconnectWatch(client.receive, 30.0) as watch:
        watch.start()
        await never()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_client_that_leaves_after_a_slow_body() -> None:
    """Once the body is there, the watch waits for the client to leave."""
    client = Client()
    client.left.set()
    with pytest.raises(Cancelled), DisconnectWatch(client.receive, 30.0) as watch:
        with watch.limit_body_time():
            await in_a_while(0.0)
        watch.start()
        await never()


async def test_a_body_that_is_late() -> None:
    """What waits for the body is cancelled, and the block raises RequestTimeout."""
    with (
        pytest.raises(RequestTimeout, match=r"0\.001 s"),
        DisconnectWatch(Client().receive, 0.001) as watch,
        watch.limit_body_time(),
    ):
        await never()


async def test_a_body_that_came_in_time() -> None:
    """After the body, its time limit is over."""
    client = Client()
    with DisconnectWatch(client.receive, 0.001) as watch:
        with watch.limit_body_time():
            await in_a_while(0.0)
        watch.start()
        await client.watched.wait()
        await in_a_while(0.002)


async def test_other_errors_pass() -> None:
    """An error of the work is not touched."""
    with pytest.raises(ZeroDivisionError), DisconnectWatch(Client().receive, 30.0) as watch:
        watch.start()
        raise ZeroDivisionError


@pytest.mark.parametrize("also_gone", [False, True])
async def test_a_cancellation_from_outside(also_gone: bool) -> None:
    """It passes as what it is, even when the client leaves in the same moment."""
    client = Client()

    async def work() -> None:
        with DisconnectWatch(client.receive, 30.0) as watch:
            watch.start()
            await never()

    task = asyncio.create_task(work())
    await client.watched.wait()
    if also_gone:
        client.left.set()
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_after_stop_nobody_is_cancelled() -> None:
    """The HTTP server says that the client is gone as soon as the reply is complete; that must not matter."""
    client = Client()
    with DisconnectWatch(client.receive, 30.0) as watch:
        watch.start()
        await client.watched.wait()
        watch.stop()
        client.left.set()
        await asyncio.sleep(0)


async def in_a_while(seconds: float) -> None:
    """Let timers run that were set before and are due by then."""
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, done.set)
    await done.wait()
