"""Requests to a server, and the end of failed or abandoned calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shoal.backends.base import http_client as client_module
from shoal.backends.base.http_answer import RequestNotSent
from shoal.backends.base.http_client import Client
from shoal.backends.base.http_connection import Connection
from shoal.errors import ConfigError, DeadlineExceeded, ShoalError, TransportFailed, UpstreamFailed
from tests.fakes.openai_server import Exchange, FakeUpstream, Script, answer


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
async def server() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as made:
        made.on("/x", answer({"ok": True}))
        yield made


@pytest.fixture
async def client(server: FakeUpstream) -> AsyncIterator[Client]:
    made = Client(server.base, key="sk-test", connect_timeout_s=30.0)
    yield made
    await made.aclose()


class TestRequests:
    async def test_headers_are_these_and_no_others(
        self, server: FakeUpstream, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The headers are the same whatever proxies the environment names."""
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        with await client.open_response("POST", "/x", body=b"{}", deadline=soon(), request_id="r-1") as response:
            assert (await response.read_all(100)).body == b'{"ok": true}'
        sent = server.requests[0]
        assert (sent.method, sent.path, sent.body) == ("POST", "/v1/x", b"{}")
        assert sent.headers == {
            "host": f"127.0.0.1:{server.port}",
            "accept-encoding": "identity",
            "user-agent": "shoal",
            "content-type": "application/json",
            "authorization": "Bearer sk-test",
            "accept": "*/*",
            "x-request-id": "r-1",
            "content-length": "2",
        }

    @pytest.mark.parametrize("id", ["", "a b", "a\r\nx: y", "é", "x" * 129])
    async def test_a_request_id_that_is_none_stays_here(self, server: FakeUpstream, client: Client, id: str) -> None:
        with await client.open_response("POST", "/x", deadline=soon(), request_id=id) as response:
            assert response.status == 200
        assert "x-request-id" not in server.requests[0].headers

    @pytest.mark.parametrize("key", ["a b", "a\nb", "é"])
    async def test_a_key_that_no_header_carries(self, key: str) -> None:
        with pytest.raises(ConfigError, match="upstream_api_key"):
            Client("http://127.0.0.1:1", key=key)

    async def test_large_bodies_arrive_whole(self, server: FakeUpstream, client: Client) -> None:
        body = bytes(range(256)) * 2**14
        assert (await client.post("/x", body, soon())).status == 200
        assert server.requests[0].body == body

    async def test_connections_are_used_again(self, server: FakeUpstream, client: Client) -> None:
        for _ in range(3):
            await client.get("/models", soon())
        assert (len(server.requests), server.connections) == (3, 1)

    async def test_cookies_are_not_kept(self, server: FakeUpstream, client: Client) -> None:
        server.on("/x", answer({}, set_cookie="a=b"))
        await client.post("/x", b"{}", soon())
        await client.post("/x", b"{}", soon())
        assert "cookie" not in server.requests[1].headers

    async def test_redirects_are_not_followed(self, server: FakeUpstream, client: Client) -> None:
        server.on("/x", answer(b"", 307, location="/v1/models"))
        assert (await client.post("/x", b"{}", soon())).status == 307
        assert len(server.requests) == 1


class TestFailures:
    async def test_nobody_there(self, server: FakeUpstream, client: Client) -> None:
        await server.stop()
        with pytest.raises(RequestNotSent, match="is not reachable: check its address"):
            await client.get("/models", soon())

    async def test_no_tls(self) -> None:
        async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
            client = Client(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
            with pytest.raises(RequestNotSent, match="whether its port speaks TLS"):
                await client.get("/models", soon())
            await client.aclose()

    @pytest.mark.parametrize("phase", ["before", "inside"])
    async def test_a_connection_that_breaks(self, server: FakeUpstream, client: Client, phase: str) -> None:
        async def breaks(exchange: Exchange) -> None:
            if phase == "inside":
                await exchange.head(length=100)
                await exchange.piece(b"x")
            await exchange.cut()

        server.on("/x", breaks)
        with pytest.raises(TransportFailed, match="broke: send the request again") as caught:
            await client.post("/x", b"{}", soon())
        assert not isinstance(caught.value, RequestNotSent)
        assert len(server.requests) == 1
        words = "it ended before the answer was complete" if phase == "inside" else "Server disconnected"
        assert caught.value.message.endswith(f"({words})")

    async def test_an_idle_connection_that_was_closed_meanwhile(self, server: FakeUpstream, client: Client) -> None:
        """If the server closes an idle connection, the request is sent again on a new one."""
        await client.get("/models", soon())

        async def closes(exchange: Exchange) -> None:
            server.on("/x", answer({"ok": True}))
            exchange.reset()

        server.on("/x", closes)
        assert (await client.post("/x", b"{}", soon())).body == b'{"ok": true}'
        assert (len(server.requests), server.connections) == (3, 2)

    async def test_a_request_that_was_worked_on_is_not_sent_twice(
        self, server: FakeUpstream, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client_module, "STALE_S", 0.0)
        await client.get("/models", soon())
        server.on("/x", Exchange.cut)
        with pytest.raises(TransportFailed):
            await client.post("/x", b"{}", soon())
        assert len(server.requests) == 2

    async def test_what_is_no_http(self, server: FakeUpstream, client: Client) -> None:
        async def talks(exchange: Exchange) -> None:
            await exchange.raw(b"SSH-2.0-OpenSSH\r\n\r\n")
            await exchange.cut()

        server.on("/x", talks)
        with pytest.raises(TransportFailed):
            await client.post("/x", b"{}", soon())

    async def test_a_compressed_answer_is_refused(self, server: FakeUpstream, client: Client) -> None:
        server.on("/x", answer(b"\x1f\x8b", content_encoding="gzip"))
        with pytest.raises(UpstreamFailed, match=r"compresses its answers \(gzip\)"):
            await client.post("/x", b"{}", soon())

    async def test_an_answer_without_bounds(
        self, server: FakeUpstream, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client_module, "MAX_ANSWER_BYTES", 1000)
        server.on("/x", answer(b"x" * 1001))
        with pytest.raises(UpstreamFailed, match="more than 1000 bytes"):
            await client.post("/x", b"{}", soon())
        server.on("/x", answer(b"x" * 1000))
        assert len((await client.post("/x", b"{}", soon())).body) == 1000

    async def test_an_answer_larger_than_expected(self, server: FakeUpstream, client: Client) -> None:
        server.on("/x", answer(b"x" * 1001))
        with pytest.raises(UpstreamFailed, match="more than 1000 bytes"):
            await client.post("/x", b"{}", soon(), max_bytes=1000)
        assert len((await client.post("/x", b"{}", soon(), max_bytes=1001)).body) == 1001

    async def test_of_an_error_only_the_words_are_read(self, server: FakeUpstream, client: Client) -> None:
        server.on("/x", answer(b"x" * (client_module.MAX_ERROR_BYTES + 1), status=500))
        for answered in (await client.post("/x", b"{}", soon()), await client.get("/x", soon())):
            assert (len(answered.body), answered.is_complete) == (client_module.MAX_ERROR_BYTES, False)

    async def test_the_size_of_a_get_response_is_bounded(
        self, server: FakeUpstream, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client_module, "MAX_CARD_BYTES", 1000)
        server.on("/x", answer(b"x" * 1001))
        with pytest.raises(UpstreamFailed, match="more than 1000 bytes"):
            await client.get("/x", soon())

    async def test_after_closing(self, client: Client) -> None:
        await client.aclose()
        await client.aclose()
        with pytest.raises(TransportFailed, match="is closed"):
            await client.get("/models", soon())


async def silent(exchange: Exchange) -> None:
    await exchange.left()


async def half(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.piece(b"{")
    await exchange.left()


async def test_closing_while_it_connects(server: FakeUpstream, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent, and the new connection is closed."""
    opened = Connection.open

    async def close_first(*arguments: Any) -> Connection:
        made = await opened(*arguments)
        await client.aclose()
        return made

    monkeypatch.setattr(Connection, "open", close_first)
    with pytest.raises(RequestNotSent, match="is closed"):
        await client.get("/models", soon())
    assert not server.requests


class TestGivenUp:
    @pytest.mark.parametrize("script", [silent, half])
    async def test_the_deadline_closes_the_connection(
        self, server: FakeUpstream, client: Client, script: object
    ) -> None:
        server.on("/x", silent if script is silent else half)
        with pytest.raises(DeadlineExceeded, match="did not answer within"):
            await client.post("/x", b"{}", soon(0.05))
        async with asyncio.timeout(30):
            await (await server.request(path="/x")).disconnected.wait()

    async def test_a_deadline_that_passed(self, server: FakeUpstream, client: Client) -> None:
        with pytest.raises(DeadlineExceeded, match="before it was sent"):
            await client.post("/x", b"{}", soon(-1))
        assert not server.requests

    @pytest.mark.parametrize("script", [silent, half])
    async def test_a_cancelled_call_closes_the_connection(
        self, server: FakeUpstream, client: Client, script: object
    ) -> None:
        server.on("/x", silent if script is silent else half)
        task = asyncio.create_task(client.post("/x", b"{}", soon()))
        request = await server.request(path="/x")
        task.cancel()
        async with asyncio.timeout(30):
            await request.disconnected.wait()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_closing_fails_what_is_pending(self, server: FakeUpstream, client: Client) -> None:
        server.on("/x", silent)
        task = asyncio.create_task(client.post("/x", b"{}", soon()))
        await server.request(path="/x")
        await client.aclose()
        with pytest.raises(ShoalError) as caught:
            await task
        assert isinstance(caught.value, TransportFailed)

    async def test_closing_fails_a_body_that_is_read(self, server: FakeUpstream, client: Client) -> None:
        """Closing fails the read at once, not at its deadline."""
        server.on("/x", half)
        with await client.open_response("POST", "/x", body=b"{}", deadline=soon()) as response:
            assert await response.read_piece() == b"{"
            reading = asyncio.create_task(response.read_piece())
            await asyncio.sleep(0)
            await client.aclose()
            with pytest.raises(TransportFailed):
                await reading

    async def test_a_body_fails_at_the_deadline(self, server: FakeUpstream, client: Client) -> None:
        """Also while it is read piece by piece, and its connection is closed."""
        server.on("/x", half)
        failing = pytest.raises(DeadlineExceeded, match="did not answer within")
        with failing, await client.open_response("POST", "/x", deadline=soon(0.2)) as response:
            while await response.read_piece():
                pass
        async with asyncio.timeout(30):
            await server.requests[0].disconnected.wait()


async def chatters(exchange: Exchange) -> None:
    """Send data without end, as fast as it is read, until the caller disconnects."""
    await exchange.head()
    await exchange.piece(b"{")
    while not exchange.request.disconnected.is_set():
        await exchange.piece(b": still here\n\n")
        await asyncio.sleep(0)


class TestTheEndOfAnAnswer:
    @pytest.mark.parametrize("script", [half, chatters])
    async def test_is_not_waited_for_by_the_caller(
        self, server: FakeUpstream, client: Client, monkeypatch: pytest.MonkeyPatch, script: Script
    ) -> None:
        """The caller has its answer; only the connection cannot be reused, whatever else it receives."""
        monkeypatch.setattr(client_module, "END_S", 0.02)
        server.on("/x", script)
        with await client.open_response("POST", "/x", deadline=soon()) as response:
            assert (await response.read_piece()).startswith(b"{")
            response.finish()
        assert not server.requests[0].disconnected.is_set()
        async with asyncio.timeout(30):
            await server.requests[0].disconnected.wait()

    async def test_closing_does_not_wait_for_it_either(
        self, server: FakeUpstream, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client_module, "END_S", 60.0)
        server.on("/x", half)
        with await client.open_response("POST", "/x", deadline=soon()) as response:
            await response.read_piece()
            response.finish()
        async with asyncio.timeout(30):
            await client.aclose()
            await server.requests[0].disconnected.wait()

    async def test_gives_the_connection_back(self, server: FakeUpstream, client: Client) -> None:
        go = asyncio.Event()

        async def late(exchange: Exchange) -> None:
            await exchange.head()
            await exchange.piece(b"{}")
            await go.wait()
            await exchange.end()

        server.on("/x", late)
        with await client.open_response("POST", "/x", deadline=soon()) as response:
            await response.read_piece()
            response.finish()
        (ending,) = client._ending
        go.set()
        await ending
        await client.get("/models", soon())
        assert server.connections == 1
