"""One connection: offers to upgrade are ignored, and every wait is bounded."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.http.exchange import EXTENSION
from shoal.server.http_protocol import (
    HEAD_BYTES,
    HEAD_TIMEOUT_S,
    LINGER_S,
    MAX_STALLED_CHECKS,
    READS_PER_TURN,
    REFUSAL_LINGER_S,
    WRITE_CHECK_S,
    Connection,
    State,
    _Flow,
)

OFFER = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUA\r\n"
)
GET = b"GET /first HTTP/1.1\r\nhost: a\r\n\r\n"


class Timer(NamedTuple):
    at: float
    callback: Callable[..., None]
    args: tuple[Any, ...]

    def cancel(self) -> None:
        if self in Clock.now.timers:
            Clock.now.timers.remove(self)


class Clock:
    """Stands in for the loop's time; tasks are the real loop's."""

    now: Clock

    def __init__(self) -> None:
        Clock.now = self
        self.seconds = 0.0
        self.timers: list[Timer] = []

    def call_later(self, delay: float, callback: Callable[..., None], *args: Any) -> Timer:
        timer = Timer(self.seconds + delay, callback, args)
        self.timers.append(timer)
        return timer

    def call_at(self, when: float, callback: Callable[..., None], *args: Any) -> Timer:
        return self.call_later(when - self.seconds, callback, *args)

    def time(self) -> float:
        return self.seconds

    def call_soon(self, callback: Callable[..., None], *args: Any) -> asyncio.Handle:
        return asyncio.get_running_loop().call_soon(callback, *args)

    def create_task(self, work: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(work, **options)

    def go_on(self, seconds: float) -> None:
        end = self.seconds + seconds
        while due := [timer for timer in self.timers if timer.at <= end]:
            first = min(due, key=lambda timer: timer.at)
            self.timers.remove(first)
            self.seconds = first.at
            first.callback(*first.args)
        self.seconds = end


class Wire:
    """A transport. With `takes` False the client reads nothing, so all writes are buffered."""

    def __init__(self) -> None:
        self.sent = b""
        self.writes: list[bytes] = []
        self.waiting = 0
        self.takes = True
        self.closed = False
        self.aborted = False
        self.ended = False
        self.paused = False
        self.socket: socket.socket | None = None

    def write(self, data: bytes) -> None:
        assert not self.closed
        assert not self.ended
        self.sent += data
        self.writes.append(data)
        if not self.takes:
            self.waiting += len(data)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.closed

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be written."""
        return self.closed or self.ended

    def is_aborted(self) -> bool:
        return self.aborted

    def close(self) -> None:
        self.closed = True

    def write_eof(self) -> None:
        assert not self.closed
        self.ended = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def get_extra_info(self, name: str) -> socket.socket | None:
        return self.socket if name == "socket" else None

    def is_paused(self) -> bool:
        return self.paused

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


def render_error(error: ShoalError) -> bytes:
    return json.dumps({"error": error.message}).encode()


class Client:
    """A connection to an application that records requests and responds when `answering` is set. With `watches` it
    waits until the client disconnects and keeps the recorded requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, bytes]] = []
        self.headers: list[list[tuple[bytes, bytes]]] = []
        self.answering = asyncio.Event()
        self.answering.set()
        self.reads_bodies = True
        self.watches = False
        self.left: list[str] = []
        self.pieces = [b"ok"]
        self.between = asyncio.Event()
        self.between.set()
        self.clock, self.wire = Clock(), Wire()
        state = State()
        config = uvicorn.Config(self, timeout_keep_alive=75, access_log=False, ws="none")
        self.connection = Connection(config, state, {}, self.clock, render_error=render_error)  # type: ignore[arg-type]
        self.tasks = state.tasks
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", self.reads_bodies
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
        self.requests.append((scope["method"], scope["path"], body))
        self.headers.append(scope["headers"])
        if self.watches:
            assert (await receive())["type"] == "http.disconnect"
            self.left.append(scope["path"])
            return
        await self.answering.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        for left, piece in enumerate(self.pieces, 1 - len(self.pieces)):
            await self.between.wait()
            await send({"type": "http.response.body", "body": piece, "more_body": left < 0})

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.connection.data_received(piece)
            await self.turn()

    async def turn(self) -> None:
        """Run the loop until nothing is ready."""
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def answers(self) -> int:
        return self.wire.sent.count(b"HTTP/1.1 200")

    async def leave(self) -> None:
        if self.connection.parser is not None:
            self.connection.connection_lost(None)
        self.answering.set()
        await asyncio.gather(*self.tasks)


@pytest.fixture
async def client() -> Any:
    new_client = Client()
    yield new_client
    await new_client.leave()


def post(path: str, body: bytes, *, offer: bool, chunks: bool = False) -> bytes:
    head = b"POST %s HTTP/1.1\r\nHost: a\r\n" % path.encode() + (OFFER if offer else b"")
    if not chunks:
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    cut = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + cut + b"0\r\n\r\n"


def split(whole: bytes, places: list[int]) -> Iterator[bytes]:
    cuts = sorted({place % len(whole) for place in places} | {0, len(whole)})
    return (whole[start:end] for start, end in pairwise(cuts))


class TestOffers:
    @given(
        requests=st.lists(st.tuples(st.binary(max_size=6), st.booleans(), st.booleans()), min_size=1, max_size=4),
        places=st.lists(st.integers(0, 10_000), max_size=12),
    )
    async def test_bodies_are_read_however_they_come(
        self, requests: list[tuple[bytes, bool, bool]], places: list[int]
    ) -> None:
        """With an offer or without, in one piece or chunked, pipelined and cut anywhere into packets."""
        client = Client()
        whole = b"".join(
            post(f"/{number}", body, offer=offer, chunks=chunks)
            for number, (body, offer, chunks) in enumerate(requests)
        )
        await client.send(*split(whole, places))
        assert client.requests == [("POST", f"/{number}", body) for number, (body, _, _) in enumerate(requests)]
        assert client.answers == len(requests)
        await client.leave()

    async def test_offers_without_a_body_are_plain_requests(self, client: Client) -> None:
        """A websocket request gets the HTTP response; the connection stays open."""
        await client.send(b"GET /a HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", GET)
        assert client.requests == [("GET", "/a", b""), ("GET", "/first", b"")]
        assert not client.wire.is_closing()

    async def test_the_last_request_of_a_connection_stays_the_last(self, client: Client) -> None:
        """`close` next to the offer is respected."""
        await client.send(
            b"POST /a HTTP/1.1\r\nconnection: close, upgrade\r\nupgrade: h2c\r\ncontent-length: 1\r\n\r\nx"
        )
        assert client.requests == [("POST", "/a", b"x")]
        assert client.wire.is_closing()

    async def test_100_continue_is_sent_where_expected(self, client: Client) -> None:
        """`Expect: 100-continue`, as curl sends it with large bodies, beside an offer."""
        head = b"POST /a HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n" + OFFER + b"\r\n"
        await client.send(head)
        assert client.wire.sent.startswith(b"HTTP/1.1 100")
        await client.send(b"xy")
        assert client.requests == [("POST", "/a", b"xy")]

    async def test_a_tunnel_ends_the_connection(self, client: Client) -> None:
        """CONNECT gets a response like any method; the bytes after it are not a request."""
        await client.send(b"CONNECT /a HTTP/1.1\r\nhost: a\r\n\r\n" + GET)
        assert client.requests == [("CONNECT", "/a", b"")]
        assert client.answers == 1
        assert client.wire.is_closing()

    async def test_invalid_http_is_refused(self, client: Client) -> None:
        """400 and close, also after an offer."""
        await client.send(post("/a", b"x", offer=True) + b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b"HTTP/1.1 400" in client.wire.sent
        assert client.wire.is_finished


def chunked(*pieces: bytes, trailers: bytes = b"") -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n" + trailers + b"\r\n"


CHUNKED = b"POST /%s HTTP/1.1\r\nHost: a\r\nX-User: anna\r\nTransfer-Encoding: chunked\r\n\r\n"
TRAILERS = b"Host: b\r\nAuthorization: Bearer other\r\nX-User: eve\r\nConnection: upgrade\r\nUpgrade: h2c\r\n"


class TestTrailers:
    @given(offers=st.lists(st.booleans(), min_size=1, max_size=3), places=st.lists(st.integers(0, 10_000), max_size=12))
    async def test_trailers_are_ignored(self, offers: list[bool], places: list[int]) -> None:
        """Behind any request of a connection, with an offer or without, cut anywhere into packets."""
        client = Client()
        heads = [CHUNKED.replace(b"\r\n\r\n", b"\r\n" + OFFER + b"\r\n") if offer else CHUNKED for offer in offers]
        whole = b"".join(head % b"x" + chunked(b"body", trailers=TRAILERS) for head in heads)
        await client.send(*split(whole + GET, places))
        assert client.requests == [*(("POST", "/x", b"body") for _ in offers), ("GET", "/first", b"")]
        for headers in client.headers[:-1]:
            assert [value for name, value in headers if name in {b"host", b"x-user"}] == [b"a", b"anna"]
            assert b"authorization" not in dict(headers)
        await client.leave()

    @pytest.mark.parametrize("endless", [b"0\r\nx: " + b"y" * 1000, b"0\r\n" + b"x: y\r\n" * 200, b"1;" + b"x" * 1000])
    async def test_trailer_size_is_bounded(self, client: Client, endless: bytes) -> None:
        """As are the extensions of chunks: `max_body_bytes` counts neither."""
        await client.send(CHUNKED % b"x" + endless, *[endless[-900:]] * 100)
        assert b"HTTP/1.1 400" in client.wire.sent
        assert client.requests == []

    async def test_small_chunks_are_taken(self, client: Client) -> None:
        """Any number of one-byte chunks: their data allows for the framing."""
        await client.send(CHUNKED % b"x", *[b"1\r\nx\r\n" * 100] * 200, b"0\r\n\r\n")
        assert client.requests == [("POST", "/x", b"x" * 20_000)]


class TestRefusals:
    async def test_refusals_keep_the_request_order(self, client: Client) -> None:
        """Clients match responses to requests by order."""
        client.answering.clear()
        await client.send(GET * 2 + b"nonsense\r\n\r\n")
        assert client.wire.sent == b""
        client.answering.set()
        await client.turn()
        assert [part[:3] for part in client.wire.sent.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"400"]

    @pytest.mark.parametrize("ahead", [0, 1, 2])
    async def test_a_body_that_cannot_be_read(self, client: Client, ahead: int) -> None:
        """The refusal is the response to its request, which is cancelled, anywhere in the pipeline."""
        client.answering.clear()
        await client.send(GET * ahead + CHUNKED % b"x" + b"1\r\n", b"xnonsense\r\n")
        client.answering.set()
        await client.turn()
        assert [path for _, path, _ in client.requests] == ["/first"] * ahead
        assert [part[:3] for part in client.wire.sent.split(b"HTTP/1.1 ")[1:]] == [b"200"] * ahead + [b"400"]
        assert client.wire.is_finished

    async def test_a_started_response_is_the_only_one(self, client: Client) -> None:
        """A second one would be taken for the response to the next request."""
        client.reads_bodies = False
        await client.send(CHUNKED % b"x" + b"1\r\n", b"xnonsense\r\n")
        assert client.wire.sent.count(b"HTTP/1.1") == client.answers == 1
        assert client.wire.is_finished

    async def test_late_request_bytes_are_read_for_a_moment(self, client: Client) -> None:
        """A reset would discard the response for a client that sends everything before it reads."""
        await client.send(b"nonsense\r\n\r\n", b"more", GET)
        assert client.wire.sent.count(b"HTTP/1.1 4") == 1
        assert not client.wire.is_closing()
        client.clock.go_on(REFUSAL_LINGER_S)
        assert client.wire.is_closing()


@pytest.mark.parametrize(
    ("target", "host", "hosts"),
    [
        (b"/a", b"a", [b"a"]),
        (b"http://A:80/a", b"a:80", [b"a:80"]),
        (b"http://b/a", b"a", [b"a", b"b"]),
        (b"http://a@b/a", b"b", [b"b", b"a@b"]),
        (b"//b/a", b"a", [b"a"]),
        (b"/?http://b", b"a", [b"a"]),
    ],
)
async def test_targets_that_name_a_host(client: Client, target: bytes, host: bytes, hosts: list[bytes]) -> None:
    """Both hosts are kept if they differ, so that header checks see two."""
    await client.send(b"GET %s HTTP/1.1\r\nhost: %s\r\n\r\n" % (target, host))
    assert [value for name, value in client.headers[0] if name == b"host"] == hosts


@pytest.mark.parametrize("target", [b"http://b", b"http://b?a", b"http:/a", b"a", b"b:80", b"http://[::1/a"])
async def test_invalid_targets_are_refused(client: Client, target: bytes) -> None:
    await client.send(b"GET %s HTTP/1.1\r\nhost: b\r\n\r\n" % target)
    assert client.wire.sent.startswith(b"HTTP/1.1 400")
    assert b"Python" not in client.wire.sent and b"NoneType" not in client.wire.sent
    assert client.requests == []


class TestAnswers:
    async def test_head_and_body_leave_together(self, client: Client) -> None:
        """One write, because each write would wake the client."""
        await client.send(GET)
        assert len(client.wire.writes) == 1
        assert client.wire.writes[0].startswith(b"HTTP/1.1 200")
        assert client.wire.writes[0].endswith(b"\r\n\r\nok")

    async def test_a_head_is_sent_before_the_body(self, client: Client) -> None:
        """For a slow stream the head is sent at once, and each piece as it arrives."""
        client.pieces = [b"o", b"k"]
        client.between.clear()
        await client.send(GET)
        assert [each[:12] for each in client.wire.writes] == [b"HTTP/1.1 200"]
        client.between.set()
        await client.turn()
        assert client.wire.writes[1:] == [b"o", b"k"]

    async def test_the_last_answer_is_complete(self, client: Client) -> None:
        await client.send(b"GET /first HTTP/1.0\r\nhost: a\r\n\r\n")
        assert client.wire.writes[0].endswith(b"ok")
        assert client.wire.is_closing()


class TestLeaving:
    async def test_every_running_request_is_cancelled(self, client: Client) -> None:
        """Also the first of several pipelined requests; later ones do not start."""
        client.watches = True
        await client.send(GET + b"GET /second HTTP/1.1\r\nhost: a\r\n\r\n")
        client.connection.connection_lost(None)
        await client.turn()
        assert client.left == ["/first"]
        assert [path for _, path, _ in client.requests] == ["/first"]

    async def test_nothing_is_written_to_a_closed_connection(
        self, client: Client, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nor is this logged as an error of the application."""
        await client.send(GET)
        sent = client.wire.sent
        client.answering.clear()
        await client.send(GET * 2)
        client.connection.connection_lost(None)
        await client.leave()
        assert client.wire.sent == sent
        assert not caplog.records


class TestHeads:
    async def test_a_silent_connection_is_closed_without_a_response(self, client: Client) -> None:
        """Browsers open connections in advance and expect no response."""
        client.clock.go_on(HEAD_TIMEOUT_S - 1)
        assert not client.wire.is_closing()
        client.clock.go_on(1)
        assert client.wire.is_closing()
        assert client.wire.sent == b""

    async def test_a_slow_head_times_out(self, client: Client) -> None:
        """More bytes do not extend the time; the response names the reason."""
        for byte in b"GET / HTTP":
            client.connection.data_received(bytes([byte]))
            client.clock.go_on(HEAD_TIMEOUT_S / 10)
        assert client.wire.is_finished
        head, _, body = client.wire.sent.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        assert b"content-length: %d" % len(body) in head

    async def test_heads_are_bounded(self, client: Client) -> None:
        """Pauses and bodies do not count; an endless head is refused."""
        large = post("/a", bytes(3 * HEAD_BYTES), offer=False)
        await client.send(large + b"GET /b HT", b"TP/1.1\r\nx: ", b"y" * (HEAD_BYTES - 100), b"\r\n\r\n")
        assert [path for _, path, _ in client.requests] == ["/a", "/b"]
        await client.send(b"GET /c HTTP/1.1\r\n", b"x: " + b"y" * (HEAD_BYTES - 3))
        assert not client.wire.is_closing()
        await client.send(b"y")
        assert client.wire.is_finished
        assert b"HTTP/1.1 431" in client.wire.sent
        assert client.wire.sent.endswith(b'headers are too large."}')

    async def test_the_head_limit_does_not_apply_to_bodies(self, client: Client) -> None:
        """After the head, the application bounds the time of the body."""
        await client.send(b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nx")
        client.clock.go_on(1000)
        assert not client.wire.is_closing()

    async def test_a_pause_between_requests_is_longer(self, client: Client) -> None:
        """Connections are kept alive for uvicorn's configured time after a response."""
        await client.send(GET)
        client.clock.go_on(4)
        await client.send(GET)
        client.clock.go_on(client.connection.timeout_keep_alive - 1)
        assert not client.wire.is_closing()
        client.clock.go_on(1)
        assert client.wire.is_closing()
        assert client.answers == 2

    @pytest.mark.parametrize(("piece", "expected"), [(b"GET / HT", True), (b"\r\n", False)])
    async def test_later_heads_have_the_same_time(self, client: Client, piece: bytes, expected: bool) -> None:
        """Also for blank lines, which belong to no head."""
        await client.send(GET, piece)
        client.clock.go_on(HEAD_TIMEOUT_S)
        assert client.wire.is_finished
        assert (b"HTTP/1.1 408" in client.wire.sent) is expected

    async def test_a_head_behind_a_slow_answer_has_time(self, client: Client) -> None:
        """The time starts with the response, not while the server makes the client wait."""
        client.answering.clear()
        await client.send(GET + b"GET /second HT")
        client.clock.go_on(1000)
        assert not client.wire.is_closing()
        client.answering.set()
        await client.turn()
        client.clock.go_on(HEAD_TIMEOUT_S - 1)
        assert not client.wire.is_closing()
        await client.send(b"TP/1.1\r\n\r\n")
        assert [path for _, path, _ in client.requests] == ["/first", "/second"]
        await client.send(b"GET /third HT")
        client.clock.go_on(HEAD_TIMEOUT_S)
        assert b"HTTP/1.1 408" in client.wire.sent

    @pytest.mark.parametrize("before", [0, 1])
    @pytest.mark.parametrize("more", [b"", b"G", b"\r\n"])
    async def test_no_client_delays_shutdown(self, client: Client, more: bytes, before: int) -> None:
        """A connection without a close notice waits only briefly for the next request or for the rest of one, whether
        it was kept alive `before` or is new."""
        await client.send(*[GET] * before)
        client.pieces = [b"o", b"k"]
        client.between.clear()
        await client.send(GET)
        client.connection.drain(0.0)
        client.between.set()
        await client.turn()
        client.clock.go_on(LINGER_S - 0.1)
        assert client.wire.sent.endswith(b"ok")
        assert not client.wire.closed
        if more:
            await client.send(more)
            client.clock.go_on(LINGER_S - 0.1)
        client.clock.go_on(0.2)
        assert client.wire.is_finished

    async def test_body_after_an_early_answer_cannot_trickle(self, client: Client) -> None:
        """An unread body has the time limit of a head; a normal pause follows it."""
        client.reads_bodies = False
        await client.send(b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\n", b"x", b"yz")
        client.clock.go_on(HEAD_TIMEOUT_S)
        assert not client.wire.is_closing()
        await client.send(b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\n", b"x")
        client.clock.go_on(HEAD_TIMEOUT_S)
        assert client.wire.is_closing()
        assert b"408" not in client.wire.sent

    async def test_a_late_head_on_a_closing_connection_is_ignored(self, client: Client) -> None:
        """Nothing is written after the close."""
        await client.send(b"GET / HT")
        client.wire.close()
        client.clock.go_on(HEAD_TIMEOUT_S)
        assert client.wire.sent == b""


class PausingTransport(Wire):
    """Records when reading resumes."""

    def __init__(self, resumed: list[Wire]) -> None:
        super().__init__()
        self._resumed = resumed

    def resume_reading(self) -> None:
        self._resumed.append(self)


async def test_large_bodies_are_read_in_turn() -> None:
    """A few per loop turn, first come, first served; disconnected clients are skipped."""
    state, resumed = State(), list[Wire]()
    wires = [PausingTransport(resumed) for _ in range(3 * READS_PER_TURN)]
    flows = [_Flow(wire, state, asyncio.get_running_loop()) for wire in wires]  # type: ignore[arg-type]
    for flow in flows:
        flow.pause_reading()
        flow.resume_reading()
        flow.resume_reading()
    wires[1].close()
    for number in (1, 2, 3):
        await asyncio.sleep(0)
        assert len(resumed) == number * READS_PER_TURN - 1
    assert resumed == [wires[0], *wires[2:]]
    await asyncio.sleep(0)
    assert len(resumed) == len(wires) - 1


async def test_a_connection_is_read_on_behind_a_large_body(client: Client) -> None:
    """Else its end would go unnoticed, and the server would compute for a client that left. Behind a second request,
    which waits for the first answer, it is not."""
    client.answering.clear()
    whole = post("/a", b"x" * 300_000, offer=False)
    await client.send(whole[:150_000], whole[150_000:])
    assert client.requests == [("POST", "/a", b"x" * 300_000)]
    assert not client.wire.is_paused()
    await client.send(post("/b", b"y" * 100_000, offer=False))
    assert client.wire.is_paused()
    client.answering.set()
    await client.turn()
    assert [path for _, path, _ in client.requests] == ["/a", "/b"]
    assert not client.wire.is_paused()


class TestUnread:
    async def test_an_unread_answer_is_dropped(self, client: Client) -> None:
        """After a number of checks without progress, however often other code checks."""
        client.wire.takes = False
        await client.send(GET)
        client.clock.go_on(WRITE_CHECK_S * MAX_STALLED_CHECKS - 1)
        assert not client.wire.is_aborted()
        client.clock.go_on(1)
        assert client.wire.is_aborted()

    async def test_a_slow_reader_is_served(self, client: Client) -> None:
        """One byte between two checks is progress; once all is sent, checks stop."""
        client.wire.takes = False
        await client.send(GET)
        for _ in range(client.wire.waiting - 1):
            client.clock.go_on(WRITE_CHECK_S)
            client.wire.waiting -= 1
        client.wire.closed = True  # by the pause that was too long; what is left is still sent
        assert not client.wire.is_aborted()
        client.wire.waiting = 0
        client.clock.go_on(WRITE_CHECK_S)
        assert client.clock.timers == []

    async def test_bytes_in_the_send_buffer_are_waited_for(self, client: Client) -> None:
        """A slow reader drains the socket buffer long before there is room for more."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for _ in range(50):
                ours.send(bytes(1000))
            client.wire.takes = False
            await client.send(GET)
            client.wire.socket = ours
            for _ in range(40):
                client.clock.go_on(WRITE_CHECK_S)
                theirs.recv(1000)
            assert not client.wire.is_aborted()
            client.clock.go_on(WRITE_CHECK_S * (MAX_STALLED_CHECKS + 1))
            assert client.wire.is_aborted()

    async def test_a_client_that_reads_in_bursts_is_served(self, client: Client) -> None:
        """Any read between two checks is progress, however full the buffer is at the next one."""
        client.wire.takes = False
        client.answering.clear()
        await client.send(GET)
        for _ in range(MAX_STALLED_CHECKS * 3):
            client.wire.waiting = 100_000
            client.connection.pause_writing()
            client.clock.go_on(WRITE_CHECK_S / 2)
            client.connection.resume_writing()
            client.clock.go_on(WRITE_CHECK_S / 2)
        assert not client.wire.is_aborted()
        client.connection.pause_writing()
        client.clock.go_on(WRITE_CHECK_S * (MAX_STALLED_CHECKS + 1))
        assert client.wire.is_aborted()

    async def test_an_unread_refusal_is_dropped(self, client: Client) -> None:
        """Closing waits for the write buffer, which a client that never reads would keep full."""
        client.wire.takes = False
        await client.send(b"nonsense\r\n\r\n")
        assert client.wire.is_finished
        client.clock.go_on(WRITE_CHECK_S * MAX_STALLED_CHECKS)
        assert client.wire.is_aborted()

    async def test_a_closed_connection_leaves_no_timer(self, client: Client) -> None:
        """No timer outlives it."""
        client.wire.takes = False
        await client.send(GET, b"GET / HT")
        assert len(client.clock.timers) == 3
        client.connection.connection_lost(None)
        assert client.clock.timers == []


class Streamer(Client):
    """Streams a response, and records at each stage whether the application could write to its exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.could: list[bool] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = scope["extensions"][EXTENSION]
        self.could.append(exchange.can_send_piece())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.could.append(exchange.can_send_piece())
        if self.could[-1]:
            exchange.send_piece(b"abc")
        self.connection.pause_writing()
        self.could.append(exchange.can_send_piece())
        self.connection.resume_writing()
        await send({"type": "http.response.body", "body": b"def"})
        self.could.append(exchange.can_send_piece())


class TestPieces:
    async def test_are_written_to_a_response_that_has_begun(self) -> None:
        """Not before its head, after its end, or while the client reads slowly."""
        client = Streamer()
        await client.send(GET)
        head, _, body = client.wire.sent.partition(b"\r\n\r\n")
        assert body == b"3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n"
        assert client.wire.writes[0].startswith(head)
        assert client.could == [False, True, False, False]
        await client.leave()

    async def test_a_response_without_a_body_has_none(self) -> None:
        client = Streamer()
        await client.send(b"HEAD / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert client.wire.sent.endswith(b"\r\n\r\n")
        assert client.could == [False] * 4
        await client.leave()

    async def test_a_client_that_left_gets_none(self) -> None:
        client = Streamer()
        client.connection.data_received(GET)
        client.connection.connection_lost(None)
        await client.turn()
        assert client.could == [False] * 4
        await client.leave()
