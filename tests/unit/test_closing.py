"""The servers of these tests leave no connection behind, whenever somebody connects while they are stopped."""

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


async def upstream(iterations: int) -> None:
    async with FakeUpstream() as server:
        await knock(server.port, iterations)


async def tei(iterations: int) -> None:
    async with FakeTei() as server:
        await knock(server.port, iterations)


async def fetched(iterations: int) -> None:
    async with web() as server:
        await knock(server.port, iterations)


async def knock(port: int, iterations: int) -> None:
    """Connect, and leave some turns of the loop later: before, while and after the server takes the connection."""
    with socket.socket() as client:
        client.setblocking(False)
        client.connect_ex(("127.0.0.1", port))
        for _ in range(iterations):
            await asyncio.sleep(0)


@pytest.mark.parametrize("server", [upstream, tei, fetched])
def test_nothing_is_left_open(server: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for iterations in range(10):
            asyncio.run(server(iterations))
        gc.collect()
    assert [str(one.message) for one in caught if one.category is ResourceWarning] == []
