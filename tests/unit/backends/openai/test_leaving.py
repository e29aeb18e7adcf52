"""A client that disconnects, in any phase, cancels its request on the server within a second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from shoal.backends.openai.runner import UpstreamRunner
from shoal.errors import TransportFailed
from shoal.types import Generate
from tests.fakes.openai_server import Exchange, FakeUpstream, Script, stream
from tests.unit.backends.openai.kit import chunks_of, context, delta, make_task, runner_of, streaming, typed

WITHIN_S = 30.0

TASKS = [streaming(), make_task(), typed(), typed(stream=False)]


async def headers_only(exchange: Exchange) -> None:
    await exchange.head(content_type="text/event-stream")
    await exchange.left()


@pytest.fixture
async def server() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as made:
        yield made


@pytest.fixture
async def runner(server: FakeUpstream) -> AsyncIterator[UpstreamRunner]:
    made = runner_of(server)
    yield made
    await made.aclose()


class TestPhases:
    @pytest.mark.parametrize("task", TASKS)
    async def test_sent_and_nothing_came(self, server: FakeUpstream, runner: UpstreamRunner, task: Generate) -> None:
        server.on("/chat/completions", Exchange.left)
        reading = asyncio.create_task(chunks_of(runner, task))
        request = await server.request()
        reading.cancel()
        async with asyncio.timeout(WITHIN_S):
            await request.disconnected.wait()
        await asyncio.gather(reading, return_exceptions=True)
        assert runner._fleet.replicas[0].in_flight == 0

    @pytest.mark.parametrize("task", [streaming(), typed()])
    async def test_headers_and_no_token(self, server: FakeUpstream, runner: UpstreamRunner, task: Generate) -> None:
        server.on("/chat/completions", headers_only)
        reading = asyncio.create_task(chunks_of(runner, task))
        request = await server.request()
        reading.cancel()
        async with asyncio.timeout(WITHIN_S):
            await request.disconnected.wait()
        await asyncio.gather(reading, return_exceptions=True)

    @pytest.mark.parametrize("task", [streaming(), typed()])
    async def test_between_tokens(self, server: FakeUpstream, runner: UpstreamRunner, task: Generate) -> None:
        """The iterator is closed between tokens, or cancelled while it waits."""
        server.on("/chat/completions", stream(delta(), after=Exchange.left))
        for number, cancel in enumerate((False, True), 1):
            chunks = runner.stream(task, context())
            await anext(chunks)
            request = await server.request(number)
            if cancel:
                waiting = asyncio.ensure_future(anext(chunks))
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            else:
                await chunks.aclose()
            async with asyncio.timeout(WITHIN_S):
                await request.disconnected.wait()
            assert runner._fleet.replicas[0].in_flight == 0

    async def test_before_it_was_sent(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        """No request is sent before the stream is read."""
        chunks = runner.stream(streaming(), context())
        await chunks.aclose()
        assert not server.requests

    async def test_a_slow_reader_holds_the_server_back(self, server: FakeUpstream, runner: UpstreamRunner) -> None:
        """Data that the client does not read is not fetched without bound."""
        sent = 0

        async def floods(exchange: Exchange) -> None:
            nonlocal sent
            await exchange.head(content_type="text/event-stream")
            while not exchange.request.disconnected.is_set():
                await exchange.piece(delta("x" * 2**16))
                sent += 1

        server.on("/chat/completions", floods)
        chunks = runner.stream(streaming(), context())
        await anext(chunks)
        request = await server.request()
        seen = -1
        while seen != sent:  # until the buffers between them are full
            seen = sent
            for _ in range(200):
                await asyncio.sleep(0)
        assert sent < 500
        await chunks.aclose()
        async with asyncio.timeout(WITHIN_S):
            await request.disconnected.wait()

    @pytest.mark.parametrize("script", [Exchange.left, stream(delta(), after=Exchange.left)])
    async def test_closing_the_runner_ends_what_runs(
        self, server: FakeUpstream, runner: UpstreamRunner, script: Script
    ) -> None:
        server.on("/chat/completions", script)
        reading = asyncio.create_task(chunks_of(runner, streaming()))
        request = await server.request()
        await runner.aclose()
        with pytest.raises(TransportFailed):
            await reading
        async with asyncio.timeout(WITHIN_S):
            await request.disconnected.wait()
