"""The HTTP server: binding, and the way down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import shoal.server
import shoal.server.http_protocol
from shoal.errors import SetupError, ShoalError
from shoal.server import HttpServer, bind

Asgi = Callable[[Any, Any, Any], Awaitable[None]]
REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


class Gateway:
    """What the server sees of the gateway."""

    draining = False

    def __init__(self, *, ready: bool = True) -> None:
        self._ready = ready
        self.broken_off = asyncio.Event()

    def ready(self) -> bool:
        return self._ready

    def abort_generations(self) -> None:
        self.broken_off.set()


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    bound = bind("127.0.0.1", 0)
    yield bound
    for one in bound:
        one.close()


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def render_error(error: ShoalError) -> bytes:
    return json.dumps({"error": error.message}).encode()


class Running:
    """A server in this loop; `stop` begins its way down."""

    def __init__(
        self, asgi: Asgi, sockets: list[socket.socket], *, delay: float = 0.0, timeout: float = 5.0, idle: float = 0.0
    ) -> None:
        self.gateway = Gateway()
        self.stop = asyncio.Event()
        self.port = sockets[0].getsockname()[1]
        server = self.server = HttpServer(
            asgi, sockets, render_error, drain_delay_s=delay, drain_timeout_s=timeout, drain_idle_s=idle
        )
        self.done = asyncio.create_task(server.run(self.gateway, self.stop))

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


async def until(true: Callable[[], bool]) -> None:
    """Let the loop turn until something that nothing announces has come true."""
    while not true():  # noqa: ASYNC110 - uvicorn offers no event for it
        await asyncio.sleep(0)


async def head(reader: asyncio.StreamReader) -> bytes:
    return (await reader.readuntil(b"\r\n\r\n")).lower()


class TestBind:
    def test_a_port_in_use_is_named_with_the_way_out(self, sockets: list[socket.socket]) -> None:
        """The port and the flag are in the message."""
        port = sockets[0].getsockname()[1]
        with pytest.raises(SetupError, match=rf"port {port} on 127\.0\.0\.1 is in use: choose another with --port"):
            bind("127.0.0.1", port)

    def test_connections_send_without_delay(self, sockets: list[socket.socket]) -> None:
        """Nagle's algorithm would hold the second piece of a stream until the first is acknowledged."""
        with socket.create_connection(sockets[0].getsockname()), sockets[0].accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    def test_an_address_of_another_machine_is_named(self) -> None:
        """192.0.2.0/24 belongs to nobody."""
        with pytest.raises(SetupError, match=r"192\.0\.2\.1 is not an address of this machine"):
            bind("192.0.2.1", 0)

    def test_a_name_without_address_is_named(self) -> None:
        """An empty label can be no host, so that nothing is looked up."""
        with pytest.raises(SetupError, match="cannot resolve host"):
            bind("256.0.0.1.", 0)

    def test_all_addresses_of_a_name_share_the_port(self) -> None:
        """localhost is 127.0.0.1 and, where there is IPv6, ::1."""
        bound = bind("localhost", 0)
        try:
            assert len({one.getsockname()[1] for one in bound}) == 1
        finally:
            for one in bound:
                one.close()


class TestRunning:
    async def test_answers_carry_no_server_header(self, sockets: list[socket.socket]) -> None:
        """What runs here is nobody's business; connections stay open."""
        running = Running(answer, sockets)
        reader, writer = await running.connect()
        writer.write(REQUEST)
        found = await head(reader)
        assert found.startswith(b"http/1.1 200")
        assert b"\r\nserver:" not in found
        assert b"connection: close" not in found
        writer.close()
        running.stop.set()
        await running.done

    async def test_a_request_in_flight_is_answered(self, sockets: list[socket.socket]) -> None:
        """It arrived before the signal, so it gets its answer after it."""
        arrived, release = asyncio.Event(), asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            arrived.set()
            await release.wait()
            await answer(scope, receive, send)

        running = Running(slow, sockets)
        reader, writer = await running.connect()
        writer.write(REQUEST)
        await arrived.wait()
        running.stop.set()
        await until(lambda: sockets[0].fileno() == -1)  # it no longer listens
        release.set()
        assert (await head(reader)).startswith(b"http/1.1 200")
        await running.done
        assert running.gateway.draining
        writer.close()

    async def test_no_stream_takes_the_next_request_down_with_it(
        self, sockets: list[socket.socket], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its head left before the signal, so it told of no end: the request behind it is answered, and told."""
        monkeypatch.setattr(shoal.server.http_protocol, "LINGER_S", 60.0)  # a machine may be slow
        begun, release = asyncio.Event(), asyncio.Event()

        async def streaming(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] != "/stream":
                return await answer(scope, receive, send)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"word", "more_body": True})
            begun.set()
            await release.wait()
            await send({"type": "http.response.body", "body": b"end"})

        running = Running(streaming, sockets)
        reader, writer = await running.connect()
        writer.write(REQUEST.replace(b"/", b"/stream", 1))
        await begun.wait()
        assert b"connection: close" not in await head(reader)
        running.stop.set()
        await until(lambda: sockets[0].fileno() == -1)  # it no longer listens
        release.set()
        assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"3\r\nend\r\n0\r\n\r\n")
        writer.write(REQUEST)
        assert b"connection: close" in await head(reader)
        assert await reader.read() == b"ok"
        await running.done
        writer.close()

    async def test_streams_that_outlast_the_drain_have_a_last_word(self, sockets: list[socket.socket]) -> None:
        """They are told that their time is over, and have a moment to say so before connections are cut."""
        begun = asyncio.Event()

        async def streaming(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"word", "more_body": True})
            begun.set()
            await running.gateway.broken_off.wait()
            await send({"type": "http.response.body", "body": b"sorry"})

        running = Running(streaming, sockets, timeout=0.0)
        reader, writer = await running.connect()
        writer.write(REQUEST)
        await begun.wait()
        running.stop.set()
        await running.done
        assert (await reader.read()).endswith(b"5\r\nsorry\r\n0\r\n\r\n")
        writer.close()

    async def test_a_request_that_outlasts_the_drain_is_cancelled(
        self, sockets: list[socket.socket], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`drain_timeout_s` bounds the way down; the client learns that it may try again."""
        monkeypatch.setattr(shoal.server, "ABORT_GRACE_S", 0.0)
        arrived, cancelled = asyncio.Event(), asyncio.Event()

        async def endless(scope: Any, receive: Any, send: Any) -> None:
            arrived.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        running = Running(endless, sockets, timeout=0.0)
        reader, writer = await running.connect()
        writer.write(REQUEST)
        await arrived.wait()
        running.stop.set()
        await running.done
        await cancelled.wait()
        found = await head(reader)
        assert found.startswith(b"http/1.1 503")
        assert b"retry-after: 1" in found
        writer.close()

    async def test_it_goes_on_accepting_for_the_delay(self, sockets: list[socket.socket]) -> None:
        """Load balancers need time to see that readiness is gone; their clients are asked to connect anew."""
        running = Running(answer, sockets, delay=3600.0)
        reader, writer = await running.connect()
        running.stop.set()
        await until(lambda: running.gateway.draining)
        writer.write(REQUEST)
        found = await head(reader)
        assert found.startswith(b"http/1.1 200")
        assert b"connection: close" in found
        writer.close()
        running.done.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running.done

    async def test_idle_connections_have_another_request(self, sockets: list[socket.socket]) -> None:
        """Also those that have sent none yet; the answer says that it is the last."""
        running = Running(answer, sockets, timeout=60.0, idle=60.0)
        pairs = [await running.connect() for _ in range(3)]
        for reader, writer in pairs[:2]:
            writer.write(REQUEST)
            assert b"connection: close" not in await head(reader)
            assert await reader.readexactly(2) == b"ok"
        running.stop.set()
        await until(lambda: sockets[0].fileno() == -1)  # it no longer listens
        for reader, writer in pairs:
            writer.write(REQUEST)
            found = await head(reader)
            assert found.startswith(b"http/1.1 200")
            assert b"connection: close" in found
            assert await reader.read() == b"ok"
            writer.close()
        await running.done

    async def test_idle_connections_hold_nobody_up(self, sockets: list[socket.socket]) -> None:
        """Their time is `drain_idle_s`, and never more than `drain_timeout_s`."""
        for idle, timeout in ((0.0, 3600.0), (3600.0, 0.0)):
            bound = bind("127.0.0.1", 0)
            running = Running(answer, bound, timeout=timeout, idle=idle)
            reader, writer = await running.connect()
            writer.write(REQUEST)
            await head(reader)
            running.stop.set()
            await running.done
            assert await reader.read() == b"ok"
            writer.close()

    async def test_who_waits_in_the_backlog_is_answered(self, sockets: list[socket.socket]) -> None:
        """They were connected before the listener closed."""
        running = Running(answer, sockets, timeout=60.0, idle=60.0)
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.create_connection(sockets[0].getsockname())) for _ in range(50)]
            for one in clients:
                one.sendall(REQUEST)
            running.stop.set()
            await running.done
            for one in clients:
                assert one.recv(65536).startswith(b"HTTP/1.1 200")

    async def test_connections_idle_for_long_make_room(
        self, sockets: list[socket.socket], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """For new ones, where file descriptors have run out. Not those that wait for an answer, or were just used."""
        release = asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            await release.wait()
            await answer(scope, receive, send)

        running = Running(slow, sockets, idle=60.0)
        pairs = [await running.connect() for _ in range(3)]
        for _, writer in pairs[:2]:
            writer.write(REQUEST)
        release.set()
        for reader, _ in pairs[:2]:
            await head(reader)
            assert await reader.readexactly(2) == b"ok"
        running.server._close_idle()
        release.clear()
        pairs[1][1].write(REQUEST)
        await until(lambda: len(running.server._state.tasks) == 1)
        monkeypatch.setattr(shoal.server, "MIN_IDLE_S", 1e-9)
        running.server._close_idle()
        assert await pairs[0][0].read() == b""
        release.set()
        assert (await head(pairs[1][0])).startswith(b"http/1.1 200")
        for _, writer in pairs:
            writer.close()
        running.stop.set()
        await running.done

    async def test_a_server_that_was_never_ready_does_not_linger(self, sockets: list[socket.socket]) -> None:
        """Nobody routes to it, so the delay would only make the failure slower."""
        running = Running(answer, sockets, delay=3600.0)
        running.gateway._ready = False
        running.stop.set()
        await running.done
