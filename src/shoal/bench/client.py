"""A cheap HTTP/1.1 keep-alive client: ready bytes out, a parsed status and two headers back.

It shares the machine with the server that it measures, so that every microsecond here is one less for the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

Sink = Callable[[bytes], None]


class ConnectionLost(ConnectionError):
    """The server closed the connection before its answer was complete."""


class Reply:
    """One answer: `status`, the headers that a run counts, and the body when it was asked for or is no success."""

    __slots__ = ("batch_size", "body", "queue_ms", "retry_after", "status")

    def __init__(self) -> None:
        self.status = 0
        self.batch_size = 0
        self.queue_ms = -1.0
        self.retry_after = 0.0
        self.body: bytearray | None = None


class Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request in flight."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Reply] | None = None
        self._parser: Any = None
        self._reply = Reply()
        self._sink: Sink | None = None

    async def ask(self, request: bytes, *, keep: bool = False, sink: Sink | None = None) -> Reply:
        """Send `request` and wait for its answer. `sink` is given the parts of a success's body as they arrive.

        Raises ConnectionLost when the connection is gone.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionLost("closed by the server")
        self._reply = reply = Reply()
        if keep:
            reply.body = bytearray()
        self._sink = sink
        self._parser = httptools.HttpResponseParser(self)
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._waiter
        except asyncio.CancelledError:
            self.close()  # an answer is still on its way, and must not meet the next request
            raise

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
            self._fail()

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"x-shoal-batch-size":
            self._reply.batch_size = int(value)
        elif name == b"x-shoal-queue-ms":
            self._reply.queue_ms = float(value)
        elif name == b"retry-after":
            self._reply.retry_after = float(value)

    def on_body(self, body: bytes) -> None:
        if self._sink is not None:
            if self._parser.get_status_code() == 200:
                self._sink(body)
                return
            if self._reply.body is None:  # a refusal is said in one piece
                self._reply.body = bytearray()
        if self._reply.body is not None:
            self._reply.body += body

    def on_message_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()
        waiter, self._waiter = self._waiter, None
        if not self._parser.should_keep_alive():
            self.close()
        if waiter is not None and not waiter.done():
            waiter.set_result(self._reply)

    def _fail(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(ConnectionLost("closed before the answer was complete"))


class Target:
    """Where to connect: scheme, host and port of a URL. `local` is the address to connect from, where it matters.

    Raises ValueError for a URL that is not http.
    """

    def __init__(self, url: str, local: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"the URL must look like http://host:port: got {url!r}")
        self.host = parts.hostname
        self.port = parts.port or 80
        self.name = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        self._local = (local, 0) if local else None

    async def connect(self) -> Connection:
        """Raises OSError when nothing listens there."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self.host, self.port, local_addr=self._local)
        return connection


class Pool:
    """Up to `size` connections; a request takes a free one, so that several callers can share them as a proxy does."""

    def __init__(self, target: Target, size: int) -> None:
        self._target = target
        self._size = size
        self._free: asyncio.LifoQueue[Connection | None] = asyncio.LifoQueue()
        self._connections: list[Connection] = []
        for _ in range(size):
            self._free.put_nowait(None)

    async def open(self) -> None:
        """Connect all of them now rather than on first use."""
        taken = [await self._free.get() for _ in range(self._size)]
        for connection in taken:
            self._free.put_nowait(connection if connection and connection.is_open else await self._connect())

    async def ask(self, request: bytes, *, keep: bool = False, sink: Sink | None = None) -> Reply:
        """Raises ConnectionLost or OSError; a broken connection is replaced on its next use."""
        connection = await self._free.get()
        try:
            if connection is None or not connection.is_open:
                connection = await self._connect()
            return await connection.ask(request, keep=keep, sink=sink)
        finally:
            self._free.put_nowait(connection)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    async def _connect(self) -> Connection:
        connection = await self._target.connect()
        self._connections.append(connection)
        return connection
