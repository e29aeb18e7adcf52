"""Turn chunks into the body of a stream: heartbeats, coalesced writes, errors in mid-stream, and cancellation when the
reader disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Protocol

from shoal.errors import InternalError, ShoalError
from shoal.http.exchange import Exchange
from shoal.http.redaction import redact_error
from shoal.types import Chunk

log = logging.getLogger("shoal.http")

MAX_BUFFERED_CHUNKS = 256
MAX_BUFFERED_BYTES = 1_048_576
"""Maximum buffer for a slow reader; when it is full, the model waits too."""

WRITE_INTERVAL_S = 0.001
"""Minimum time between two writes. A system call costs as much as ten frames, and no reader needs more than a thousand
pieces a second."""


class StreamEncoder(Protocol):
    """Encodes a stream in one dialect; all bytes are whole events or lines.

    `encode_chunk` may return b"". `encode_end` is called once, after the last chunk. On an error, `encode_error` is
    called instead and nothing follows, so it includes the dialect's end of a stream. `heartbeat`: bytes that readers
    skip; empty if the dialect has none.
    """

    heartbeat: bytes

    def encode_chunk(self, chunk: Chunk) -> bytes: ...

    def encode_error(self, error: ShoalError) -> bytes: ...

    def encode_end(self) -> bytes: ...


async def open_stream_body(
    chunks: AsyncGenerator[Chunk],
    frames: StreamEncoder,
    heartbeat_s: float,
    *,
    request_id: str = "",
    exchange: Exchange | None = None,
) -> StreamBody:
    """Return the body of a stream once its first chunk has arrived or its first heartbeat is due.

    Raises any error before that, so that it still gets a status of its own. `chunks` are always closed: here, at the
    end of the body, or by its `aclose`. `exchange`: where the body may write to as well.
    """
    made = StreamBody(chunks, frames, heartbeat_s, request_id, exchange)
    await made.begin()
    return made


class StreamBody(AsyncIterator[bytes]):
    """Yields everything that is ready as one piece.

    A separate task reads the chunks, at most MAX_BUFFERED_CHUNKS or MAX_BUFFERED_BYTES ahead. While the reader waits
    for one, it writes the chunk to `exchange` itself, which saves waking the reader for each token. `first`: the first
    chunk, or None if a heartbeat came first. `failed`: the kind of the error that ended the stream in mid-stream, else
    "".
    """

    def __init__(
        self,
        chunks: AsyncGenerator[Chunk],
        frames: StreamEncoder,
        heartbeat_s: float,
        request_id: str,
        exchange: Exchange | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._frames = frames
        self._exchange = exchange
        self._request_id = request_id
        self._heartbeat_s = heartbeat_s
        self._ready: deque[Chunk] = deque()
        self._size = 0
        self._has_ended = False
        self._error: Exception | None = None
        self._end_sent = False
        self.first: Chunk | None = None
        self.failed = ""
        self._reader_waiter: asyncio.Future[None] | None = None  # wakes the reader when something is ready
        self._pump_waiter: asyncio.Future[None] | None = None  # wakes the pump when the buffer has room
        self._pause_waiter: asyncio.Future[None] | None = None  # ends a pause between writes
        self._last_write = self._loop.time()
        self._interval_s = 0.0  # the first write is immediate
        self._heartbeat_due = False
        self._heartbeat_timer = self._loop.call_later(heartbeat_s, self._check_heartbeat)
        self._pump = self._loop.create_task(self._read(chunks))

    @property
    def is_complete(self) -> bool:
        """Whether the last piece has been taken."""
        return self._end_sent

    async def begin(self) -> None:
        """Wait until there is something to write. Raises an error that comes before it."""
        try:
            await self._wait_until_ready()
        except BaseException:
            await self.aclose()
            raise
        if self._error is not None and not self._ready:
            error = self._error
            await self.aclose()
            raise error
        self.first = self._ready[0] if self._ready else None

    async def __anext__(self) -> bytes:
        try:
            while True:
                if not (self._ready or self._has_ended):
                    await self._wait_until_ready()
                left = self._last_write + self._interval_s - self._loop.time()
                if left > 0 and not self._has_ended:
                    await self._pause(left)
                piece = self._take_piece()
                if piece:
                    self._last_write = self._loop.time()
                    self._interval_s = WRITE_INTERVAL_S
                    return piece
                if self._end_sent:
                    raise StopAsyncIteration
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Stop reading chunks, and wait until their source has stopped; may be called twice."""
        self._end_sent = True
        self._heartbeat_timer.cancel()
        self._ready.clear()
        if not self._pump.done():
            self._pump.cancel()
            await asyncio.wait({self._pump})

    def _take_piece(self) -> bytes:
        frames, ready = self._frames, self._ready
        if ready:
            taken = self._encode_ready()
            ready.clear()
            self._size = 0
            _wake(self._pump_waiter)
        elif self._heartbeat_due and not self._has_ended:
            taken = [frames.heartbeat]
        else:
            taken = []
        self._heartbeat_due = False
        if self._has_ended and not self._end_sent:
            self._end_sent = True
            taken.append(frames.encode_end() if self._error is None else self._encode_failure(self._error))
        return b"".join(taken) if len(taken) > 1 else taken[0] if taken else b""

    def _encode_ready(self) -> list[bytes]:
        """Encode the chunks that are there. One that the dialect cannot express ends the stream with its error."""
        taken: list[bytes] = []
        try:
            taken.extend(map(self._frames.encode_chunk, self._ready))
        except ShoalError as error:
            self._error, self._has_ended = error, True
        return taken

    def _encode_failure(self, error: Exception) -> bytes:
        if not isinstance(error, ShoalError):
            raise error
        self.failed = error.kind
        if isinstance(error, InternalError):
            # As for a reply, a bug is logged in full and the client gets only the request id.
            log.error("the stream %s failed", self._request_id, exc_info=error, extra={"request_id": self._request_id})
            where = f" ({self._request_id})" if self._request_id else ""
            error = InternalError(f"The server failed to process this request; see its log{where}.")
        return self._frames.encode_error(redact_error(error, self._request_id))

    async def _wait_until_ready(self) -> None:
        """Wait for a chunk, the end, or a heartbeat that is due."""
        while not (self._ready or self._has_ended or self._heartbeat_due):
            self._reader_waiter = self._loop.create_future()
            await self._reader_waiter

    async def _pause(self, seconds: float) -> None:
        """Wait so long, or until the stream ends: its last chunks are not delayed."""
        self._pause_waiter = self._loop.create_future()
        timer = self._loop.call_later(seconds, _wake, self._pause_waiter)
        try:
            await self._pause_waiter
        finally:
            timer.cancel()

    async def _read(self, chunks: AsyncGenerator[Chunk]) -> None:
        """Read the chunks into the buffer, and close them in this task: a generator inside a timeout cannot be closed
        by another task."""
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    if self._write(chunk):
                        continue
                    self._ready.append(chunk)
                    self._size += len(chunk.raw[1]) if chunk.raw is not None else _estimate_size(chunk)
                    if len(self._ready) == 1:  # else it is awake
                        _wake(self._reader_waiter)
                    while len(self._ready) >= MAX_BUFFERED_CHUNKS or self._size >= MAX_BUFFERED_BYTES:
                        self._pump_waiter = self._loop.create_future()
                        await self._pump_waiter
        except Exception as error:  # the reader raises or renders any error
            self._error = error
        finally:
            self._has_ended = True
            _wake(self._reader_waiter)
            _wake(self._pause_waiter)

    def _write(self, chunk: Chunk) -> bool:
        """Write a chunk if nothing is to be written before it and it is not too soon; return whether it is done."""
        exchange, reader = self._exchange, self._reader_waiter
        if exchange is None or self._ready or reader is None or reader.done():
            return False
        now = self._loop.time()
        if now < self._last_write + self._interval_s or not exchange.can_send_piece():
            return False
        piece = self._frames.encode_chunk(chunk)
        if piece:
            exchange.send_piece(piece)
            self._last_write = now
        return True

    def _check_heartbeat(self) -> None:
        """Request a heartbeat if the last write is `heartbeat_s` ago. One timer per stream instead of one per chunk."""
        quiet = self._loop.time() - self._last_write
        if quiet >= self._heartbeat_s:
            self._heartbeat_due = True
            _wake(self._reader_waiter)
            quiet = 0.0
        self._heartbeat_timer = self._loop.call_later(self._heartbeat_s - quiet, self._check_heartbeat)


def _estimate_size(chunk: Chunk) -> int:
    """Estimate the size of a typed chunk: the length of its texts."""
    size = len(chunk.text) + len(chunk.reasoning)
    for tool in chunk.tools:
        size += len(tool.arguments)
    return size + 256 * len(chunk.logprobs)


def _wake(sleeper: asyncio.Future[None] | None) -> None:
    if sleeper is not None and not sleeper.done():
        sleeper.set_result(None)
