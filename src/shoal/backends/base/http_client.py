"""A connection pool to one server that speaks HTTP and JSON.

Requests carry only what this module writes: no client headers, no cookies, no environment proxy, no redirects. Every
call takes an absolute `deadline` in seconds of `time.monotonic()`. Canceling a call at any stage closes its connection,
so that the server can stop its work.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Mapping
from functools import lru_cache
from types import TracebackType
from typing import Self
from urllib.parse import quote, urlsplit

from shoal.backends.base.http_answer import Answer, RequestNotSent, transport_error
from shoal.backends.base.http_connection import Connection, ConnectTimedOut, Disconnected, encode_head
from shoal.core.recording import outgoing_trace
from shoal.errors import ConfigError, DeadlineExceeded, UpstreamFailed

MAX_ANSWER_BYTES = 64 * 2**20
MAX_ERROR_BYTES = 64 * 2**10
"""Maximum size of a response with any status but 200. It holds an error message, never a result."""

MAX_CARD_BYTES = 4 * 2**20
"""Maximum size of a server's description of itself and its models."""

NUMBER_BYTES = 32
"""Maximum size of one JSON number and its separators. A double has 24 characters."""

SPARE_BYTES = 16 * 2**10
"""Size of a response beyond its numbers."""

KEEP_ALIVE_S = 4.0
"""Idle timeout of connections. uvicorn, like most of these servers, closes idle connections after 5 s, and no request
may race with that."""

STALE_S = 1.0
"""Seconds from sending a request within which a disconnect means that the server had already closed the idle
connection. If the connection ends later, the server had seen the request, which may be the cause."""

END_S = 1.0
"""Seconds in total to wait for the end of a body whose contents are complete. The connection can then be reused."""

MAX_PATHS = 64
"""Paths whose request heads are kept."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_KEY = re.compile(r"[\x21-\x7e]+")


def bytes_for_numbers(numbers: int) -> int:
    """Return the size of the largest response that holds so many numbers in JSON."""
    return SPARE_BYTES + NUMBER_BYTES * numbers


class Response:
    """A response whose status and headers have arrived. `read_piece` streams the body. `key`: the key that it must not
    reveal. Leaving its `with` block closes the connection, unless `finish` was called or the body has ended."""

    def __init__(self, connection: Connection, client: Client, timer: asyncio.TimerHandle, key: bytes = b"") -> None:
        self.key = key
        self.is_finished = False
        self.status = connection.status
        self.headers: Mapping[str, str] = connection.headers
        self._connection = connection
        self._client = client
        self._timer = timer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._timer.cancel()
        self._client.release(self._connection, is_finished=self.is_finished)

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "")

    async def read_piece(self) -> bytes:
        """Return data as soon as it arrives, b"" at the end of the body. Raises TransportFailed, DeadlineExceeded."""
        try:
            return await self._connection.read()
        except OSError as error:
            raise transport_error(error, self._client.base) from error

    async def read_all(self, max_bytes: int) -> Answer:
        """Return the response with at most `max_bytes` bytes of its body. Raises as `read_piece` does."""
        pieces: list[bytes] = []
        size = 0
        while size <= max_bytes and not self._connection.is_at_end:
            pieces.append(await self.read_piece())
            size += len(pieces[-1])
        return Answer(
            self.status, self.headers, b"".join(pieces)[:max_bytes], is_complete=size <= max_bytes, key=self.key
        )

    def finish(self) -> None:
        """Mark the body as complete. Its end is then read in the background, without delaying the caller."""
        self.is_finished = True


class Client:
    """Calls the server at `base` (http://host:port/path). A `path` is relative to `base`, or a whole URL of that
    server.

    It connects on the first call. After `aclose` every call raises TransportFailed. Must be created on the event loop.
    Raises ConfigError for a key that no header can carry.
    """

    def __init__(self, base: str, *, key: str | None = None, connect_timeout_s: float = 5.0) -> None:
        self.base = base.rstrip("/")
        url = urlsplit(self.base)
        self._host, self._port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
        self._context = ssl.create_default_context() if url.scheme == "https" else None
        self._connect_timeout_s = connect_timeout_s
        self._closed = False
        self._key = (key or "").encode()
        self._headers = {
            "host": url.netloc,
            "accept": "*/*",
            "accept-encoding": "identity",
            "user-agent": "shoal",
            "content-type": "application/json",
        }
        if key:
            if not _KEY.fullmatch(key):
                raise ConfigError("upstream_api_key is not valid in a header: use ASCII characters without spaces")
            self._headers["authorization"] = f"Bearer {key}"
        self._encode_head = lru_cache(MAX_PATHS)(self._build_head)
        self._open: set[Connection] = set()
        self._idle: list[Connection] = []
        self._idle_timer: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def get(self, path: str, deadline: float) -> Answer:
        """Send a GET request. Raises TransportFailed, DeadlineExceeded, and UpstreamFailed for an unreadable response
        or one of status 200 over MAX_CARD_BYTES. Of other statuses only MAX_ERROR_BYTES are read."""
        return await self._exchange("GET", path, b"", deadline, MAX_CARD_BYTES)

    async def post(self, path: str, body: bytes, deadline: float, *, max_bytes: int | None = None) -> Answer:
        """Send a POST request, as `get` does. `max_bytes`: the largest response that the request can cause, from
        `bytes_for_numbers`; the default is MAX_ANSWER_BYTES."""
        max_bytes = MAX_ANSWER_BYTES if max_bytes is None else min(max_bytes, MAX_ANSWER_BYTES)
        return await self._exchange("POST", path, body, deadline, max_bytes)

    async def _exchange(self, method: str, path: str, body: bytes, deadline: float, max_bytes: int) -> Answer:
        with await self.open_response(method, path, body=body, deadline=deadline) as made:
            answer = await made.read_all(max_bytes if made.status == 200 else MAX_ERROR_BYTES)
        if made.status == 200 and not answer.is_complete:
            raise UpstreamFailed(
                f"{self.base} returned more than {max_bytes} bytes, the limit for this request: request less at once"
            )
        return answer

    async def open_response(
        self, method: str, path: str, *, body: bytes = b"", deadline: float, request_id: str = ""
    ) -> Response:
        """Return a response once its headers are there. The caller must use it in a `with` block, whose body also fails
        at the deadline. Raises as `get` does."""
        head = self._encode_head(method, path)
        if request_id and _REQUEST_ID.fullmatch(request_id):
            head += f"x-request-id: {request_id}\r\n".encode()
        for name, value in outgoing_trace():
            head += f"{name}: {value}\r\n".encode()
        head += b"content-length: %d\r\n\r\n" % len(body) if body or method == "POST" else b"\r\n"
        while True:
            connection = await self._connect(deadline)
            began = time.monotonic()
            timer = asyncio.get_running_loop().call_later(max(0.0, deadline - began), self._expire, connection)
            self._open.add(connection)
            try:
                connection.send(head, body)
                await connection.read_head()
                return self._wrap_response(connection, timer)
            except BaseException as failure:  # a cancellation, too, must close the connection
                timer.cancel()
                self._close_connection(connection)
                if not isinstance(failure, OSError):
                    raise
                if not _is_stale(connection, failure, began) or self._closed:
                    raise transport_error(failure, self.base) from failure
                # The server closed an idle connection while the request was on its way and answered nothing, so retry.
                # This happens at most once per idle connection: a new one is never stale.

    def _expire(self, connection: Connection) -> None:
        connection.fail(_deadline_error(self.base))

    async def _connect(self, deadline: float) -> Connection:
        """Return an idle connection, or a new one."""
        self._check_open()
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"the request's deadline passed before it was sent to {self.base}")
        oldest = asyncio.get_running_loop().time() - KEEP_ALIVE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and connection.idle_since > oldest:
                return connection
            connection.close()
        try:
            connection = await Connection.open(
                self._host, self._port, self._context, min(left, self._connect_timeout_s)
            )
        except OSError as error:
            if isinstance(error, ConnectTimedOut) and left <= self._connect_timeout_s:
                raise _deadline_error(self.base) from None
            raise transport_error(error, self.base) from error
        try:
            self._check_open()
        except RequestNotSent:
            connection.close()
            raise
        return connection

    def _check_open(self) -> None:
        if self._closed:
            raise RequestNotSent(f"the connection to {self.base} is closed: send the request again")

    def release(self, connection: Connection, *, is_finished: bool) -> None:
        """Keep the connection of a response for another request, if it has ended, else close it. If it `is_finished`,
        the end of its body has END_S to arrive."""
        if connection.is_at_end or self._closed or not is_finished:
            self._keep_or_close(connection)
            return
        task = asyncio.create_task(_read_end(connection), name=f"drain answer of {self.base}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        task.add_done_callback(lambda _: self._keep_or_close(connection))

    def _keep_or_close(self, connection: Connection) -> None:
        if self._closed or not (connection.is_at_end and connection.is_reusable):
            self._close_connection(connection)
            return
        self._open.discard(connection)
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._idle_timer is None:
            self._idle_timer = loop.call_later(KEEP_ALIVE_S, self._close_idle)

    def _close_idle(self) -> None:
        """Close the connections that nothing used for KEEP_ALIVE_S. The most recent ones are used first."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - KEEP_ALIVE_S
        for connection in self._idle:
            if connection.idle_since <= oldest:
                connection.close()
        self._idle = [connection for connection in self._idle if connection.is_reusable]
        again = min([connection.idle_since for connection in self._idle], default=None)
        self._idle_timer = None if again is None else loop.call_later(again - oldest, self._close_idle)

    def _wrap_response(self, connection: Connection, timer: asyncio.TimerHandle) -> Response:
        encoding = connection.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise UpstreamFailed(f"{self.base} compresses its answers ({encoding}): disable compression there")
        return Response(connection, self, timer, self._key)

    def _close_connection(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.close()

    def _build_head(self, method: str, path: str) -> bytes:
        url = urlsplit(self.base + path if path.startswith("/") else path)
        target = quote(url.path or "/", safe="/%:@!$&'()*+,;=~-._") + (f"?{url.query}" if url.query else "")
        return encode_head(method, target, self._headers)

    async def aclose(self) -> None:
        self._closed = True
        for task in self._ending:
            task.cancel()
        closed = Disconnected("closed")
        for connection in list(self._open):  # their readers would otherwise wait for the deadline
            connection.fail(closed)
        self._open.clear()
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)


def _is_stale(connection: Connection, failure: OSError, began: float) -> bool:
    """Whether the server had closed the idle connection before it read the request."""
    is_closed = isinstance(failure, Disconnected | ConnectionError | BrokenPipeError)
    return is_closed and not connection.is_new and time.monotonic() - began < STALE_S


def _deadline_error(where: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"{where} did not answer within the request's deadline")


async def _read_end(connection: Connection) -> None:
    """Read and discard the rest of a body, so that its connection can be reused."""
    try:
        async with asyncio.timeout(END_S):
            while await connection.read():
                pass
    except (TimeoutError, OSError):  # the response is complete; only the connection is lost
        pass
