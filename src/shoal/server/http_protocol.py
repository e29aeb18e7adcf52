"""One HTTP/1.1 connection: uvicorn's protocol, hardened.

Differences from uvicorn:

- Trailers are dropped. uvicorn appends them to the headers, where they override what was already decided.
- A request that cannot be parsed gets a JSON error, after the responses to pipelined requests before it.
- Upgrade offers are ignored (RFC 9110, section 7.8). httptools skips the body of a request that carries one, and
  Java's HttpClient sends one (h2c) on every POST.
- Heads have a deadline and a size limit, as do chunk framing and trailers. Clients that stop reading are disconnected.
- The head of a response is written together with its first piece: two writes would wake the client twice. The scope's
  `shoal.exchange` takes a whole response in one call (see shoal.http.exchange).
- Large bodies are read a few at a time, so that many uploads do not lengthen the turns of the event loop.
- When a client disconnects, all of its pipelined requests are notified. uvicorn notifies only the last.
- While draining, a connection stays open for a moment after a response that was sent without `connection: close`.
- The keep-alive timer runs on while requests are answered, and starts again for the rest when it ends too early: a
  timer a request costs as much as parsing its head.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import re
import sys
import termios
from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from enum import Enum, auto
from typing import Any, TypeAlias

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from shoal.errors import Malformed, ShoalError
from shoal.http.exchange import EXTENSION

HEAD_TIMEOUT_S = 10.0
"""Maximum time from the connection, or from the first byte of a later request, to the end of its head."""
HEAD_BYTES = 65_536
"""Maximum size of a head after its first packet; nothing else limits it."""
WRITE_CHECK_S = 10.0
MAX_STALLED_CHECKS = 3
"""Consecutive checks, WRITE_CHECK_S apart, in which a client may take nothing of its response before it is cut off."""
LINGER_S = 0.5
"""Minimum time for another request, while draining, after a response that was sent without `connection: close`. Shorter
than the grace of aborted streams (ABORT_GRACE_S), because it may start after a stream's final error."""

READS_PER_TURN = 8
"""Large bodies read per turn of the event loop, 256 kB each: turns stay short during any number of uploads."""
FRAMING_PER_BYTE = 16
"""Bytes of chunked framing allowed per byte of data, in addition to HEAD_BYTES."""
REFUSAL_LINGER_S = 1.0
"""Time that a refused connection is still read after its response, unless the client closes it first."""

ErrorBodyRenderer: TypeAlias = Callable[[ShoalError], bytes]
"""Renders the body of an error that belongs to no route, as JSON."""

_AUTHORITY = re.compile(rb"[^/?#]*://([^/?#]*)")
_FRAMING = {b"connection", b"content-length", b"transfer-encoding"}
_CLOSE = (b"connection", b"close")
_BODILESS = frozenset({204, 304})
_HEADER_BYTES = bytes([*b"\t", *range(0x20, 0x7F), *range(0x80, 0x100)])
_join_header = b": ".join


class _ParserState(Enum):
    """The parser's position in a message."""

    BETWEEN = auto()
    HEAD = auto()
    BODY = auto()


class State(ServerState):
    """State shared by a server's connections. Each response reads the shared list `default_headers` as it starts."""

    def __init__(self) -> None:
        super().__init__()
        self.connections: set[Connection] = set()  # type: ignore[assignment]
        self.draining = False
        self._paused: deque[_Flow] = deque()
        self.refresh_date()

    def refresh_date(self) -> None:
        self.default_headers[:1] = [(b"date", formatdate(usegmt=True).encode())]

    def drain(self) -> None:
        """Send `connection: close` with every response from now on, so that clients reconnect, to another server."""
        self.draining = True
        self.default_headers.append(_CLOSE)

    def resume_in_turn(self, flow: _Flow, loop: asyncio.AbstractEventLoop) -> None:
        """Resume reading a large body: at most READS_PER_TURN bodies per turn of the loop, in order of arrival."""
        self._paused.append(flow)
        if len(self._paused) == 1:
            loop.call_soon(self._resume_some, loop)

    def _resume_some(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(READS_PER_TURN, len(self._paused))):
            self._paused.popleft().resume_now()
        if self._paused:
            loop.call_soon(self._resume_some, loop)


class Connection(HttpToolsProtocol):
    """The protocol of one connection. The application limits the time to read bodies."""

    server_state: State

    def __init__(
        self,
        config: Config,
        server_state: State,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        render_error: ErrorBodyRenderer,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._parser_state = _ParserState.BETWEEN
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._head_s = HEAD_TIMEOUT_S
        self._head_new = False
        self._head_size = 0
        self._framing = 0  # bytes of the body's chunk sizes, extensions and trailers, minus the allowance of its data
        self._refusal: bytes | None = None
        self._render_error = render_error
        self._open: deque[_Exchange] = deque()  # requests without a complete response
        self._idle_until = 0.0
        self._writes = 0  # count of writes, and of times the transport's buffer drained

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.server_state, self.loop)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        while self._open:
            self._open.popleft().mark_disconnected()
        self._cancel_head_timer()
        self._unset_keepalive_if_required()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        before = self._parser_state
        if before is _ParserState.BODY:
            self._framing += len(data)
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self._parse_upgrade(data, offer)
        except httptools.HttpParserError as error:
            self._refuse(b"400 Bad Request", f"The request is not valid HTTP/1.1: {_describe_parse_error(error)}.")
            return
        if self._parser_state is _ParserState.HEAD:
            self._head_size = 0 if self._head_new else self._head_size + len(data)
            self._head_new = False
            if self._head_size > HEAD_BYTES:
                self._refuse(b"431 Request Header Fields Too Large", "The request's headers are too large.")
                return
        elif self._framing > HEAD_BYTES:
            self._refuse(b"400 Bad Request", "The body's chunks or trailers have too much overhead for their data.")
            return
        if self._open:
            if self._head_timer is not None:
                self._cancel_head_timer()
        elif before is _ParserState.BODY and self._parser_state is _ParserState.BETWEEN:
            # A body ended whose response had been sent before: the keep-alive timeout applies as usual.
            self._cancel_head_timer()
            self._start_keep_alive()
        else:
            self._start_head_timer()

    def _parse_upgrade(self, data: bytes, offer: httptools.HttpParserUpgrade) -> None:
        """Parse on after a head with an upgrade offer, at which the parser stopped."""
        while True:
            self._skip_upgrade()
            if self.scope["method"] == "CONNECT":
                return
            data = data[offer.args[0] :]
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as another:
                offer = another
            else:
                return

    def _skip_upgrade(self) -> None:
        """Continue after a head with an upgrade offer: a new parser gets the same framing headers without the offer."""
        framing = [(name, value) for name, value in self.scope["headers"] if name in _FRAMING]
        if self.scope["method"] == "CONNECT":
            # The following bytes would be for another server: they are neither a body nor a request.
            framing = [(b"connection", b"close")]
            self.cycle.keep_alive = False
        version = self.parser.get_http_version().encode()
        lines = [b"POST / HTTP/%s" % version, *(b"%s: %s" % header for header in framing), b"", b""]
        target = _BodyParserTarget(self)
        self.parser = httptools.HttpRequestParser(target)
        with contextlib.suppress(AttributeError):  # missing before httptools 0.6.3; uvicorn sets the same
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join(lines))
        target.in_head = False

    def on_message_begin(self) -> None:
        self._parser_state = _ParserState.HEAD
        self._head_new = True  # its first packet may hold other data, so that does not count toward HEAD_BYTES
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        authority = _AUTHORITY.match(self.url)
        if authority is not None:
            self._add_host(authority[1])
        super().on_headers_complete()
        self.headers = []  # receives the trailers, which are not used: they must not override the headers
        self._parser_state = _ParserState.BODY
        self._framing = 0
        if not self.parser.should_keep_alive():  # uvicorn before 0.54 overlooks a `close` beside other options
            self.cycle.keep_alive = False
        exchange = _Exchange(self.cycle, self.transport, self.loop, self.server_state)
        self.cycle.transport = exchange  # type: ignore[assignment]
        self.scope["extensions"] = {EXTENSION: exchange}  # type: ignore[dict-item]  # not a type that uvicorn declares
        self._open.append(exchange)

    def _add_host(self, host: bytes) -> None:
        """Add the host that the target names, if it is another one: header checks then see both, and reject two.

        HTTP/1.1 requires the header itself (RFC 9112, section 3.2).
        """
        hosts = [value.lower() for name, value in self.headers if name == b"host"]
        if (hosts or self.parser.get_http_version() == "1.0") and host.lower() not in hosts:
            self.headers.append((b"host", host))

    def on_body(self, body: bytes) -> None:
        self._framing = max(0, self._framing - (1 + FRAMING_PER_BYTE) * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # this parser stops at the upgrade; `_parse` continues with another one
        self._parser_state = _ParserState.BETWEEN
        super().on_message_complete()
        if self.flow.read_paused and not self.pipeline:
            # The body is complete. Unless its client's connection is read, its end goes unnoticed until the answer.
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Start the next pipelined request, or wait for one. Replaces uvicorn's, which starts a timer each time."""
        if self._open:
            self._open.popleft()  # responses come in the order of their requests
        self._watch_writes()
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        if self._refusal is not None:
            self._send_refusal()
        elif not self._open:
            if self._parser_state is _ParserState.HEAD:
                self._start_head_timer()
            else:
                self._start_keep_alive()

    def drain(self, idle_s: float) -> None:
        """Limit the time for the next request to `idle_s` seconds."""
        # At least LINGER_S after a response that was sent without `connection: close`.
        self.timeout_keep_alive = max(idle_s, LINGER_S)  # type: ignore[assignment]  # only used as a timer's delay
        self._head_s = min(self._head_s, self.timeout_keep_alive)
        self._unset_keepalive_if_required()  # it runs for longer
        if not self._open and not self.transport.is_closing():
            self._cancel_head_timer()
            if self._parser_state is _ParserState.HEAD:
                self._start_head_timer()
            else:
                self._start_keep_alive(idle_s)

    def idle_s(self) -> float:
        """Seconds since the last response; 0 while another one is due, and before the first request."""
        return self.timeout_keep_alive - (self._idle_until - self.loop.time()) if self._is_kept_alive() else 0.0

    def _is_kept_alive(self) -> bool:
        """Whether the connection waits for the first byte of another request."""
        return self.cycle is not None and not self._open and self._head_timer is None

    def _start_keep_alive(self, seconds: float | None = None) -> None:
        self._idle_until = self.loop.time() + (self.timeout_keep_alive if seconds is None else seconds)
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_at(self._idle_until, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if not self._is_kept_alive():
            return  # the end of the response, or of the body behind it, starts the timer again
        if self._idle_until > self.loop.time():
            self.timeout_keep_alive_task = self.loop.call_at(self._idle_until, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writes += 1

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_s, self._on_head_timeout)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._parser_state is _ParserState.HEAD:
            self._refuse(b"408 Request Timeout", "The request's headers did not come in time.")
        else:
            # Without a request there is nothing to answer: browsers open connections in advance.
            self.transport.close()

    def _refuse(self, status: bytes, message: str) -> None:
        """Stop reading, and send an error once all earlier requests are answered: clients match responses by order."""
        self.logger.warning("refused a request of %s: %s", self.client[0] if self.client else "a client", message)
        self._cancel_head_timer()
        body = self._render_error(Malformed(message))
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self._refusal = head % (status, len(body)) + body
        if self._parser_state is _ParserState.BODY:
            self._drop_request(self.cycle)
        self._send_refusal()

    def _drop_request(self, cycle: RequestResponseCycle) -> None:
        """Drop the request being read, which will stay incomplete. The refusal is its response, unless one started."""
        if self._open and self._open[-1].cycle is cycle:
            self._open.pop().mark_disconnected()
        self.pipeline = deque(each for each in self.pipeline if each[0] is not cycle)
        if cycle.response_started:
            self._refusal = b""

    def _send_refusal(self) -> None:
        if self.transport.is_closing() or self._open:
            return
        self.flow.resume_reading()
        if self._refusal:
            self.transport.write(self._refusal)
            # Closing at once would reset the connection, and a client that is still sending would not see the error.
            self.transport.write_eof()
            self._head_timer = self.loop.call_later(REFUSAL_LINGER_S, self.transport.close)
            self._refusal = b""
        else:
            self.transport.close()
        self._watch_writes()

    def _watch_writes(self) -> None:
        self._writes += 1
        if self._write_timer is None and self.transport.get_write_buffer_size():
            self._schedule_write_check(self._unsent_bytes(), 0)

    def _schedule_write_check(self, size: int, idle: int) -> None:
        self._write_timer = self.loop.call_later(WRITE_CHECK_S, self._check_writes, self._writes, size, idle)

    def _check_writes(self, writes: int, size: int, idle: int) -> None:
        """Abort the connection after MAX_STALLED_CHECKS checks without progress.

        Progress is a smaller unsent amount than at the last check, or any write since then.
        """
        self._write_timer = None
        if not self.transport.get_write_buffer_size():
            return
        left = self._unsent_bytes()
        idle = idle + 1 if writes == self._writes and left >= size else 0
        if idle < MAX_STALLED_CHECKS:
            self._schedule_write_check(left, idle)
        else:
            self.transport.abort()

    def _unsent_bytes(self) -> int:
        """Bytes that the client has not received, in the transport and in the kernel.

        The kernel buffers megabytes, which keep a slow reader busy for minutes before the transport has room again.
        """
        kept = bytearray(4)
        with contextlib.suppress(OSError, AttributeError):  # closed, or a system or transport without this count
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, kept)
        return self.transport.get_write_buffer_size() + int.from_bytes(kept, sys.byteorder)


def _describe_parse_error(error: httptools.HttpParserError) -> str:
    if isinstance(error, httptools.HttpParserCallbackError):
        return "malformed request target"  # URL parsing is the only callback that can fail
    return str(error) or "it cannot be parsed"


class _Flow(FlowControl):
    """Resumes paused reads in turn; uvicorn pauses reading while more than 64 kB of a body wait for the application."""

    def __init__(self, transport: asyncio.Transport, state: State, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(transport)
        self._state = state
        self._loop = loop
        self._queued = False

    def resume_reading(self) -> None:
        if self.read_paused and not self._queued:
            self._queued = True
            self._state.resume_in_turn(self, self._loop)

    def resume_now(self) -> None:
        self._queued = False
        if not self._transport.is_closing():
            super().resume_reading()


class _Exchange:
    """One request and its response: the transport of its cycle, and the application's shoal.http.exchange.Exchange.

    The head, which is the first piece that the cycle writes, is held until the second piece or the next turn of the
    loop.
    """

    __slots__ = ("_first_part", "_has_started", "_loop", "_state", "_transport", "cycle", "on_disconnect")

    def __init__(
        self,
        cycle: RequestResponseCycle,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        state: State,
    ) -> None:
        self.cycle: RequestResponseCycle | None = cycle
        self._transport = transport
        self._loop = loop
        self._state = state
        self._has_started = False
        self._first_part = b""
        self.on_disconnect: Callable[[], None] | None = None

    def release(self) -> None:
        """Drop the reference to the cycle, which references this object, once the application has finished."""
        self.on_disconnect = None
        if self.cycle is not None and self.cycle.response_complete:
            self.cycle = None

    def mark_disconnected(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.on_disconnect is not None:
                self.on_disconnect()

    def take_body(self, limit: int) -> bytes | None:
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.disconnected or len(cycle.body) > limit:
            return None
        if cycle.flow.read_paused:
            cycle.flow.resume_reading()
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    def send_whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bool:
        cycle = self.cycle
        if (
            cycle is None
            or cycle.response_started
            or cycle.disconnected
            or not cycle.keep_alive
            or cycle.flow.write_paused
            or self._state.draining
            or status in _BODILESS
            or _CLOSE in headers
            or cycle.scope["method"] == "HEAD"
        ):
            return False
        headers = [*cycle.default_headers, *headers]
        head = b"\r\n".join(map(_join_header, headers))
        if len(head.translate(None, _HEADER_BYTES)) != 2 * (len(headers) - 1):
            return False  # a control character beside the line ends, which uvicorn rejects
        cycle.response_started = cycle.response_complete = True
        self._transport.write(b"%b%b\r\ncontent-length: %d\r\n\r\n%b" % (STATUS_LINE[status], head, len(body), body))
        cycle.message_event.set()
        cycle.on_response()
        return True

    def can_send_piece(self) -> bool:
        cycle = self.cycle
        return bool(
            cycle is not None
            and cycle.response_started
            and not cycle.response_complete
            and cycle.chunked_encoding  # not for HEAD
            and not cycle.flow.write_paused
            and not cycle.disconnected
        )

    def send_piece(self, piece: bytes) -> None:
        self.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def write(self, data: bytes) -> None:
        if not self._has_started:
            self._has_started, self._first_part = True, data
            self._loop.call_soon(self._flush)
        elif self._first_part:
            held, self._first_part = self._first_part, b""
            self._transport.write(held + data)
        else:
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._first_part and not self._transport.is_closing():
            held, self._first_part = self._first_part, b""
            self._transport.write(held)


class _BodyParserTarget:
    """Callbacks of the second parser: forwards to the connection, except for the head, which it has already handled."""

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
