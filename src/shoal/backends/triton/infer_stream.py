"""The responses to one request on its own gRPC stream, and the end of that stream.

tritonserver before release 25.04 may crash (SIGSEGV; its pull requests 7840 and 8078) or keep a request forever if a
call is canceled just as it answers or ends. So a stream whose answer is complete is read to its end, and one that
has answered is read on for a while, in which a short answer ends; then it is canceled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import grpc
import grpc.aio

from shoal.backends.triton.errors import rpc_error, stream_error
from shoal.kserve import FINAL
from shoal.kserve import protocol_pb2 as pb

END_S = 5.0
"""Seconds for a stream to end by itself after its last response; then it is canceled."""

READ_ON_S = 0.5
"""Seconds for which a stream is read on that has answered but is not over; then it is canceled, right after a response,
when the next one is furthest away."""

PAUSE_S = 0.1
"""Seconds without a response after which such a stream is canceled earlier."""


class InferStream:
    """An asynchronous iterator over the responses, until the one marked final, an error, or the end of the stream.
    Responses without outputs, which only mark the end, are skipped.

    Iterating raises as `rpc_error` and `stream_error` map it. `aclose` cancels the request unless it is over, READ_ON_S
    later if it has answered; always call it. `check_open` raises if the connection was closed; `release` is called when
    the stream has ended.
    """

    def __init__(
        self, call: Any, check_open: Callable[[asyncio.CancelledError], None], release: Callable[[], None]
    ) -> None:
        self._call = call
        self._check_open = check_open
        self._release = release
        self._answered = self._over = self._last_read = self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pb.ModelInferResponse:
        while not self._last_read:
            answer = await self._read()
            if answer is grpc.aio.EOF:
                break
            if answer.error_message:  # final regardless of its flag: no response follows it
                self._over = self._last_read = True
                raise stream_error(answer.error_message)
            self._answered = True
            response: pb.ModelInferResponse = answer.infer_response
            parameter = response.parameters.get(FINAL)
            if parameter is not None and parameter.bool_param:
                self._over = self._last_read = True
            if response.outputs:
                return response
        raise StopAsyncIteration

    def mark_over(self) -> None:
        """Mark the answer as complete, although the stream has not ended yet: `aclose` then lets it end."""
        self._over = True

    async def aclose(self) -> None:
        """Cancel the request; if it has answered, read on in the background first. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not (self._over or self._answered) or self._call.done():
            self._call.cancel()
            self._release()
            return
        task = asyncio.create_task(self._read_on(), name="end of a stream")
        _ENDING.add(task)
        task.add_done_callback(_ENDING.discard)

    async def _read(self) -> Any:
        try:
            return await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error) from error
        except asyncio.CancelledError as error:
            self._check_open(error)
            raise

    async def _read_on(self) -> None:
        total_s, pause_s = (END_S, END_S) if self._over else (READ_ON_S, PAUSE_S)
        clock = asyncio.get_running_loop().time
        end = clock() + total_s
        try:
            # A closed connection cancels the call, which raises CancelledError here.
            with suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.CancelledError):
                async with asyncio.timeout(pause_s) as pause:
                    while await self._call.read() is not grpc.aio.EOF and clock() < end:
                        pause.reschedule(clock() + pause_s)
        finally:
            self._call.cancel()
            self._release()


_ENDING: set[asyncio.Task[None]] = set()
"""Keeps the tasks alive that read streams after they were left."""
