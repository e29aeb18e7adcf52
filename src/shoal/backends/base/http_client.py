"""One connection pool to a server that speaks HTTP and JSON.

What goes out is what is written here: no headers of clients, no cookies, no proxy of the environment, no redirects.
Every call takes an absolute `deadline` in seconds of `time.monotonic()`. A call that is given up, in whatever phase,
closes its connection, from which the server sees that nobody reads any more.
"""

from __future__ import annotations

import asyncio
import io
import re
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import aiohttp
from multidict import CIMultiDictProxy

from shoal.backends.base.http_answer import Answer, RequestNotSent, transport_error
from shoal.errors import ConfigError, DeadlineExceeded, UpstreamFailed

MAX_ANSWER_BYTES = 64 * 2**20
MAX_ERROR_BYTES = 64 * 2**10
"""Of an answer of any status but 200: words, and nothing that is waited for."""

MAX_CARD_BYTES = 4 * 2**20
"""Of what a server says of itself and its models."""

NUMBER_BYTES = 32
"""Of a number in JSON at most, with what stands around it: a double has 24 characters."""

SPARE_BYTES = 16 * 2**10
"""Of an answer beside its numbers."""

KEEP_ALIVE_S = 4.0
"""For idle connections: uvicorn, and with it most of these servers, closes them after 5 s, and a request must not meet
that moment."""

READ_BYTES = 64 * 2**10
"""What is read ahead of a slow reader, before the server is held back."""

PIECE_BYTES = 2**18
"""Of a body that is handed over whole. A longer one goes out in pieces of this size, so that a call that is given up
does not reach a slow server whole."""

STALE_S = 1.0
"""From sending a request until the end of an idle connection that the server had closed before shows. One that ends
later was ended with the request known, which may have been its cause."""

END_S = 1.0
"""For the end of a body whose contents are over, in all: the connection can then be used again."""

T = TypeVar("T")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_KEY = re.compile(r"[\x21-\x7e]+")


def bytes_for_numbers(numbers: int) -> int:
    """The largest answer that holds so many numbers in JSON."""
    return SPARE_BYTES + NUMBER_BYTES * numbers


class Response:
    """An answer whose status and headers are there; `pieces` are its body as it comes. `key`: what it must not tell."""

    def __init__(self, response: aiohttp.ClientResponse, where: str, deadline: float, key: bytes = b"") -> None:
        self.key = key
        self.over = False
        self.status = response.status
        self.headers: CIMultiDictProxy[str] = response.headers
        self._response = response
        self._where = where
        self._deadline = deadline

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "")

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Whatever is there, as soon as something is, until the body ends. Raises TransportFailed and
        DeadlineExceeded."""
        while data := await _with_deadline(self._response.content.readany(), self._deadline, self._where):
            yield data

    async def read_all(self, most: int) -> Answer:
        """The answer with at most `most` bytes of its body."""
        return await _with_deadline(self.read(most), self._deadline, self._where)

    async def read(self, most: int) -> Answer:
        """The same, for a caller who watches the time and understands aiohttp's errors."""
        body = bytearray()
        content = self._response.content
        while len(body) <= most and not content.at_eof():
            body += await content.readany()
        return Answer(self.status, self.headers, bytes(body[:most]), whole=len(body) <= most, key=self.key)

    def finish(self) -> None:
        """What is wanted of the body is there. Its end is waited for beside the caller, who has nothing to wait for."""
        self.over = True


class Client:
    """The calls of the server at `base` (http://host:port/path). Nothing is connected before the first call. A `path`
    is below `base`, or a whole URL of that server.

    After `aclose` every call raises TransportFailed. Must be made on the loop. Raises ConfigError for a key that no
    header can carry.
    """

    def __init__(self, base: str, *, key: str | None = None, connect_timeout_s: float = 5.0) -> None:
        self.base = base.rstrip("/")
        self._closed = False
        self._key = (key or "").encode()
        self._ending: set[asyncio.Task[None]] = set()
        headers = {"accept-encoding": "identity", "user-agent": "shoal", "content-type": "application/json"}
        if key:
            if not _KEY.fullmatch(key):
                raise ConfigError("upstream_api_key holds what no header can carry: write ASCII without spaces")
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
        """Raises TransportFailed and DeadlineExceeded, UpstreamFailed for an answer that cannot be read, or one of
        status 200 over MAX_CARD_BYTES. Of any other only MAX_ERROR_BYTES are read."""
        return await _with_deadline(self._exchange("GET", path, b"", deadline, MAX_CARD_BYTES), deadline, self.base)

    async def post(self, path: str, body: bytes, deadline: float, *, most: int | None = None) -> Answer:
        """As `get`. `most`: the bytes that were asked for at most, as `bytes_for_numbers` says; MAX_ANSWER_BYTES
        without."""
        most = MAX_ANSWER_BYTES if most is None else min(most, MAX_ANSWER_BYTES)
        return await _with_deadline(self._exchange("POST", path, body, deadline, most), deadline, self.base)

    async def _exchange(self, method: str, path: str, body: bytes, deadline: float, most: int) -> Answer:
        response = await self._request(method, path, body, deadline, "")
        made = self._wrap_response(response, deadline)
        try:
            answer = await made.read(most if made.status == 200 else MAX_ERROR_BYTES)
        finally:
            _close_response(response)
        if made.status == 200 and not answer.whole:
            raise UpstreamFailed(
                f"{self.base} answered more than {most} bytes, which is more than was asked for, or than is read at"
                " once: ask for less at once"
            )
        return answer

    @asynccontextmanager
    async def open_response(
        self, method: str, path: str, *, body: bytes = b"", deadline: float, request_id: str = ""
    ) -> AsyncIterator[Response]:
        """The answer, once its headers are there. Left before its end, it closes the connection, unless it was said to
        be over: then its end has END_S to come."""
        sending = self._request(method, path, body, deadline, request_id)
        response = await _with_deadline(sending, deadline, self.base)
        made = self._wrap_response(response, deadline)
        try:
            yield made
        finally:
            if made.over and not self._closed and not response.content.is_eof():
                task = asyncio.create_task(_drain_response(response), name=f"the end of an answer of {self.base}")
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
                task.add_done_callback(lambda _: response.close())
            else:
                _close_response(response)

    def _wrap_response(self, response: aiohttp.ClientResponse, deadline: float) -> Response:
        encoding = response.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            response.close()
            raise UpstreamFailed(f"{self.base} answers in {encoding}, which it was asked not to do")
        return Response(response, self.base, deadline, self._key)

    async def aclose(self) -> None:
        self._closed = True
        for task in self._ending:
            task.cancel()
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
                # The server closed an idle connection while the request was on its way: nothing of it was answered.
                # At most once for each idle connection: a new one never is stale.
            except (aiohttp.ClientError, OSError) as error:
                raise transport_error(error, self.base) from error


async def _with_deadline(work: Coroutine[Any, Any, T], deadline: float, where: str) -> T:
    """Raises DeadlineExceeded at the deadline, and TransportFailed for aiohttp's errors."""
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await work
    except TimeoutError:
        raise DeadlineExceeded(f"{where} did not answer within the request's deadline") from None
    except (aiohttp.ClientError, OSError) as error:
        raise transport_error(error, where) from error


def _close_response(response: aiohttp.ClientResponse) -> None:
    """Close its connection. One that was read to its end has given it back already: aiohttp would make an error of it
    for a reader that nobody is."""
    if not response.closed:
        response.close()


async def _drain_response(response: aiohttp.ClientResponse) -> None:
    """Read what is left of a body that nobody wants, so that its connection is not closed without need."""
    try:
        async with asyncio.timeout(END_S):
            while await response.content.readany():
                pass
    except (TimeoutError, aiohttp.ClientError, OSError):  # the answer is complete; only the connection is of no use
        pass


class _ConnectionUse:
    """Whether the connection that a request goes over is `new`. aiohttp's tracing would tell as well, for thirty calls
    of Python more in each request."""

    new = False


_use: ContextVar[_ConnectionUse] = ContextVar("the use of a connection")


def _new_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    _use.get().new = True
    return socket.socket(*address[:3])
