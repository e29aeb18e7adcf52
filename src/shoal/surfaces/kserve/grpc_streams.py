"""The responses of one gRPC stream: their order, and one writer at a time."""

from __future__ import annotations

import asyncio
from typing import Any

from google.protobuf.message import Message

from shoal.kserve import FINAL
from shoal.kserve import protocol_pb2 as pb
from shoal.surfaces.kserve.grpc_messages import to_message
from shoal.surfaces.kserve.tensors import InferResponse


class Turn:
    """The place of a request among those of its stream: `wait` returns once the one before it has been answered."""

    def __init__(self, before: asyncio.Future[None] | None) -> None:
        self._before = before
        self._has_passed = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> None:
        if self._before is not None and not self._has_passed:
            await asyncio.wait({self._before})

    def pass_on(self) -> None:
        """End with the turn before: this request waits for nobody, and keeps nobody waiting. Idempotent."""
        if self._has_passed:
            return
        self._has_passed = True
        if self._before is None:
            self.end()
        else:
            self._before.add_done_callback(lambda _: self.end())

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class ResponseStream:
    """Sends the responses of a stream one at a time. `running`: requests that are not answered yet."""

    def __init__(self, context: Any) -> None:
        self.running = 0
        self._context = context
        self._lock = asyncio.Lock()
        self._answered = asyncio.Event()
        self._last: asyncio.Future[None] | None = None

    def count_answered(self, _: object) -> None:
        self.running -= 1
        self._answered.set()

    async def wait_for_answer(self) -> None:
        """Wait until one more request is answered."""
        self._answered.clear()
        await self._answered.wait()

    def take_turn(self) -> Turn:
        turn = Turn(self._last)
        self._last = turn.ended
        return turn

    async def send(self, response: InferResponse, *, final: bool) -> None:
        message = to_message(response)
        message.parameters[FINAL].bool_param = final
        await self._write(pb.ModelStreamInferResponse(infer_response=message))

    async def send_error(self, request: Any, text: str) -> None:
        response = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
        response.parameters[FINAL].bool_param = True
        await self._write(pb.ModelStreamInferResponse(error_message=text, infer_response=response))

    async def _write(self, message: Message) -> None:
        data = message.SerializeToString()
        async with self._lock:
            try:
                await self._context.write(data)
            except Exception as error:  # gRPC has only internal errors for a client that has left
                raise asyncio.CancelledError from error
