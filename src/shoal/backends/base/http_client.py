"""A connection pool to one server that speaks HTTP and JSON.

Requests carry only what this module writes: no client headers, no cookies, no environment proxy, no redirects. Every
call takes an absolute `deadline` in seconds of `time.monotonic()`. Canceling a call at any stage closes its connection,
so that the server can stop its work.
"""

from __future__ import annotations

import asyncio
import io
import re
import socket
import time
from collections.abc import Coroutine
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
from multidict import CIMultiDictProxy

from shoal.backends.base.http_answer import Answer, RequestNotSent, transport_error
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

READ_BYTES = 64 * 2**10
"""Bytes to buffer for a slow reader before reading from the server pauses."""

PIECE_BYTES = 2**18
"""Maximum body size that is sent in one write. A longer body is sent in pieces of this size, so that a slow server does
not receive all of a canceled request."""

STALE_S = 1.0
"""Seconds from sending a request within which a disconnect means that the server had already closed the idle
connection. If the connection ends later, the server had seen the request, which may be the cause."""

END_S = 1.0
"""Seconds in total to wait for the end of a body whose contents are complete. The connection can then be reused."""

T = TypeVar("T")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_KEY = re.compile(r"[\x21-\x7e]+")


def bytes_for_numbers(numbers: int) -> int:
    """Return the size of the largest response that holds so many numbers in JSON."""
    return SPARE_BYTES + NUMBER_BYTES * numbers


class Response:
    """A response whose status and headers have arrived. `read_piece` streams the body. `key`: the key that it must not
    reveal. Leaving its `with` block closes the connection, unless `finish` was called or the body has ended."""

    def __init__(self, response: aiohttp.ClientResponse, client: Client, deadline: float, key: bytes = b"") -> None:
        self.key = key
        self.is_finished = False
        self.status = response.status
        self.headers: CIMultiDictProxy[str] = response.headers
        self._response = response
        self._client = client
        self._deadline = deadline
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._client.release(self._response, is_finished=self.is_finished)

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "")

    async def read_piece(self) -> bytes:
        """Return data as soon as it arrives, b"" at the end of the body. Raises TransportFailed and DeadlineExceeded.

        One timer fails the body at the deadline: a timeout around each piece costs as much as reading it.
        """
        if self._timer is None and not self._response.content.is_eof():
            left = max(0.0, self._deadline - time.monotonic())
            error = _deadline_error(self._client.base)
            self._timer = asyncio.get_running_loop().call_later(left, self._response.content.set_exception, error)
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise transport_error(error, self._client.base) from error

    async def read_all(self, max_bytes: int) -> Answer:
        """Return the response with at most `max_bytes` bytes of its body. Raises as `read_piece` does."""
        body = bytearray()
        content = self._response.content
        while len(body) <= max_bytes and not content.at_eof():
            body += await self.read_piece()
        return Answer(
            self.status, self.headers, bytes(body[:max_bytes]), is_complete=len(body) <= max_bytes, key=self.key
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
        self._closed = False
        self._key = (key or "").encode()
        self._open: set[aiohttp.ClientResponse] = set()
        self._ending: set[asyncio.Task[None]] = set()
        headers = {"accept-encoding": "identity", "user-agent": "shoal", "content-type": "application/json"}
        if key:
            if not _KEY.fullmatch(key):
                raise ConfigError("upstream_api_key is not valid in a header: use ASCII characters without spaces")
            headers["authorization"] = f"Bearer {key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, socket_factory=_new_socket),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=connect_timeout_s),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=READ_BYTES,
        )

    async def get(self, path: str, deadline: float) -> Answer:
        """Send a GET request. Raises TransportFailed, DeadlineExceeded, and UpstreamFailed for an unreadable response
        or one of status 200 over MAX_CARD_BYTES. Of other statuses only MAX_ERROR_BYTES are read."""
        return await _with_deadline(self._exchange("GET", path, b"", deadline, MAX_CARD_BYTES), deadline, self.base)

    async def post(self, path: str, body: bytes, deadline: float, *, max_bytes: int | None = None) -> Answer:
        """Send a POST request, as `get` does. `max_bytes`: the largest response that the request can cause, from
        `bytes_for_numbers`; the default is MAX_ANSWER_BYTES."""
        max_bytes = MAX_ANSWER_BYTES if max_bytes is None else min(max_bytes, MAX_ANSWER_BYTES)
        return await _with_deadline(self._exchange("POST", path, body, deadline, max_bytes), deadline, self.base)

    async def _exchange(self, method: str, path: str, body: bytes, deadline: float, max_bytes: int) -> Answer:
        with self._wrap_response(await self._request(method, path, body, deadline, ""), deadline) as made:
            answer = await made.read_all(max_bytes if made.status == 200 else MAX_ERROR_BYTES)
        if made.status == 200 and not answer.is_complete:
            raise UpstreamFailed(
                f"{self.base} returned more than {max_bytes} bytes, the limit for this request: request less at once"
            )
        return answer

    async def open_response(
        self, method: str, path: str, *, body: bytes = b"", deadline: float, request_id: str = ""
    ) -> Response:
        """Return a response once its headers are there. The caller must use it in a `with` block."""
        sending = self._request(method, path, body, deadline, request_id)
        return self._wrap_response(await _with_deadline(sending, deadline, self.base), deadline)

    def release(self, response: aiohttp.ClientResponse, *, is_finished: bool) -> None:
        """Close a response. If it `is_finished`, the end of its body has END_S to arrive, so that the connection can be
        reused."""
        if is_finished and not self._closed and not response.content.is_eof():
            self._open.discard(response)
            task = asyncio.create_task(_drain_response(response), name=f"drain answer of {self.base}")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            task.add_done_callback(lambda _: response.close())
        else:
            self._close_response(response)

    def _wrap_response(self, response: aiohttp.ClientResponse, deadline: float) -> Response:
        encoding = response.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            response.close()
            raise UpstreamFailed(f"{self.base} compresses its answers ({encoding}): disable compression there")
        self._open.add(response)
        return Response(response, self, deadline, self._key)

    def _close_response(self, response: aiohttp.ClientResponse) -> None:
        """Close the response's connection. A response that was read to its end has returned it already: closing it
        again would make aiohttp record an error that is never retrieved."""
        self._open.discard(response)
        if not response.closed:
            response.close()

    async def aclose(self) -> None:
        self._closed = True
        for task in self._ending:
            task.cancel()
        for response in list(self._open):  # closing the session alone would leave readers waiting for the deadline
            self._close_response(response)
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._session.close()

    async def _request(
        self, method: str, path: str, body: bytes, deadline: float, request_id: str
    ) -> aiohttp.ClientResponse:
        while True:
            if self._closed:
                raise RequestNotSent(f"the connection to {self.base} is closed: send the request again")
            began = time.monotonic()
            if deadline <= began:
                raise DeadlineExceeded(f"the request's deadline passed before it was sent to {self.base}")
            use = _ConnectionUse()
            _use.set(use)
            try:
                return await self._session.request(
                    method,
                    self.base + path if path.startswith("/") else path,
                    data=None if not body else body if len(body) <= PIECE_BYTES else io.BytesIO(body),
                    headers={"x-request-id": request_id} if _REQUEST_ID.fullmatch(request_id) else None,
                    allow_redirects=False,
                )
            except aiohttp.ClientConnectorError as error:  # there is no connection
                raise transport_error(error, self.base) from error
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if use.new or self._closed or time.monotonic() - began >= STALE_S:
                    raise transport_error(error, self.base) from error
                # The server closed an idle connection while the request was on its way and answered nothing, so retry.
                # This happens at most once per idle connection: a new one is never stale.
            except (aiohttp.ClientError, OSError) as error:
                raise transport_error(error, self.base) from error


async def _with_deadline(work: Coroutine[Any, Any, T], deadline: float, where: str) -> T:
    """Await `work`. Raises DeadlineExceeded at the deadline, and TransportFailed for aiohttp's errors."""
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await work
    except TimeoutError:
        raise _deadline_error(where) from None
    except (aiohttp.ClientError, OSError) as error:
        raise transport_error(error, where) from error


def _deadline_error(where: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"{where} did not answer within the request's deadline")


async def _drain_response(response: aiohttp.ClientResponse) -> None:
    """Read and discard the rest of a body, so that its connection can be reused."""
    try:
        async with asyncio.timeout(END_S):
            while await response.content.readany():
                pass
    except (TimeoutError, aiohttp.ClientError, OSError):  # the response is complete; only the connection is lost
        pass


class _ConnectionUse:
    """Whether a request uses a `new` connection. aiohttp's tracing would show this too, but costs thirty more
    Python calls per request."""

    new = False


_use: ContextVar[_ConnectionUse] = ContextVar("the use of a connection")


def _new_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    _use.get().new = True
    return socket.socket(*address[:3])
