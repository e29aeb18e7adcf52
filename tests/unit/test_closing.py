"""The servers of these tests leak no connection when a client connects while they stop."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.fakes.openai_server import FakeUpstream
from tests.fakes.tei import FakeTei
from tests.unit.http.fetching.kit import web


async def fake_upstream(iterations: int) -> None:
    async with FakeUpstream() as server:
        await connect_and_leave(server.port, iterations)


async def fake_tei(iterations: int) -> None:
    async with FakeTei() as server:
        await connect_and_leave(server.port, iterations)


async def fetching_web(iterations: int) -> None:
    async with web() as server:
        await connect_and_leave(server.port, iterations)


async def connect_and_leave(port: int, iterations: int) -> None:
    """Connect, and disconnect some loop turns later: before, while and after the server accepts the connection."""
    with socket.socket() as client:
        client.setblocking(False)
        client.connect_ex(("127.0.0.1", port))
        for _ in range(iterations):
            await asyncio.sleep(0)


@pytest.mark.parametrize("server", [fake_upstream, fake_tei, fetching_web])
def test_stopping_leaks_no_connection(server: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for iterations in range(10):
            asyncio.run(server(iterations))
        gc.collect()
    assert [str(one.message) for one in caught if one.category is ResourceWarning] == []
