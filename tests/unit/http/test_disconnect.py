"""Clients that are slow or disconnect, and unrelated cancellations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shoal.errors import Cancelled, RequestTimeout
from shoal.http import disconnect
from shoal.http.disconnect import DisconnectWatch
from tests.unit.core.conftest import run_virtual


@pytest.fixture(autouse=True)
async def no_tasks_remain(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """The watch times out at once, and no test leaves a task running."""
    monkeypatch.setattr(disconnect, "WATCH_DELAY_S", 0.0)
    yield
    for _ in range(3):
        await asyncio.sleep(0)
    names = {task.get_coro().__name__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]
    assert DisconnectWatch._wait_for_disconnect.__name__ not in names


class Client:
    """Sends an empty message, and disconnects on request."""

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


async def wait_forever() -> None:
    await asyncio.Event().wait()


async def test_finished_work_is_unaffected() -> None:
    """Work that ends by itself is unaffected, watched or not."""
    client = Client()
    for wait in (False, True):
        with DisconnectWatch(client.receive, 30.0) as watch:
            watch.start()
            if wait:
                await client.watched.wait()


async def test_a_disconnect_cancels_the_work() -> None:
    """The work is cancelled, the block raises Cancelled, and the task itself is not marked as cancelled."""
    client = Client()
    client.left.set()
    with pytest.raises(Cancelled), DisconnectWatch(client.receive, 30.0) as watch:
        watch.start()
        await wait_forever()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_disconnect_after_a_slow_body() -> None:
    """After the body, the watch waits for the client to disconnect."""
    client = Client()
    client.left.set()
    with pytest.raises(Cancelled), DisconnectWatch(client.receive, 30.0) as watch:
        with watch.limit_body_time():
            await asyncio.sleep(0)
        watch.start()
        await wait_forever()


async def test_a_late_body_times_out() -> None:
    """Work that waits for the body is cancelled, and the block raises RequestTimeout."""
    with (
        pytest.raises(RequestTimeout, match=r"0\.001 s"),
        DisconnectWatch(Client().receive, 0.001) as watch,
        watch.limit_body_time(),
    ):
        await wait_forever()


def test_a_body_in_time_has_no_limit_afterwards() -> None:
    """The time limit ends with the body. On a virtual clock: on a busy machine a real body may be late."""

    async def main() -> None:
        client = Client()
        with DisconnectWatch(client.receive, 30.0) as watch:
            with watch.limit_body_time():
                await asyncio.sleep(29.0)
            watch.start()
            await client.watched.wait()
            await asyncio.sleep(60.0)

    run_virtual(main)


async def test_other_errors_pass() -> None:
    """Errors of the work are raised unchanged."""
    with pytest.raises(ZeroDivisionError), DisconnectWatch(Client().receive, 30.0) as watch:
        watch.start()
        raise ZeroDivisionError


@pytest.mark.parametrize("also_gone", [False, True])
async def test_a_cancellation_from_outside(also_gone: bool) -> None:
    """It is raised as a cancellation, even if the client disconnects at the same moment."""
    client = Client()

    async def work() -> None:
        with DisconnectWatch(client.receive, 30.0) as watch:
            watch.start()
            await wait_forever()

    task = asyncio.create_task(work())
    await client.watched.wait()
    if also_gone:
        client.left.set()
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_no_request_is_cancelled_after_stop() -> None:
    """The HTTP server reports a disconnect as soon as the reply is complete; that must have no effect."""
    client = Client()
    with DisconnectWatch(client.receive, 30.0) as watch:
        watch.start()
        await client.watched.wait()
        watch.stop()
        client.left.set()
        await asyncio.sleep(0)
