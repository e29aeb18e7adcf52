"""The HTTP server: binding and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
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
    """The gateway interface that the server uses."""

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


class RunningServer:
    """A server in this loop; `stop` starts its shutdown."""

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
    """Run the loop until a condition without a notification is true."""
    while not true():  # noqa: ASYNC110 - uvicorn offers no event for it
        await asyncio.sleep(0)


async def head(reader: asyncio.StreamReader) -> bytes:
    return (await reader.readuntil(b"\r\n\r\n")).lower()


class TestBind:
    def test_the_port_in_use_error_names_the_flag(self, sockets: list[socket.socket]) -> None:
        """The port and the flag are in the message."""
        port = sockets[0].getsockname()[1]
        with pytest.raises(SetupError, match=rf"port {port} on 127\.0\.0\.1 is in use: choose another with --port"):
            bind("127.0.0.1", port)

    def test_nagle_is_disabled(self, sockets: list[socket.socket]) -> None:
        """Nagle's algorithm would hold the second piece of a stream until the first is acknowledged."""
        with socket.create_connection(sockets[0].getsockname()), sockets[0].accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    def test_an_address_of_another_machine_is_named(self) -> None:
        """192.0.2.0/24 is never assigned."""
        with pytest.raises(SetupError, match=r"192\.0\.2\.1 is not an address of this machine"):
            bind("192.0.2.1", 0)

    def test_a_name_without_address_is_named(self) -> None:
        """An empty label is never a host, so nothing is resolved."""
        with pytest.raises(SetupError, match="cannot resolve host"):
            bind("256.0.0.1.", 0)

    @pytest.mark.parametrize("code", [errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT])
    def test_missing_addresses_of_a_name_are_skipped(self, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """/etc/hosts may list ::1 where IPv6 is disabled. An address in use is an error all the same."""
        stream = (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        found = [(socket.AF_INET6, *stream, ("::1", 0, 0, 0)), (socket.AF_INET, *stream, ("127.0.0.1", 0))]
        listen = shoal.server._listen

        def refuse(family: int, address: tuple[Any, ...], *, shared: bool = False) -> socket.socket:
            if family == socket.AF_INET6:
                raise OSError(code, os.strerror(code))
            return listen(family, address, shared=shared)

        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        monkeypatch.setattr(shoal.server, "_listen", refuse)
        (bound,) = bind("localhost", 0)
        with bound:
            port = bound.getsockname()[1]
            assert bound.family == socket.AF_INET
            with pytest.raises(SetupError, match="is in use"):
                bind("localhost", port)
        del found[1]
        with pytest.raises(SetupError, match="localhost"):
            bind("localhost", 0)

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
        """The server software is not disclosed; connections stay open."""
        running = RunningServer(answer, sockets)
        reader, writer = await running.connect()
        writer.write(REQUEST)
        response_head = await head(reader)
        assert response_head.startswith(b"http/1.1 200")
        assert b"\r\nserver:" not in response_head
        assert b"connection: close" not in response_head
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

        running = RunningServer(slow, sockets)
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

    async def test_a_request_behind_a_stream_is_answered_during_shutdown(
        self, sockets: list[socket.socket], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its head was sent before the signal without a close notice: the next request gets a response with one."""
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

        running = RunningServer(streaming, sockets)
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

    async def test_streams_that_outlast_the_drain_send_an_error(self, sockets: list[socket.socket]) -> None:
        """They are cancelled and get a moment to report it before connections are closed."""
        begun = asyncio.Event()

        async def streaming(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"word", "more_body": True})
            begun.set()
            await running.gateway.broken_off.wait()
            await send({"type": "http.response.body", "body": b"sorry"})

        running = RunningServer(streaming, sockets, timeout=0.0)
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
        """`drain_timeout_s` bounds the shutdown; the client gets a retryable error."""
        monkeypatch.setattr(shoal.server, "ABORT_GRACE_S", 0.0)
        arrived, cancelled = asyncio.Event(), asyncio.Event()

        async def endless(scope: Any, receive: Any, send: Any) -> None:
            arrived.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        running = RunningServer(endless, sockets, timeout=0.0)
        reader, writer = await running.connect()
        writer.write(REQUEST)
        await arrived.wait()
        running.stop.set()
        await running.done
        await cancelled.wait()
        response_head = await head(reader)
        assert response_head.startswith(b"http/1.1 503")
        assert b"retry-after: 1" in response_head
        writer.close()

    async def test_connections_are_accepted_during_the_delay(self, sockets: list[socket.socket]) -> None:
        """Load balancers need time to see the readiness change; their clients are asked to reconnect."""
        running = RunningServer(answer, sockets, delay=3600.0)
        reader, writer = await running.connect()
        running.stop.set()
        await until(lambda: running.gateway.draining)
        writer.write(REQUEST)
        response_head = await head(reader)
        assert response_head.startswith(b"http/1.1 200")
        assert b"connection: close" in response_head
        writer.close()
        running.done.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running.done

    async def test_idle_connections_may_send_another_request(self, sockets: list[socket.socket]) -> None:
        """Also new ones; the response announces the close."""
        running = RunningServer(answer, sockets, timeout=60.0, idle=60.0)
        pairs = [await running.connect() for _ in range(3)]
        for reader, writer in pairs[:2]:
            writer.write(REQUEST)
            assert b"connection: close" not in await head(reader)
            assert await reader.readexactly(2) == b"ok"
        running.stop.set()
        await until(lambda: sockets[0].fileno() == -1)  # it no longer listens
        for reader, writer in pairs:
            writer.write(REQUEST)
            response_head = await head(reader)
            assert response_head.startswith(b"http/1.1 200")
            assert b"connection: close" in response_head
            assert await reader.read() == b"ok"
            writer.close()
        await running.done

    async def test_idle_connections_do_not_delay_shutdown(self, sockets: list[socket.socket]) -> None:
        """They are kept for `drain_idle_s`, and never longer than `drain_timeout_s`."""
        for idle, timeout in ((0.0, 3600.0), (3600.0, 0.0)):
            bound = bind("127.0.0.1", 0)
            running = RunningServer(answer, bound, timeout=timeout, idle=idle)
            reader, writer = await running.connect()
            writer.write(REQUEST)
            await head(reader)
            running.stop.set()
            await running.done
            assert await reader.read() == b"ok"
            writer.close()

    async def test_clients_in_the_backlog_are_answered(self, sockets: list[socket.socket]) -> None:
        """They were connected before the listener closed."""
        running = RunningServer(answer, sockets, timeout=60.0, idle=60.0)
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.create_connection(sockets[0].getsockname())) for _ in range(50)]
            for one in clients:
                one.sendall(REQUEST)
            running.stop.set()
            await running.done
            for one in clients:
                assert one.recv(65536).startswith(b"HTTP/1.1 200")

    async def test_long_idle_connections_are_closed_for_new_ones(
        self, sockets: list[socket.socket], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """For new ones when file descriptors run out, but not connections that wait for a response or were just
        used."""
        release = asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            await release.wait()
            await answer(scope, receive, send)

        running = RunningServer(slow, sockets, idle=60.0)
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

    async def test_a_server_that_was_never_ready_stops_at_once(self, sockets: list[socket.socket]) -> None:
        """It gets no traffic, so the delay would only slow the failure down."""
        running = RunningServer(answer, sockets, delay=3600.0)
        running.gateway._ready = False
        running.stop.set()
        await running.done
