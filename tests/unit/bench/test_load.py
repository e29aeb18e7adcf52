"""The load generator against a minimal server, and its clock against a scripted pool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shoal.bench.client import ConnectionLost, Pool, Reply, Target
from shoal.bench.load import run_burst, run_closed_loop, run_open_loop
from shoal.bench.texts import Bodies, Texts


class Server:
    """Answers every request with `head` and the last text's length; `drop` closes instead."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.connections = 0
        self.connected = asyncio.Event()
        self.head = b"HTTP/1.1 200 OK\r\nx-shoal-batch-size: 7\r\nx-shoal-queue-ms: 1.5\r\n"
        self.drop = False
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.connected.set()
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.seen.append(json.loads(await reader.readexactly(length))["input"])
                if self.drop:
                    break
                writer.write(self.head + b"content-length: 2\r\n\r\n[]")
        except asyncio.IncompleteReadError:
            pass  # the client disconnected
        finally:
            writer.close()


@asynccontextmanager
async def run_server() -> AsyncIterator[Server]:
    server = Server()
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        await listener.wait_closed()


def maker() -> tuple[Texts, Bodies]:
    return Texts(16), Bodies("openai", "m", "float", "h")


async def test_a_closed_loop_keeps_its_connections_and_never_repeats_a_text() -> None:
    """Four clients use four connections; every text is sent once; server facts are gathered."""
    texts, bodies = maker()
    async with run_server() as server:
        pool = Pool(Target(f"http://127.0.0.1:{server.port}"), 4)
        await pool.open()
        record = await run_closed_loop(pool, lambda: bodies.request(texts.take(1)), clients=4, seconds=0.5)
        pool.close()
    assert server.connections == 4
    assert len(record.latency) == record.texts > 4
    assert len(set(server.seen)) == len(server.seen)
    assert set(record.batch_sizes) == {7}
    assert set(record.queue_ms) == {1.5}
    assert not record.errors


async def test_a_refusal_is_counted_by_status() -> None:
    """A 503 is counted as an error and not as an answer."""
    texts, bodies = maker()
    async with run_server() as server:
        server.head = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 0.01\r\n"
        pool = Pool(Target(f"127.0.0.1:{server.port}"), 1)
        record = await run_burst(pool, [bodies.request(texts.take(1))])
        pool.close()
    assert record.errors == {"503": 1}
    assert record.latency == []


async def test_a_lost_connection_is_counted_and_replaced() -> None:
    """A connection closed by the server costs one error; the next request reconnects."""
    texts, bodies = maker()
    async with run_server() as server:
        pool = Pool(Target(f"127.0.0.1:{server.port}"), 1)
        server.drop = True
        first = await run_burst(pool, [bodies.request(texts.take(1))])
        server.drop = False
        second = await run_burst(pool, [bodies.request(texts.take(1))])
        pool.close()
    assert first.errors == {"connection lost": 1}
    assert len(second.latency) == 1


async def test_a_cancelled_request_closes_its_connection() -> None:
    """After a cancelled request the next one gets its own answer, on a new connection."""
    texts, bodies = maker()
    async with run_server() as server:
        pool = Pool(Target(f"127.0.0.1:{server.port}"), 1)
        given_up = asyncio.create_task(pool.ask(bodies.request(texts.take(1))))
        await server.connected.wait()
        given_up.cancel()
        await asyncio.wait([given_up])
        server.head = b"HTTP/1.1 404 Not Found\r\n"
        assert (await pool.ask(bodies.request(texts.take(1)))).status == 404
        pool.close()
    assert given_up.cancelled()
    assert server.connections == 2


async def test_the_body_is_kept_on_request() -> None:
    """The body is stored only if the caller requests it."""
    texts, bodies = maker()
    async with run_server() as server:
        pool = Pool(Target(f"127.0.0.1:{server.port}"), 1)
        reply = await pool.ask(bodies.request(texts.take(1)), keep=True)
        plain = await pool.ask(bodies.request(texts.take(1)))
        pool.close()
    assert reply.body == bytearray(b"[]")
    assert plain.body is None


async def test_connection_refused() -> None:
    """A refused connection is an error of the run, not an exception."""
    async with run_server() as server:
        port = server.port
    texts, bodies = maker()
    record = await run_burst(Pool(Target(f"127.0.0.1:{port}"), 1), [bodies.request(texts.take(1))])
    assert sum(record.errors.values()) == 1
    assert next(iter(record.errors)).startswith("connect")


class StallingPool:
    """A pool of one connection whose first answer takes 50 ms and all others none."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._first = True

    async def ask(self, request: bytes) -> Reply:
        async with self._lock:
            if self._first:
                self._first = False
                await asyncio.sleep(0.05)
        reply = Reply()
        reply.status = 200
        return reply


async def test_an_open_loop_counts_requests_delayed_by_a_stall() -> None:
    """A stall of 50 ms at 1,000 requests a second delays every request that was due meanwhile."""
    record = await run_open_loop(StallingPool(), lambda: b"", rate=1000, seconds=0.06)
    assert len(record.latency) == 60
    assert sum(latency > 0.02 for latency in record.latency) >= 25


class RefusingPool:
    """A pool that refuses each request once, with a retry delay."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    async def ask(self, request: bytes) -> Reply:
        reply = Reply()
        reply.status = 200 if request in self.sent else 429
        reply.retry_after = 0.001
        self.sent.append(request)
        await asyncio.sleep(0)
        return reply


async def test_a_refused_request_is_sent_again() -> None:
    """After the delay the same body is sent again, and no other is consumed."""
    pool, numbers = RefusingPool(), iter(range(1, 10**6))
    record = await run_closed_loop(pool, lambda: str(next(numbers)).encode(), clients=1, seconds=0.5)
    assert pool.sent[:4] == [b"1", b"1", b"2", b"2"]
    assert record.errors["429"] >= len(record.latency) > 0


async def test_late_answers_do_not_count() -> None:
    """An answer after the end of a closed loop is awaited and not counted."""
    record = await run_closed_loop(StallingPool(), lambda: b"x", clients=1, seconds=0.01)
    assert (record.texts, record.seconds) == (0, 0.01)


class BrokenPool:
    """A pool whose server is gone."""

    async def ask(self, request: bytes) -> Reply:
        raise ConnectionLost("gone")


async def test_an_open_loop_continues_without_its_server() -> None:
    """Every due request is sent and counted."""
    record = await run_open_loop(BrokenPool(), lambda: b"", rate=1000, seconds=0.01)
    assert record.errors == {"connection lost": 10}


@pytest.mark.parametrize("url", ["https://h", "http://", "ftp://h:1"])
def test_only_http_urls(url: str) -> None:
    """Other URLs are refused with the valid form."""
    with pytest.raises(ValueError, match="http://host:port"):
        Target(url)


@pytest.mark.parametrize(
    ("url", "name"), [("http://[::1]:8080/v1", "[::1]:8080"), ("[::1]", "[::1]:80"), ("a.example:1", "a.example:1")]
)
def test_the_host_header(url: str, name: str) -> None:
    """IPv6 addresses are in brackets, without which a server takes their end for the port."""
    assert Target(url).name == name
