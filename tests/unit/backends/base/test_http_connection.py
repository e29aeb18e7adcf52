"""Responses as servers really send them, and connections that end or misbehave."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.base import http_connection
from shoal.backends.base.http_answer import Answer
from shoal.backends.base.http_client import Client
from shoal.backends.base.http_connection import BodyCut, Connection, InvalidResponse
from shoal.errors import TransportFailed
from tests.fakes.certificates import CA, SERVER_CERT, SERVER_KEY

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Answers each request of a connection with the next of `responses`, then closes it if `closes`."""

    def __init__(self, *responses: bytes, closes: bool = False) -> None:
        self.responses = list(responses)
        self.closes = closes
        self.connections = 0
        self.requests: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.responses:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(self.responses.pop(0))
                await writer.drain()
                if self.closes:
                    return
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(server: Server, context: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
    async with await asyncio.start_server(server, "127.0.0.1", 0, ssl=context) as listener:
        scheme = "http" if context is None else "https"
        client = Client(f"{scheme}://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        try:
            yield client
        finally:
            await client.aclose()


async def get(client: Client, path: str = "/") -> Answer:
    return await client.get(path, time.monotonic() + 30)


@pytest.mark.parametrize(
    ("response", "body"),
    [
        (OK, b"ok"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1;x=y\r\nk\r\n0\r\n\r\n", b"ok"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2 \r\nok\r\n0\r\nx-late: 1\r\n\r\n", b"ok"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.1 200 OK\ncontent-length: 2\n\nok", b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nupgrade: h2\r\nconnection: upgrade\r\ncontent-length: 2\r\n\r\nok", b"ok"),
    ],
)
async def test_bodies_with_an_end(response: bytes, body: bytes) -> None:
    """The connection is used again after each."""
    async with serving(server := Server(response, OK)) as client:
        assert (await get(client)).body == body
        assert (await get(client)).body == b"ok"
        assert server.connections == 1


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok",
    ],
)
async def test_bodies_that_end_with_their_connection(response: bytes) -> None:
    async with serving(server := Server(response, OK, closes=True)) as client:
        assert (await get(client)).body == b"ok"
        assert (await get(client)).body == b"ok"
        assert server.connections == 2


@pytest.mark.parametrize("beyond", [b"more", OK])
async def test_data_behind_a_response(beyond: bytes) -> None:
    """It belongs to no request, so the next one takes another connection."""
    async with serving(server := Server(OK + beyond, OK)) as client:
        first = await get(client)
        assert (first.status, first.body, first.content_type) == (200, b"ok", "")
        assert (await get(client)).body == b"ok"
        assert server.connections == 2


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: two\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nok",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x-long: %b\r\n" % (b"x" * 9000) * 8 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nx-endless: " + b"x" * 2**17,
        b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" * 2000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;" + b"x" * 2**17,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nx-endless: " + b"x" * 2**17,
    ],
)
async def test_invalid_responses(response: bytes) -> None:
    async with serving(Server(response)) as client:
        with pytest.raises(TransportFailed, match="is not valid HTTP"):
            await get(client)


async def test_repeated_headers_are_joined() -> None:
    async with serving(Server(b"HTTP/1.1 200 OK\r\nX-One: a\r\nx-one: b\r\ncontent-length: 0\r\n\r\n")) as client:
        assert (await get(client)).headers["x-one"] == "a, b"


async def test_paths() -> None:
    """A path is below the base, or a whole URL; what a request line cannot hold is escaped."""
    server = Server(OK, OK, OK)
    async with serving(server) as client:
        client.base += "/v1"
        await get(client, "/models")
        await get(client, f"{client.base.removesuffix('/v1')}/health?full=1")
        await get(client, "/models/a b\r\nx: é")
    lines = [request.partition(b"\r\n")[0] for request in server.requests]
    assert lines == [
        b"GET /v1/models HTTP/1.1",
        b"GET /health?full=1 HTTP/1.1",
        b"GET /v1/models/a%20bx:%20%C3%A9 HTTP/1.1",
    ]


async def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate of the system's authorities is accepted, others are rejected before anything is sent."""
    for name, data in (("ca.pem", CA), ("cert.pem", SERVER_CERT), ("key.pem", SERVER_KEY)):
        (tmp_path / name).write_bytes(data)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    async with serving(server := Server(OK), context) as client:
        with pytest.raises(TransportFailed, match="check its certificate"):
            await get(client)
        assert not server.requests
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    async with serving(Server(OK), context) as client:
        assert (await get(client)).body == b"ok"


async def test_a_reader_that_is_slower_than_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading from the server pauses, and nothing is lost."""
    monkeypatch.setattr(http_connection, "READ_BYTES", 1000)
    body = bytes(range(256)) * 2**14
    async with serving(Server(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))) as client:
        with await client.open_response("GET", "/", deadline=time.monotonic() + 30) as response:
            first = await response.read_piece()
            for _ in range(20):
                await asyncio.sleep(0)
            assert response._connection._is_paused
            assert first + (await response.read_all(len(body))).body == body


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.backends.base.http_client.KEEP_ALIVE_S", 0.0)
    async with serving(server := Server(OK, OK)) as client:
        await get(client)
        async with asyncio.timeout(30):
            while client._idle:  # noqa: ASYNC110 - a timer of the client empties it
                await asyncio.sleep(0)
        await get(client)
        assert server.connections == 2


class Transport(asyncio.Transport):
    """Accepts everything that is written."""

    def write(self, data: object) -> None: ...

    def abort(self) -> None: ...

    def is_closing(self) -> bool:
        return False


def parse(data: bytes, cuts: list[int]) -> tuple[int, dict[str, str], bytes, bool]:
    """Feed `data` to a connection in pieces; return the status, the headers, the body, and whether it can be reused."""

    async def run() -> tuple[int, dict[str, str], bytes, bool]:
        connection = Connection()
        connection.connection_made(Transport())
        connection.send(b"", b"")
        edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
        for start, stop in pairwise(edges):
            if start < stop:
                connection.data_received(data[start:stop])
        await connection.read_head()
        body = b""
        while piece := await connection.read():
            body += piece
        return connection.status, connection.headers, body, connection.is_reusable

    return asyncio.run(run())


@given(st.binary(max_size=60), st.lists(st.integers(0, 200), max_size=8), st.booleans())
def test_any_split_of_a_response(body: bytes, cuts: list[int], chunked: bool) -> None:
    """However the network cuts it, the response is the same."""
    if chunked:
        pieces = [body[at : at + 7] for at in range(0, len(body), 7)]
        written = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*pieces, b""])
        framing = b"Transfer-Encoding: chunked"
    else:
        written, framing = body, b"Content-Length: %d" % len(body)
    data = b"HTTP/1.1 200 OK\r\n%b\r\nx: y\r\n\r\n%b" % (framing, written)
    status, headers, found, reusable = parse(data, cuts)
    assert (status, headers["x"], found, reusable) == (200, "y", body, True)


@pytest.mark.parametrize(
    ("end", "error"),
    [(lambda one: one.connection_lost(None), BodyCut), (lambda one: one.data_received(b"zz\r\n"), InvalidResponse)],
)
async def test_data_before_a_failure_is_read(end: Callable[[Connection], None], error: type[OSError]) -> None:
    """What arrived is read first, then the failure is raised, each time."""
    connection = Connection()
    connection.connection_made(Transport())
    connection.send(b"", b"")
    connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n")
    end(connection)
    await connection.read_head()
    assert await connection.read() == b"ok"
    for _ in range(2):
        with pytest.raises(error):
            await connection.read()
