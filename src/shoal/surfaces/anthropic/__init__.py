"""Anthropic's Messages API: messages and token counts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.core.protocols import Operation
from shoal.errors import ShoalError
from shoal.http.json.extras import ExtrasDecoder
from shoal.http.operation import DocumentedOperation
from shoal.http.request import JSON, Options, Reply, Request
from shoal.surfaces.anthropic import wire
from shoal.surfaces.anthropic.errors import ENCODE, render_error
from shoal.surfaces.anthropic.replies import MessageEvents, display_of, encode_message, start_message
from shoal.surfaces.anthropic.requests import DIALECT, Conversion, build_task
from shoal.surfaces.shared.generation import HEADER_DOCS, generate_reply, prompt_headers

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

_ERRORS: dict[int, Any] = dict.fromkeys((400, 404, 429, 500, 502, 504, 529), wire.AnthropicError)
_HEADERS = {**HEADER_DOCS, "request-id": "ID of the request, the same as `x-request-id`."}
_EXAMPLE = {
    "model": "Qwen/Qwen2.5-0.5B-Instruct",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "What is a shoal?"}],
}


class Anthropic:
    name = "anthropic"
    error = wire.AnthropicError

    def __init__(self, options: Options) -> None:
        self._options = options

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        endpoints = _Endpoints(gateway, self._options.heartbeat_s)
        return [
            DocumentedOperation(
                method="POST",
                path="/v1/messages",
                endpoint=endpoints.create,
                summary="Generate a message",
                request=wire.MessagesRequest,
                response=wire.Answer,
                other_responses=(("text/event-stream", str),),
                errors=_ERRORS,
                headers=_HEADERS,
                description="With `stream`, the message is sent as server-sent events while it is generated. Servers "
                "that speak this API receive the body unchanged.",
                example=_EXAMPLE,
                generates=True,
            ),
            DocumentedOperation(
                method="POST",
                path="/v1/messages/count_tokens",
                endpoint=endpoints.count,
                summary="Count the tokens of a message",
                request=wire.MessagesRequest,
                response=wire.TokenCount,
                errors=_ERRORS,
                headers={"request-id": _HEADERS["request-id"]},
                example=_EXAMPLE,
                generates=True,
            ),
        ]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return render_error(error)


class _Endpoints:
    def __init__(self, gateway: Gateway, heartbeat_s: float) -> None:
        self._gateway = gateway
        self._heartbeat_s = heartbeat_s
        self._decode: ExtrasDecoder[wire.MessagesRequest] = ExtrasDecoder(
            wire.MessagesRequest, "anthropic", "messages", also=("system",)
        )

    async def create(self, request: Request) -> Reply:
        payload, (task, ignored) = await self._convert(request)
        begun = start_message(f"{task.model}:{task.adapter}" if task.adapter else task.model)
        display, stops = display_of(payload.thinking), task.sampling.stop
        reply = await generate_reply(
            self._gateway,
            request,
            task,
            frames=partial(MessageEvents, begun, request, display, stops),
            body=partial(encode_message, begun, display, stops),
            heartbeat_s=self._heartbeat_s,
            ignored=ignored,
        )
        reply.headers = [*reply.headers, _request_id(request)]
        return reply

    async def count(self, request: Request) -> Reply:
        _, (task, ignored) = await self._convert(request)
        request.model, request.items = task.model, 1
        ctx = request.context()
        request.is_handed_over = False  # only the HTTP layer counts failures to count
        tokens = await self._gateway.count_tokens(task, ctx)
        headers = [JSON, *prompt_headers(None, ignored), _request_id(request)]
        return Reply(200, headers, ENCODE(wire.TokenCount(input_tokens=tokens)))

    async def _convert(self, request: Request) -> tuple[wire.MessagesRequest, Conversion]:
        payload, fields, extras = await self._decode(request.body)
        model, adapter = self._gateway.resolve(payload.model)
        return payload, build_task(payload, model, adapter, raw=(DIALECT, fields), extras=extras)


def _request_id(request: Request) -> tuple[bytes, bytes]:
    return b"request-id", request.id.encode()
