"""The duration, concurrency and cancellation of fetches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from shoal.errors import DeadlineExceeded, InvalidValue, Overloaded
from tests.unit.http.fetching.kit import Names, Web, fetcher, http, soon, stay_silent, url


class TestTime:
    async def test_an_unresponsive_host_times_out(self, server: Web) -> None:
        """The client gets an error; the connection is closed."""
        server.answer = stay_silent
        with pytest.raises(InvalidValue, match=r"127\.0\.0\.1 did not send the image within 0\.4 s: send the"):
            await fetcher(server, seconds=0.4).get(url(server), deadline=soon())
        await server.until(lambda: server.disconnects == 1)

    async def test_the_request_has_its_own_deadline(self, server: Web) -> None:
        server.answer = stay_silent
        with pytest.raises(DeadlineExceeded, match="before the request's deadline"):
            await fetcher(server).get(url(server), deadline=soon(0.4))
        await server.until(lambda: server.disconnects == 1)

    async def test_a_slow_stream_times_out(self, server: Web) -> None:
        """Steady data does not extend the limit for the whole."""
        dripped = asyncio.Event()

        async def drip(writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
            while True:
                writer.write(b"x")
                await writer.drain()
                dripped.set()
                await asyncio.sleep(0.002)

        server.answer = drip
        with pytest.raises(InvalidValue, match="did not send the image within"):
            await fetcher(server, seconds=0.4).get(url(server), deadline=soon())
        assert dripped.is_set()

    async def test_an_unresponsive_name_server_times_out(self, server: Web) -> None:
        class SilentNames(Names):
            async def addresses(self, host: str, port: int) -> Sequence[str]:
                await asyncio.Event().wait()
                return []

        with pytest.raises(InvalidValue, match="did not send the image within"):
            await fetcher(server, names=SilentNames([]), seconds=0.05).get(url(server, "images.test"), deadline=soon())

    async def test_a_passed_deadline_is_refused(self, server: Web) -> None:
        with pytest.raises(DeadlineExceeded, match="before its image was fetched"):
            await fetcher(server).get(url(server), deadline=soon(-1))
        assert server.requests == []

    async def test_cancelling_closes_the_connection(self, server: Web) -> None:
        server.answer = stay_silent
        task = asyncio.create_task(fetcher(server).get(url(server), deadline=soon()))
        await server.until(lambda: len(server.requests) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.until(lambda: server.disconnects == 1)


class TestSlots:
    async def test_concurrent_fetches_are_limited(self, server: Web) -> None:
        """The others wait, and are then served."""
        go = asyncio.Event()
        answering = http()

        async def hang(writer: asyncio.StreamWriter) -> None:
            await go.wait()
            await answering(writer)

        server.answer = hang
        web_fetcher = fetcher(server, slots=3)
        tasks = [asyncio.create_task(web_fetcher.get(url(server), deadline=soon())) for _ in range(8)]
        await server.until(lambda: server.busy == 3)
        for _ in range(50):
            await asyncio.sleep(0)
        assert server.busy == 3
        go.set()
        assert await asyncio.gather(*tasks) == [b"picture"] * 8
        assert len(server.requests) == 8

    async def test_waiting_counts_towards_the_deadline(self, server: Web) -> None:
        """The wait ends at the request's deadline; a request that timed out has sent nothing."""
        server.answer = stay_silent
        web_fetcher = fetcher(server, slots=1)
        first = asyncio.create_task(web_fetcher.get(url(server), deadline=soon()))
        await server.until(lambda: server.busy == 1)
        second = asyncio.create_task(web_fetcher.get(url(server), deadline=soon(0.02)))
        with pytest.raises(DeadlineExceeded):
            await second
        first.cancel()
        await server.until(lambda: server.busy == 0)
        assert len(server.requests) == 1

    async def test_no_slot_in_time(self, server: Web) -> None:
        release = asyncio.Event()

        class HoldingResolver(Names):
            """Holds its fetch, and thus the slot, past its time."""

            async def addresses(self, host: str, port: int) -> Sequence[str]:
                try:
                    await asyncio.Event().wait()
                finally:
                    await release.wait()
                return []

        web_fetcher = fetcher(server, names=HoldingResolver([]), slots=1, seconds=0.05)
        first = asyncio.create_task(web_fetcher.get(url(server, "images.test"), deadline=soon()))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="is fetching too many images: send") as caught:
            await web_fetcher.get(url(server, "images.test"), deadline=soon())
        assert caught.value.retry_after == 1.0
        release.set()
        with pytest.raises(InvalidValue, match="did not send"):
            await first
        assert server.requests == []

    async def test_clients_take_turns(self, server: Web) -> None:
        """Whatever the number of their fetches."""
        web_fetcher, order = fetcher(server, slots=1), list[str]()

        async def fetch(client: str) -> None:
            await web_fetcher.get(url(server), deadline=soon(), client=client)
            order.append(client)

        await asyncio.gather(*map(fetch, "aaaaabb"))
        assert "".join(order) == "aababaa"

    async def test_a_failed_fetch_releases_its_slot(self, server: Web) -> None:
        web_fetcher = fetcher(server, slots=1)
        server.answer = http(b"", status="404 No")
        for _ in range(3):
            with pytest.raises(InvalidValue):
                await web_fetcher.get(url(server), deadline=soon())
        server.answer = http()
        assert await web_fetcher.get(url(server), deadline=soon()) == b"picture"
