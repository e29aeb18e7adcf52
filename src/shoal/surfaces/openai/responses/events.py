"""Encode responses: whole, and as the typed events that stream them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from shoal.errors import Overloaded, ShoalError
from shoal.http.errors import describe_error
from shoal.http.request import Request
from shoal.surfaces.openai.events import ENCODE, HEARTBEAT
from shoal.surfaces.openai.responses import wire_output as wire
from shoal.surfaces.openai.responses.output import Ending, Event, Output
from shoal.surfaces.openai.responses.reasoning import ReasoningForm
from shoal.surfaces.openai.responses.tool_names import ToolNames
from shoal.surfaces.shared.generation import Answer
from shoal.types import Chunk, ToolDelta, Usage

_REASONS: dict[str, Literal["max_output_tokens", "content_filter"]] = {
    "length": "max_output_tokens",
    "content_filter": "content_filter",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to answer a request. `begun`: the response without its answer. `keep` stores the whole response, if the
    client wants that."""

    begun: wire.Response
    names: ToolNames
    form: ReasoningForm
    keep: Callable[[bytes], None]

    def new_output(self) -> Output:
        return Output(self.names, self.form)


class ResponseEvents:
    """Encodes the stream of a response. Events are numbered, and no [DONE] follows."""

    heartbeat = HEARTBEAT

    def __init__(self, plan: Plan, request: Request) -> None:
        self._plan = plan
        self._request = request
        self._output = plan.new_output()
        self._number = 0
        self._raw = False
        self._reason = "stop"
        self._usage: Usage | None = None

    def encode_chunk(self, chunk: Chunk) -> bytes:
        if chunk.usage is not None:
            self._usage = self._request.usage = chunk.usage
        if chunk.raw is not None:
            self._raw = True
            return chunk.raw[1]
        data = self._begin()
        if chunk.usage is None:
            data += b"".join(self._encode_event(event) for event in self._output.push(chunk))
        if chunk.finish_reason is not None:
            self._reason = chunk.finish_reason
            data += b"".join(self._encode_event(event) for event in self._output.close(_to_status(chunk.finish_reason)))
        return data

    def encode_error(self, error: ShoalError) -> bytes:
        detail = describe_error(error)
        if self._raw:
            # The upstream numbered its own events; this one does not continue their numbers.
            alone = {"code": detail.code or detail.type, "message": detail.message, "param": detail.param}
            return self._encode("error", alone)
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        failure = wire.ResponseFailure(code=code, message=detail.message)
        data = self._begin() + b"".join(self._encode_event(event) for event in self._output.stop())
        output = self._output.to_wire()
        response = msgspec.structs.replace(self._plan.begun, status="failed", error=failure, output=output, store=False)
        return data + self._encode_event(("failed", {"response": response}))

    def encode_end(self) -> bytes:
        if self._raw:
            return b""
        data = self._begin()
        response = _finish_response(self._plan, self._output, self._reason, self._usage or Usage())
        body = ENCODE(response)
        self._plan.keep(body)
        return data + self._encode_event((response.status, {"response": msgspec.Raw(body)}))

    def _begin(self) -> bytes:
        if self._number:
            return b""
        fields = {"response": msgspec.Raw(ENCODE(self._plan.begun))}
        return self._encode_event(("created", fields)) + self._encode_event(("in_progress", fields))

    def _encode_event(self, event: Event) -> bytes:
        name, fields = event
        return self._encode(f"response.{name}", fields)

    def _encode(self, name: str, fields: Mapping[str, object]) -> bytes:
        number, self._number = self._number, self._number + 1
        data = ENCODE({"type": name, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def encode_body(plan: Plan, answer: Answer) -> bytes:
    """Encode the whole response."""
    output, reason = plan.new_output(), "stop"
    for choice in answer.choices:
        reason = choice.finish_reason
        tools = [
            ToolDelta(index=index, id=call.id, name=call.name, arguments=call.arguments)
            for index, call in enumerate(choice.tools)
        ]
        whole = Chunk(text=choice.text, reasoning=choice.reasoning, tools=tools, logprobs=choice.logprobs)
        for _ in output.push(whole):
            pass  # the events are for streams
    for _ in output.close(_to_status(reason)):
        pass
    body = ENCODE(_finish_response(plan, output, reason, answer.usage or Usage()))
    plan.keep(body)
    return body


def _finish_response(plan: Plan, output: Output, reason: str, usage: Usage) -> wire.Response:
    cut = _REASONS.get(reason)
    return msgspec.structs.replace(
        plan.begun,
        status="incomplete" if cut else "completed",
        incomplete_details=wire.Incomplete(reason=cut) if cut else None,
        output=output.to_wire(),
        usage=wire.ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=wire.InputDetails(cached_tokens=usage.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=wire.OutputDetails(reasoning_tokens=usage.reasoning_tokens),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        ),
    )


def _to_status(reason: str) -> Ending:
    return "incomplete" if reason in _REASONS else "completed"
