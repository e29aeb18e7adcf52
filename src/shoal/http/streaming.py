"""From chunks to the body of a stream: heartbeats, coalescing, errors in mid-stream, and an end to the work when the
reader goes."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Protocol

from shoal.errors import InternalError, ShoalError
from shoal.http.redaction import redact_error
from shoal.types import Chunk

log = logging.getLogger("shoal.http")

MAX_BUFFERED_CHUNKS = 256
MAX_BUFFERED_BYTES = 1_048_576
"""What may wait for a slow reader; then the model waits for it too."""

WRITE_INTERVAL_S = 0.001
"""Between two writes. A system call costs as much as making ten frames, and nobody reads a thousand pieces a second."""


class StreamEncoder(Protocol):
    """How a dialect writes a stream; all bytes are whole events or lines.

    `encode_chunk` may answer nothing. `encode_end` is asked for once, after the last chunk; `encode_error` instead of
    it when something went wrong, and then nothing else follows: it holds whatever ends a stream in this dialect.
    `heartbeat`: what readers skip; empty where the dialect has no such thing.
    """

    heartbeat: bytes

    def encode_chunk(self, chunk: Chunk) -> bytes: ...

    def encode_error(self, error: ShoalError) -> bytes: ...

    def encode_end(self) -> bytes: ...


async def open_stream_body(
    chunks: AsyncGenerator[Chunk], frames: StreamEncoder, heartbeat_s: float, *, request_id: str = ""
) -> StreamBody:
    """The body of a stream, as soon as its first chunk is there, or its first heartbeat due.

    Raises what goes wrong before either, so that it can still be told with a status of its own. `chunks` are closed in
    any case: here, by the end of the body, or by `aclose` of it.
    """
    made = StreamBody(chunks, frames, heartbeat_s, request_id)
    await made.begin()
    return made


class StreamBody(AsyncIterator[bytes]):
    """Each piece is all that was ready when it was asked for. A task of its own reads the chunks, at most
    MAX_BUFFERED_CHUNKS or MOST_BYTES ahead. `first`: the chunk that it began with, None after a heartbeat.
    `encode_error`: the kind of the error that ended it in mid-stream, "" where none did."""

    def __init__(
        self, chunks: AsyncGenerator[Chunk], frames: StreamEncoder, heartbeat_s: float, request_id: str
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._frames = frames
        self._request_id = request_id
        self._heartbeat_s = heartbeat_s
        self._ready: deque[Chunk] = deque()
        self._size = 0
        self._over = False
        self._error: Exception | None = None
        self._told_end = False
        self.first: Chunk | None = None
        self.failed = ""
        self._waiting: asyncio.Future[None] | None = None  # the reader, for something to be ready
        self._room: asyncio.Future[None] | None = None  # the pump, for the reader to take some
        self._written = self._loop.time()
        self._paced = False
        self._beat_due = False
        self._beat = self._loop.call_later(heartbeat_s, self._check_heartbeat)
        self._pump = self._loop.create_task(self._read(chunks))

    async def begin(self) -> None:
        """Return when there is something to write. Raises what went wrong before."""
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
                await self._wait_until_ready()
                await self._pace()
                piece = self._take_piece()
                if piece:
                    self._written = self._loop.time()
                    return piece
                if self._told_end:
                    raise StopAsyncIteration
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Stop reading chunks, and return when what makes them has stopped too; may be called twice."""
        self._told_end = True
        self._beat.cancel()
        self._ready.clear()
        if not self._pump.done():
            self._pump.cancel()
            await asyncio.wait({self._pump})

    def _take_piece(self) -> bytes:
        frames, ready = self._frames, self._ready
        if ready:
            taken = [frames.encode_chunk(chunk) for chunk in ready]
            ready.clear()
            self._size = 0
            _wake(self._room)
        elif self._beat_due and not self._over:
            taken = [frames.heartbeat]
        else:
            taken = []
        self._beat_due = False
        if self._over and not self._told_end:
            self._told_end = True
            taken.append(frames.encode_end() if self._error is None else self._encode_failure(self._error))
        return b"".join(taken) if len(taken) > 1 else taken[0] if taken else b""

    def _encode_failure(self, error: Exception) -> bytes:
        if not isinstance(error, ShoalError):
            raise error
        self.failed = error.kind
        if isinstance(error, InternalError):
            # As for a reply: of a bug the log gets all, the client the id under which the log has it.
            log.error("the stream %s failed", self._request_id, exc_info=error, extra={"request_id": self._request_id})
            where = f" ({self._request_id})" if self._request_id else ""
            error = InternalError(f"The server failed on this request; its log says why{where}.")
        return self._frames.encode_error(redact_error(error, self._request_id))

    async def _wait_until_ready(self) -> None:
        while not (self._ready or self._over or self._beat_due):
            self._waiting = self._loop.create_future()
            await self._waiting

    async def _pace(self) -> None:
        """Let a millisecond pass between writes, so that what comes in it goes out together; the first goes at once."""
        if not self._paced:
            self._paced = True
            return
        left = self._written + WRITE_INTERVAL_S - self._loop.time()
        if left > 0 and not self._over:
            await asyncio.sleep(left)

    async def _read(self, chunks: AsyncGenerator[Chunk]) -> None:
        """Closed in the task that iterates it: a generator that holds a timeout cannot be left by another."""
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    self._ready.append(chunk)
                    self._size += _estimate_size(chunk)
                    _wake(self._waiting)
                    while len(self._ready) >= MAX_BUFFERED_CHUNKS or self._size >= MAX_BUFFERED_BYTES:
                        self._room = self._loop.create_future()
                        await self._room
        except Exception as error:  # whatever it is, it is the reader's to tell
            self._error = error
        finally:
            self._over = True
            _wake(self._waiting)

    def _check_heartbeat(self) -> None:
        """One timer a stream and not one a chunk: it looks when the last write was."""
        quiet = self._loop.time() - self._written
        if quiet >= self._heartbeat_s:
            self._beat_due = True
            _wake(self._waiting)
            quiet = 0.0
        self._beat = self._loop.call_later(self._heartbeat_s - quiet, self._check_heartbeat)


def _estimate_size(chunk: Chunk) -> int:
    """About what it takes: bytes of its texts, or of what an upstream sent."""
    size = len(chunk.text) + len(chunk.reasoning)
    if chunk.raw is not None:
        size += len(chunk.raw[1])
    for tool in chunk.tools:
        size += len(tool.arguments)
    return size + 256 * len(chunk.logprobs)


def _wake(sleeper: asyncio.Future[None] | None) -> None:
    if sleeper is not None and not sleeper.done():
        sleeper.set_result(None)
