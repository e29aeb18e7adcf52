"""One HTTP/1.1 connection: uvicorn's own, without what lets a client hold it for nothing.

Five things are other than in uvicorn. An offer to speak another protocol is passed over, as RFC 9110 section 7.8 lets
a server do: httptools skips the body of a request that carries one, and Java's HttpClient puts one (h2c) on every POST.
And nobody waits without end: neither for the rest of a head, nor for a client that does not read its answer. And the
head of an answer leaves together with its body: uvicorn writes them one after the other, each a system call that wakes
the client. And a client that leaves is missed by all that it asked: uvicorn tells the last of several requests that
were sent in one go, and works on for nobody with the first. And on the way down no connection closes at once behind an
answer whose head left before that was known.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import termios
from collections import deque
from enum import Enum, auto
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

HEAD_S = 10.0
"""From the connection, or from the first byte of a later request, to the end of its head."""
HEAD_BYTES = 65_536
"""So much of a head may come after its first packet; nothing else bounds it."""
LOOK_S = 10.0
LOOKS = 3
"""A client that takes nothing of its answer from one look to the next, so many times in a row, is cut off."""
LINGER_S = 0.5
"""On the way down, behind an answer whose head could not say `connection: close`. A client that uses the connection
again does so at once, and is told by the next answer; less than the time for streams' last words, which it follows. The
head of what it asks has no longer either."""

_FRAMING = {b"connection", b"content-length", b"transfer-encoding"}


class _At(Enum):
    """Where in a message the parser is."""

    BETWEEN = auto()
    HEAD = auto()
    BODY = auto()


class Connection(HttpToolsProtocol):
    """uvicorn's protocol class for `uvicorn.Config(http=...)`; the bodies' own time is the application's to bound."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._at = _At.BETWEEN
        self._head_timer: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None
        self._head_s = HEAD_S
        self._head_new = False
        self._head_size = 0
        self._open: deque[RequestResponseCycle] = deque()  # what was asked, from the first that has no whole answer
        self._writes = 0  # how often something was written, or room was made for it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        while self._open:
            cycle = self._open.popleft()
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._head_came()
        if self._look_timer is not None:
            self._look_timer.cancel()
            self._look_timer = None

    def data_received(self, data: bytes) -> None:
        before = self._at
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._head_came()
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")
            self._written()
            return
        if self._at is _At.HEAD:
            self._head_size = 0 if self._head_new else self._head_size + len(data)
            self._head_new = False
            if self._head_size > HEAD_BYTES:
                self._refuse(b"431 Request Header Fields Too Large", b"The request's headers are too large.\n")
                return
        if not self._answered():
            self._head_came()
        elif before is _At.BODY and self._at is _At.BETWEEN:
            # The end of a body that was answered before it was read: what follows is a pause like any other.
            self._head_came()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            self._expect_head()

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self._pass_over()
                if self.scope["method"] == "CONNECT":
                    return
                data = data[offer.args[0] :]
            else:
                return

    def _pass_over(self) -> None:
        """Read on after a head with an offer, by a parser that is told the same head without it."""
        framing = [(name, value) for name, value in self.headers if name in _FRAMING]
        if self.scope["method"] == "CONNECT":
            # What follows would be for another server: it is no body, and nothing after it is a request.
            framing = [(b"connection", b"close")]
            self.cycle.keep_alive = False
        version = self.parser.get_http_version().encode()
        lines = [b"POST / HTTP/%s" % version, *(b"%s: %s" % header for header in framing), b"", b""]
        target = _AfterOffer(self)
        self.parser = httptools.HttpRequestParser(target)
        with contextlib.suppress(AttributeError):  # httptools before 0.6.3 has none; uvicorn asks for the same
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join(lines))
        target.in_head = False

    def on_message_begin(self) -> None:
        self._at = _At.HEAD
        self._head_new = True  # the packet that it begins in may hold much else
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._at = _At.BODY
        super().on_headers_complete()
        while self._open and self._open[0].response_complete:
            self._open.popleft()
        self._open.append(self.cycle)
        self.cycle.transport = _Joining(self.transport, self.loop)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # so this parser thinks; `_parse` has the rest read by one that does not
        self._at = _At.BETWEEN
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._written()
        if self._at is _At.HEAD and self._answered() and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._expect_head()

    def shutdown(self) -> None:
        if self._answered() or not self.cycle.response_started:
            super().shutdown()
        else:
            self.timeout_keep_alive = LINGER_S  # type: ignore[assignment]  # a timer's delay, and no more
            self._head_s = LINGER_S

    def pause_writing(self) -> None:
        super().pause_writing()
        self._written()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writes += 1

    def _answered(self) -> bool:
        """Nothing that was asked waits for its answer; until then it is not the client that keeps others waiting."""
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_s, self._head_late)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._at is _At.HEAD:
            self._refuse(b"408 Request Timeout", b"The request's headers did not come in time.\n")
        else:
            # Without a request there is nothing to answer: browsers open connections in advance.
            self.transport.close()

    def _refuse(self, status: bytes, reason: bytes) -> None:
        head = b"HTTP/1.1 %s\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(reason)) + reason)
        self.transport.close()
        self._written()

    def _written(self) -> None:
        self._writes += 1
        if self._look_timer is None and self.transport.get_write_buffer_size():
            self._look_later(self._left(), 0)

    def _look_later(self, size: int, idle: int) -> None:
        self._look_timer = self.loop.call_later(LOOK_S, self._look, self._writes, size, idle)

    def _look(self, writes: int, size: int, idle: int) -> None:
        """Whether less waits to be sent than the last time; what was written since then says that some was taken."""
        self._look_timer = None
        if not self.transport.get_write_buffer_size():
            return
        left = self._left()
        idle = idle + 1 if writes == self._writes and left >= size else 0
        if idle < LOOKS:
            self._look_later(left, idle)
        else:
            self.transport.abort()

    def _left(self) -> int:
        """Bytes that the client has not taken. The system keeps megabytes of them: a slow reader takes from those for
        minutes before there is room for more."""
        kept = bytearray(4)
        with contextlib.suppress(OSError, AttributeError):  # gone already, or a system or transport without the count
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, kept)
        return self.transport.get_write_buffer_size() + int.from_bytes(kept, sys.byteorder)


class _Joining:
    """Where a cycle writes its answer: the first piece waits for the second, or for the next turn of the loop."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._begun = False
        self._held = b""

    def write(self, data: bytes) -> None:
        if not self._begun:
            self._begun, self._held = True, data
            self._loop.call_soon(self._flush)
        elif self._held:
            held, self._held = self._held, b""
            self._transport.write(held + data)
        else:
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held)


class _AfterOffer:
    """What the second parser calls: the connection, but for the head, which it has seen."""

    def __init__(self, connection: Connection) -> None:
        self.in_head = True
        self._connection = connection
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_message_complete

    def on_message_begin(self) -> None:
        if not self.in_head:
            self._connection.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self.in_head:
            self._connection.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_head:
            self._connection.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self.in_head:
            self._connection.on_headers_complete()
