"""Streams through the gateway: slots, readers and slot release."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from shoal.backends.fake.model import FakeGenerator, FakeScript
from shoal.core.gateway import Gateway
from shoal.core.lifecycle.loading import Plan
from shoal.core.registry import Model, Registry
from shoal.errors import DeadlineExceeded
from shoal.types import Chunk, Context, Generate
from tests.unit.core.conftest import Run, gathered, until
from tests.unit.core.talks import make_runner


class Talk:
    """A gateway over one generator with `places` concurrent streams and 10 ms per word."""

    def __init__(self, places: int) -> None:
        self.generator = FakeGenerator(FakeScript(token_ms=10))
        registry = Registry()
        registry.add(model := Model("m"))
        model.plan = Plan(name="m", source="s", backend="fake", max_streams=places)
        model.mark_loaded(make_runner(self.generator))
        self.gateway = Gateway(registry)
        self.places = self.gateway._get_stream_limit(model)

    def stream(self, client: str = "c", words: int = 100, seconds: float = 1000.0) -> AsyncGenerator[Chunk, Any]:
        # The generator reads the loop's clock, the stream limit the real one: a deadline that is late on both.
        deadline = max(time.monotonic(), asyncio.get_running_loop().time()) + seconds
        task = Generate(model="m", prompts=[" ".join(map(str, range(words)))])
        return self.gateway.stream(task, Context(id="r", deadline=deadline, client=client))

    async def read(self, order: list[str], client: str = "c", words: int = 3) -> int:
        async with aclosing(self.stream(client, words)) as chunks:
            count = 0
            async for chunk in chunks:
                if not count:
                    order.append(client)
                count += bool(chunk.text)
        return count

    @property
    def free(self) -> int:
        return self.places.free


def test_cancelled_while_queued_never_begins(virtual: Run[None]) -> None:
    """A queued stream whose reader disconnects produces nothing; its slot goes to the next one."""

    async def main() -> None:
        session, order = Talk(1), list[str]()
        first = asyncio.create_task(session.read(order, "first", 5))
        await until(lambda: session.free == 0)
        cancelled, next_ = (asyncio.create_task(session.read(order, name)) for name in ("gone", "next"))
        await asyncio.sleep(0.015)
        cancelled.cancel()
        assert isinstance((await gathered(cancelled))[0], asyncio.CancelledError)
        assert [*await asyncio.gather(first, next_)] == [5, 3]
        assert order == ["first", "next"]
        assert (session.generator.produced, session.generator.closed, session.free) == (8, 2, 1)

    virtual(main)


def test_cancelled_while_streaming_stops_the_model(virtual: Run[None]) -> None:
    """The upstream iterator is closed at once and the slot released."""

    async def main() -> None:
        session = Talk(2)
        reader = asyncio.create_task(session.read([], words=1000))
        await asyncio.sleep(0.055)
        reader.cancel()
        await gathered(reader)
        assert (session.generator.closed, session.free) == (1, 2)
        produced = session.generator.produced
        await asyncio.sleep(1)
        assert session.generator.produced == produced == 5

    virtual(main)


def test_a_slow_reader_is_not_overtaken(virtual: Run[None]) -> None:
    """With a reader of one chunk per second, a model that could produce a hundred produces one or two."""

    async def main() -> None:
        session = Talk(1)
        async with aclosing(session.stream()) as chunks:
            for pulled in range(1, 11):
                await anext(chunks)
                await asyncio.sleep(1)
                assert session.generator.produced <= pulled + 1
        assert (session.generator.closed, session.free) == (1, 1)

    virtual(main)


def test_no_more_streams_than_places_and_clients_in_turn(virtual: Run[None]) -> None:
    """Six streams of one client and one of another on two slots: never three at once, and the other client is served
    early."""

    async def main() -> None:
        session, order = Talk(2), list[str]()
        readers = [asyncio.create_task(session.read(order, "greedy")) for _ in range(6)]
        await asyncio.sleep(0)
        readers.append(asyncio.create_task(session.read(order, "modest")))
        assert [*await asyncio.gather(*readers)] == [3] * 7
        assert order.index("modest") <= 3
        assert session.free == 2

    virtual(main)


def test_waiting_for_a_place_ends_at_the_deadline(virtual: Run[None]) -> None:
    """The error is DeadlineExceeded, the generator is not called, and the other streams keep their slots."""

    async def main() -> None:
        session = Talk(1)
        holder = asyncio.create_task(session.read([], words=10_000))
        await until(lambda: session.free == 0)
        deadline = time.monotonic() + 2
        late = session.gateway.stream(
            Generate(model="m", prompts=["x"]), Context(id="r", deadline=deadline, client="late")
        )
        with pytest.raises(DeadlineExceeded, match="stream slot"):
            await anext(late)
        holder.cancel()
        await gathered(holder)
        assert (session.generator.closed, session.free) == (1, 1)

    virtual(main)
