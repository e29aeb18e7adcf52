"""One HTTP/1.1 connection to a server: sends a request, and parses its response as it arrives (RFC 9112).

It does what calls of one server need and no more: no redirects, cookies, proxies or compression, which make a general
client two to three times as expensive.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import cast

import httptools

READ_BYTES = 64 * 2**10
"""Bytes to buffer for a slow reader before reading from the server pauses."""

PIECE_BYTES = 2**18
"""Maximum body size that is sent in one write. A longer body is sent in pieces of this size, so that a slow server does
not receive all of a canceled request."""

HEAD_BYTES = 64 * 2**10
"""Maximum size of a response's headers."""

FRAMING_PER_BYTE = 16
"""Bytes of chunked framing and trailers allowed per byte of data, in addition to HEAD_BYTES. The parser collects a line
without bounds."""

_LENGTHS = frozenset({"content-length", "transfer-encoding"})


class NotConnected(OSError):
    """No connection was made, so the server read nothing."""


class NotSecured(NotConnected):
    """The TLS handshake failed."""


class ConnectTimedOut(NotConnected):
    """No connection was made in time."""


class Disconnected(OSError):
    """The server closed the connection before its response began."""


class BodyCut(OSError):
    """The connection ended before the body was complete."""


class InvalidResponse(OSError):
    """The response is not valid HTTP/1.1."""


class Connection(asyncio.Protocol):
    """A connection that carries one exchange at a time: `send`, `read_head`, then `read` until it returns b"".

    `is_new`: no response was read from it yet. `idle_since`: when its last response was complete, in seconds of the
    loop's clock. `status` and `headers` (lower-case names) are those of the response whose head was read.
    """

    def __init__(self) -> None:
        self.is_new = True
        self.idle_since = 0.0
        self.status = 0
        self.headers: dict[str, str] = {}
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # called by the parser: no Python code runs for a piece of the body
        self._parser = _make_parser(self)
        self._buffered = 0
        self._overhead = 0  # bytes of head, framing and trailers, minus the allowance of the data
        self._has_head = False
        self._is_complete = True  # no response is due
        self._keeps_alive = True
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_paused = False
        self._can_write: asyncio.Future[None] | None = None
        self._sending: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, host: str, port: int, context: ssl.SSLContext | None, timeout_s: float) -> Connection:
        """Connect. Raises NotConnected."""
        try:
            async with asyncio.timeout(timeout_s):
                _, made = await asyncio.get_running_loop().create_connection(cls, host, port, ssl=context)
            return made
        except TimeoutError:
            raise ConnectTimedOut from None
        except ssl.SSLError as error:
            raise NotSecured(str(error)) from error
        except OSError as error:
            raise NotConnected(str(error)) from error

    @property
    def is_reusable(self) -> bool:
        """Whether another request may be sent: the last response is complete, and both sides keep the connection."""
        return (
            self._is_complete
            and self._keeps_alive
            and self._error is None
            and self._sending is None
            and self._transport is not None
            and not self._transport.is_closing()
        )

    @property
    def is_at_end(self) -> bool:
        """Whether all of the body has been read."""
        return self._is_complete and not self._pieces

    def send(self, head: bytes, body: bytes) -> None:
        """Send a request; a large body in pieces, by a task. Call it only if `is_reusable`."""
        assert self._transport is not None
        self._is_complete = self._has_head = False
        self._overhead = 0
        if len(body) <= PIECE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._sending = self._loop.create_task(self._send_pieces(body))

    async def read_head(self) -> None:
        """Wait for the status and headers. Raises Disconnected, InvalidResponse, another OSError, or what `fail` was
        given."""
        while not self._has_head:
            await self._next_change()

    async def read(self) -> bytes:
        """Return the data that has arrived, b"" at the end of the body. Raises as `read_head` does, and BodyCut."""
        while not self._pieces:
            if self._is_complete:
                return b""
            await self._next_change()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._buffered = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def fail(self, error: BaseException) -> None:
        """Close the connection, and fail what waits for it or reads from it later."""
        if self._error is None:
            self._error = error
        self.close()
        self._wake()

    def close(self) -> None:
        """Close the connection without waiting for what is left to send."""
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        if self._transport is not None:
            self._transport.abort()

    def _next_change(self) -> asyncio.Future[None]:
        """Return a future of the next change; the caller checks whether it is the one that it needs."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _send_pieces(self, body: bytes) -> None:
        assert self._transport is not None
        for start in range(0, len(body), PIECE_BYTES):
            if self._can_write is not None:
                await self._can_write
            self._transport.write(body[start : start + PIECE_BYTES])
        self._sending = None

    # The methods that the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's have no such base class

    def data_received(self, data: bytes) -> None:
        if self._is_complete:
            self.close()  # nobody asked: whatever it is, the next response could not be told from it
            return
        pieces = self._pieces
        before = len(pieces)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(InvalidResponse(f"its response is not valid HTTP: {error}"))
            return
        size = sum(map(len, pieces[before:] if before else pieces))
        overhead = self._overhead + len(data) - (1 + FRAMING_PER_BYTE) * size
        self._overhead = overhead if overhead > 0 else 0
        if overhead > HEAD_BYTES and not self._is_complete:
            self.fail(InvalidResponse("its response is not valid HTTP: its headers or its framing are too large"))
            return
        self._buffered += size
        if self._buffered > READ_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_complete and self._error is None:
            if exc is None and self._has_head and not _LENGTHS & self.headers.keys():
                self._is_complete = True  # a body without a length ends with its connection
            else:
                self._error = BodyCut() if self._has_head else exc or Disconnected("Server disconnected")
        self._keeps_alive = False
        if self._sending is not None:
            self._sending.cancel()
        self._wake()

    def pause_writing(self) -> None:
        self._can_write = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_result(None)
        self._can_write = None

    # The methods that the parser calls.

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise InvalidResponse("a second response to one request")
        self.headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._has_head:  # a trailer
            return
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:  # 100 and 103 come before the response
            self.status = status
            self._has_head = True

    def on_message_complete(self) -> None:
        if self._has_head:
            self._is_complete = True
            self._keeps_alive = self._keeps_alive and self._parser.should_keep_alive()
            self.is_new = False


def _make_parser(target: Connection) -> httptools.HttpResponseParser:
    parser = httptools.HttpResponseParser(target)
    # As other clients do: some servers end lines with LF alone, or pad the sizes of chunks.
    parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True)
    return parser


def encode_head(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    """Encode a request line and headers, without the empty line that ends them."""
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, ""]).encode("latin-1")
