"""Stream bodies: delayed until the first chunk, merged into large writes, bounded, and closed with their source."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import EngineFailed, InternalError, ShoalError
from shoal.http import streaming
from shoal.http.streaming import MAX_BUFFERED_BYTES, MAX_BUFFERED_CHUNKS, StreamBody, open_stream_body
from shoal.types import Chunk, TokenLogprob, ToolDelta

NEVER_S = 1000.0


class Words:
    """Frames in plain text."""

    heartbeat = b"~"

    def encode_chunk(self, chunk: Chunk) -> bytes:
        return f"<{chunk.text}>".encode() if chunk.text else b""

    def encode_error(self, error: ShoalError) -> bytes:
        return f"!{error.message}".encode()

    def encode_end(self) -> bytes:
        return b"."


class Source:
    """Chunks that appear on `say`; `closed` is set when the generator has ended, by the task that ran it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue()
        self.closed = asyncio.Event()
        self.taken = 0

    def say(self, *each: Chunk | str | Exception | None) -> None:
        for one in each:
            self.queue.put_nowait(Chunk(text=one) if isinstance(one, str) else one)

    async def chunks(self) -> AsyncGenerator[Chunk]:
        try:
            async with asyncio.timeout(NEVER_S):  # only the task that entered it may leave it
                while (one := await self.queue.get()) is not None:
                    if isinstance(one, Exception):
                        raise one
                    self.taken += 1
                    yield one
        finally:
            self.closed.set()


async def started(source: Source, heartbeat_s: float = NEVER_S) -> StreamBody:
    return await open_stream_body(source.chunks(), Words(), heartbeat_s, request_id="req_1")


async def rest(body: StreamBody) -> bytes:
    return b"".join([piece async for piece in body])


async def run_loop(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_ready_chunks_are_sent_as_one_write() -> None:
    """Ready chunks and the end are sent as one write; the source is closed."""
    source = Source()
    source.say("a", "b", None)
    body = await started(source)
    assert body.first == Chunk(text="a")
    assert [piece async for piece in body] == [b"<a><b>."]
    assert source.closed.is_set()


async def test_an_empty_stream() -> None:
    """An end alone is a valid stream."""
    source = Source()
    source.say(None)
    body = await started(source)
    assert body.first is None
    assert await rest(body) == b"."


async def test_the_response_waits_for_the_first_chunk() -> None:
    """Before the first chunk a reader gets nothing, and may get an error."""
    source = Source()
    waiting = asyncio.create_task(started(source))
    await run_loop()
    assert not waiting.done()
    source.say("a")
    body = await waiting
    assert await anext(body) == b"<a>"
    await body.aclose()


@pytest.mark.parametrize("error", [EngineFailed("broken"), ZeroDivisionError("bug")])
async def test_errors_before_the_first_chunk(error: Exception) -> None:
    """Every error is raised, and the source is closed."""
    source = Source()
    source.say(error)
    with pytest.raises(type(error)):
        await started(source)
    assert source.closed.is_set()


async def test_errors_in_mid_stream() -> None:
    """They are sent after earlier chunks, and nothing follows."""
    source = Source()
    source.say("a", EngineFailed("broken"))
    assert await rest(await started(source)) == b"<a>!broken"


async def test_bugs_in_mid_stream(caplog: pytest.LogCaptureFixture) -> None:
    """A bug wrapped by the gateway is logged and reported by the request's id; a bare one breaks the stream."""
    source = Source()
    source.say("a", InternalError("secret"))
    rest_of_stream = await rest(await started(source))
    assert b"secret" not in rest_of_stream
    assert b"req_1" in rest_of_stream
    assert "secret" in caplog.text
    source = Source()
    source.say("a", ZeroDivisionError("bug"))
    with pytest.raises(ZeroDivisionError):
        await rest(await started(source))
    assert caplog.records[-1].levelno == logging.ERROR


async def test_heartbeats() -> None:
    """They are sent only while the source is silent; the first one opens the stream."""
    source = Source()
    body = await started(source, heartbeat_s=0.001)
    assert body.first is None
    assert [await anext(body), await anext(body)] == [b"~", b"~"]
    source.say("a")
    piece = await anext(body)
    while piece == b"~":
        piece = await anext(body)
    assert piece == b"<a>"
    assert await anext(body) == b"~"
    source.say(None)
    assert (await rest(body)).endswith(b".")


async def test_no_heartbeat_after_a_write() -> None:
    """Silence is measured from the last write, with a single timer."""
    source = Source()
    source.say("a")
    body = await started(source)
    assert await anext(body) == b"<a>"
    body._heartbeat_s = 0.005
    written = body._last_write
    body._check_heartbeat()
    assert not body._heartbeat_due
    assert await anext(body) == b"~"
    assert asyncio.get_running_loop().time() - written >= 0.005
    await body.aclose()


async def test_dialects_without_heartbeats() -> None:
    """Nothing is sent, and the stream continues."""
    source = Source()
    words = Words()
    words.heartbeat = b""
    body = await open_stream_body(source.chunks(), words, 0.001)
    reading = asyncio.create_task(rest(body))
    await asyncio.sleep(0.005)
    source.say("a", None)
    assert await reading == b"<a>."


async def test_writes_are_spaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk is sent at once; chunks soon after a write are merged into the next one."""
    pause_s = 1.0
    monkeypatch.setattr(streaming, "WRITE_INTERVAL_S", pause_s)
    source = Source()
    source.say("a")
    body = await started(source)
    assert await anext(body) == b"<a>"
    written = asyncio.get_running_loop().time()
    source.say("b")
    await run_loop()
    second = asyncio.create_task(anext(body))
    await run_loop()
    source.say("c")
    assert await second == b"<b><c>"
    assert asyncio.get_running_loop().time() - written >= pause_s * 0.9
    await body.aclose()


async def written_once(monkeypatch: pytest.MonkeyPatch) -> tuple[Source, StreamBody]:
    """Return a source and its stream, which has just written and would pause for `NEVER_S`."""
    monkeypatch.setattr(streaming, "WRITE_INTERVAL_S", NEVER_S)
    source = Source()
    source.say("a")
    body = await started(source)
    await anext(body)
    return source, body


async def test_the_end_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the source has ended, nothing is delayed."""
    source, body = await written_once(monkeypatch)
    source.say("b", None)
    await run_loop()
    assert await anext(body) == b"<b>."


async def test_the_end_interrupts_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that waits for its next write gets the rest at the end of the source."""
    source, body = await written_once(monkeypatch)
    source.say("b")
    waiting = asyncio.create_task(anext(body))
    await run_loop()
    assert not waiting.done()
    source.say("c", None)
    await run_loop()
    assert waiting.done()
    assert await waiting == b"<b><c>."


@pytest.mark.parametrize(
    ("chunk", "limit"),
    [
        (Chunk(text="x"), MAX_BUFFERED_CHUNKS),
        (Chunk(text="x" * (MAX_BUFFERED_BYTES // 4)), 4),
        (Chunk(text="x", reasoning="x" * (MAX_BUFFERED_BYTES // 4)), 4),
        (Chunk(text="x", raw=("d", b"x" * MAX_BUFFERED_BYTES)), 1),
        (Chunk(text="x", tools=[ToolDelta(index=0, arguments="x" * (MAX_BUFFERED_BYTES // 2))]), 2),
        (Chunk(text="x", logprobs=[TokenLogprob(token="x", logprob=0.0)] * 1024), 4),
    ],
)
async def test_slow_readers(chunk: Chunk, limit: int) -> None:
    """The source is read only up to the write limit; it continues when the reader does."""
    source = Source()
    source.say(*[chunk] * (MAX_BUFFERED_CHUNKS * 3))
    body = await started(source)
    await run_loop(2000)
    assert source.taken == limit
    await anext(body)
    await run_loop(2000)
    assert source.taken == 2 * limit
    await body.aclose()
    assert source.closed.is_set()


async def leave_unread(source: Source) -> None:
    await (await started(source)).aclose()


async def leave_after_one(source: Source) -> None:
    body = await started(source)
    await anext(body)
    await body.aclose()
    await body.aclose()


async def leave_while_waiting(source: Source) -> None:
    body = await started(source)
    await anext(body)
    reading = asyncio.create_task(anext(body))
    await run_loop()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def leave_before_it_began(source: Source) -> None:
    source.queue.get_nowait()
    waiting = asyncio.create_task(started(source))
    await run_loop()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize("leave", [leave_unread, leave_after_one, leave_while_waiting, leave_before_it_began])
async def test_reader_disconnects(leave: Callable[[Source], Awaitable[None]]) -> None:
    """At any time: afterwards the source is closed, and no task or timer remains."""
    before = asyncio.all_tasks()
    source = Source()
    source.say("a")
    await leave(source)
    assert source.closed.is_set()
    await run_loop()
    assert asyncio.all_tasks() == before


async def test_after_the_end() -> None:
    """A closed body ends at once."""
    source = Source()
    source.say("a")
    body = await started(source)
    await body.aclose()
    assert await rest(body) == b""


async def test_a_source_that_fails_to_close() -> None:
    """The reader gets the error; without a reader it is dropped."""

    async def chunks() -> AsyncGenerator[Chunk]:
        try:
            yield Chunk(text="a")
            await asyncio.Event().wait()
        finally:
            raise EngineFailed("cannot close")

    body = await open_stream_body(chunks(), Words(), NEVER_S)
    await anext(body)
    await body.aclose()


async def test_frames_that_fail() -> None:
    """A bug in a dialect ends the stream and its source."""

    class Broken(Words):
        def encode_chunk(self, chunk: Chunk) -> bytes:
            raise ZeroDivisionError

    source = Source()
    source.say("a")
    body = await open_stream_body(source.chunks(), Broken(), NEVER_S)
    with pytest.raises(ZeroDivisionError):
        await anext(body)
    assert source.closed.is_set()


@given(groups=st.lists(st.lists(st.text(max_size=5), max_size=5), max_size=6), ends=st.booleans())
def test_every_frame_is_sent_once_in_order(groups: Sequence[Sequence[str]], ends: bool) -> None:
    """However chunks are merged, their frames are sent once each, in order."""

    async def run() -> bytes:
        source = Source()

        async def send_chunks() -> None:
            for group in groups:
                source.say(*group)
                await asyncio.sleep(0)
            source.say(None if ends else EngineFailed("x"))

        telling = asyncio.create_task(send_chunks())
        try:
            return await rest(await started(source))
        except EngineFailed:
            assert not any(groups)
            return b"!x"
        finally:
            await telling

    texts = [text for group in groups for text in group]
    expected = "".join(f"<{text}>" for text in texts if text) + ("." if ends else "!x")
    pause, streaming.WRITE_INTERVAL_S = streaming.WRITE_INTERVAL_S, 0.0
    try:
        assert asyncio.run(run()) == expected.encode()
    finally:
        streaming.WRITE_INTERVAL_S = pause


class Wire:
    """An exchange that takes pieces while `takes` is set."""

    def __init__(self) -> None:
        self.on_disconnect: Callable[[], None] | None = None
        self.takes = False
        self.sent: list[bytes] = []

    def take_body(self, limit: int) -> bytes | None:
        return None

    def send_whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bool:
        return False

    def can_send_piece(self) -> bool:
        return self.takes

    def send_piece(self, piece: bytes) -> None:
        self.sent.append(piece)


async def test_chunks_are_written_past_a_reader_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to an exchange that takes none, and not before the first piece; an empty frame is not written."""
    monkeypatch.setattr(streaming, "WRITE_INTERVAL_S", 0.0)
    source, wire = Source(), Wire()
    source.say("a")
    body = await open_stream_body(source.chunks(), Words(), NEVER_S, exchange=wire)
    wire.takes = True
    source.say("b")
    await run_loop()
    assert await anext(body) == b"<a><b>"
    reading = asyncio.create_task(rest(body))
    await run_loop()
    for each in ("c", "", "d"):
        source.say(each)
        await run_loop()
    assert wire.sent == [b"<c>", b"<d>"]
    assert not reading.done()
    wire.takes = False
    source.say("e", None)
    assert await reading == b"<e>."


async def test_writes_past_the_reader_are_spaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "WRITE_INTERVAL_S", NEVER_S)
    source, wire = Source(), Wire()
    source.say("a")
    body = await open_stream_body(source.chunks(), Words(), NEVER_S, exchange=wire)
    wire.takes = True
    assert await anext(body) == b"<a>"
    reading = asyncio.create_task(rest(body))
    await run_loop()
    source.say("b")
    await run_loop()
    assert not wire.sent
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


@given(
    steps=st.lists(st.tuples(st.text(max_size=3), st.booleans(), st.integers(0, 4)), max_size=12), ends=st.booleans()
)
def test_every_frame_is_written_once_in_order(steps: Sequence[tuple[str, bool, int]], ends: bool) -> None:
    """Whoever writes it: the reader takes a varying number of turns, and the exchange does not always take pieces."""

    async def run() -> bytes:
        source, wire = Source(), Wire()
        source.say("first")
        body = await open_stream_body(source.chunks(), Words(), NEVER_S, exchange=wire)

        async def read() -> None:
            async for piece in body:
                for _ in range(len(piece) % 3):  # as a response to a slow client
                    await asyncio.sleep(0)
                wire.sent.append(piece)

        reading = asyncio.create_task(read())
        for text, wire.takes, turns in steps:
            source.say(text)
            await run_loop(turns)
        source.say(None if ends else EngineFailed("x"))
        await reading
        return b"".join(wire.sent)

    expected = "<first>" + "".join(f"<{text}>" for text, _, _ in steps if text) + ("." if ends else "!x")
    pause, streaming.WRITE_INTERVAL_S = streaming.WRITE_INTERVAL_S, 0.0
    try:
        assert asyncio.run(run()) == expected.encode()
    finally:
        streaming.WRITE_INTERVAL_S = pause
