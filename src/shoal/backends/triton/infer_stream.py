"""The responses to one request on its own gRPC stream, and the end of that stream.

tritonserver before release 25.04 may crash (SIGSEGV; its pull requests 7840 and 8078) or keep a request forever if a
call is canceled just as it ends. So a stream whose answer is complete is read to its end, not canceled.
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


class InferStream:
    """An asynchronous iterator over the responses, until the one marked final, an error, or the end of the stream.
    Responses without outputs, which only mark the end, are skipped.

    Iterating raises as `rpc_error` and `stream_error` map it. `aclose` cancels the request unless it is over; always
    call it. `check_open` raises if the connection was closed; `release` is called when the stream has ended.
    """

    def __init__(
        self, call: Any, check_open: Callable[[asyncio.CancelledError], None], release: Callable[[], None]
    ) -> None:
        self._call = call
        self._check_open = check_open
        self._release = release
        self._over = self._last_read = self._closed = False

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
        """Cancel the request; if its answer is complete, read the rest in the background instead. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._over or self._call.done():
            self._call.cancel()
            self._release()
            return
        task = asyncio.create_task(self._read_to_end(), name="end of a stream")
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

    async def _read_to_end(self) -> None:
        try:
            # A closed connection cancels the call, which raises CancelledError here.
            with suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.CancelledError):
                async with asyncio.timeout(END_S):
                    while await self._call.read() is not grpc.aio.EOF:
                        pass
        finally:
            self._call.cancel()
            self._release()


_ENDING: set[asyncio.Task[None]] = set()
"""Keeps the tasks alive that read streams to their end."""
