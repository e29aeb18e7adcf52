"""Build the output items of OpenAI's responses, and the typed events that stream them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from shoal.errors import Overloaded, ShoalError
from shoal.http.errors import describe_error
from shoal.http.request import Request
from shoal.surfaces.openai import wire_responses as wire
from shoal.surfaces.openai.chat import to_logprobs
from shoal.surfaces.openai.events import ENCODE, HEARTBEAT, AnswerHeader
from shoal.surfaces.shared.generation import Answer
from shoal.types import Chunk, TokenLogprob, ToolDelta, Usage

Kind: TypeAlias = Literal["reasoning", "message", "function_call"]
Event: TypeAlias = tuple[str, dict[str, Any]]

_PREFIX: dict[Kind, str] = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}
_PART: dict[Kind, str] = {"reasoning": "reasoning_text", "message": "output_text"}
_REASONS: dict[str, Literal["max_output_tokens", "content_filter"]] = {
    "length": "max_output_tokens",
    "content_filter": "content_filter",
}


@dataclass(slots=True)
class _Item:
    """An output item. `number` is its place in the output, `call` the index of its tool call (-1: none)."""

    kind: Kind
    number: int
    id: str
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    name: str = ""
    call_id: str = ""
    call: int = -1
    status: wire.ItemStatus = "in_progress"

    def to_wire(self) -> wire.OutputItem:
        if self.kind == "function_call":
            text = "".join(self.parts)
            return wire.CallItem(id=self.id, call_id=self.call_id, name=self.name, arguments=text, status=self.status)
        parts: list[Any] = [self.to_part()] if self.status != "in_progress" else []
        if self.kind == "reasoning":
            return wire.ReasoningItem(id=self.id, content=parts, status=self.status)
        return wire.MessageItem(id=self.id, content=parts, status=self.status)

    def to_part(self) -> wire.OutputText | wire.ReasoningText:
        if self.kind == "reasoning":
            return wire.ReasoningText(text="".join(self.parts))
        return wire.OutputText(text="".join(self.parts), logprobs=_to_logprobs(self.logprobs))


class Output:
    """The items of one answer as it is generated. `push`, `close` and `stop` yield the events of what changed."""

    def __init__(self) -> None:
        self.items: list[_Item] = []
        self._open: list[_Item] = []

    def to_wire(self) -> list[wire.OutputItem]:
        return [item.to_wire() for item in self.items]

    def push(self, chunk: Chunk) -> Iterator[Event]:
        if chunk.reasoning:
            yield from self._grow("reasoning", chunk.reasoning, [])
        if chunk.text or (chunk.logprobs and not chunk.reasoning and not chunk.tools):
            yield from self._grow("message", chunk.text, chunk.logprobs)
        for delta in chunk.tools:
            yield from self._add_call(delta)

    def close(self, status: Literal["completed", "incomplete"] = "completed") -> Iterator[Event]:
        """Finish all open items. An empty answer becomes an empty message."""
        if not self.items:
            yield from self._begin("message")
        yield from self.stop(status)

    def stop(self, status: Literal["completed", "incomplete"] = "incomplete") -> Iterator[Event]:
        """Finish all open items without beginning new ones."""
        for item in self._open:
            yield from self._finish_item(item, status)
        self._open.clear()

    def _grow(self, kind: Kind, text: str, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        item = self._open[-1] if self._open else None
        if item is None or item.kind != kind:
            yield from self._begin(kind)
            item = self._open[-1]
        item.parts.append(text)
        item.logprobs += logprobs
        fields = {**_locate(item), "delta": text}
        if kind == "message":
            fields["logprobs"] = _to_logprobs(logprobs)
        yield f"response.{_PART[kind]}.delta", fields

    def _add_call(self, delta: ToolDelta) -> Iterator[Event]:
        item = next((each for each in self._open if each.call == delta.index), None)
        if item is None:
            yield from self._begin("function_call", delta)
            item = self._open[-1]
        if delta.arguments:
            item.parts.append(delta.arguments)
            fields = {"item_id": item.id, "output_index": item.number, "delta": delta.arguments}
            yield "response.function_call_arguments.delta", fields

    def _begin(self, kind: Kind, delta: ToolDelta | None = None) -> Iterator[Event]:
        """Begin a new item, after finishing an open text item. Several calls may be open at once."""
        for each in [each for each in self._open if each.kind != "function_call"]:
            yield from self._finish_item(each, "completed")
            self._open.remove(each)
        item = _Item(kind, len(self.items), AnswerHeader.create("", _PREFIX[kind]).id)
        if delta is not None:
            item.name, item.call_id, item.call = delta.name, delta.id, delta.index
        self.items.append(item)
        self._open.append(item)
        yield "response.output_item.added", {"output_index": item.number, "item": item.to_wire()}
        if kind != "function_call":
            yield "response.content_part.added", {**_locate(item), "part": item.to_part()}

    def _finish_item(self, item: _Item, status: Literal["completed", "incomplete"]) -> Iterator[Event]:
        text = "".join(item.parts)
        item.status = status
        if item.kind == "function_call":
            fields = {"item_id": item.id, "output_index": item.number, "name": item.name, "arguments": text}
            yield "response.function_call_arguments.done", fields
        else:
            fields = {**_locate(item), "text": text}
            if item.kind == "message":
                fields["logprobs"] = _to_logprobs(item.logprobs)
            yield f"response.{_PART[item.kind]}.done", fields
            yield "response.content_part.done", {**_locate(item), "part": item.to_part()}
        yield "response.output_item.done", {"output_index": item.number, "item": item.to_wire()}


class ResponseEvents:
    """Encodes the stream of a response; `begun` is the response without its answer. Events are numbered, and no [DONE]
    follows."""

    heartbeat = HEARTBEAT

    def __init__(self, begun: wire.Response, request: Request) -> None:
        self._response = begun
        self._request = request
        self._output = Output()
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
            return self._encode_event(("error", alone))
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        failure = wire.ResponseFailure(code=code, message=detail.message)
        data = self._begin() + b"".join(self._encode_event(event) for event in self._output.stop())
        output = self._output.to_wire()
        response = msgspec.structs.replace(self._response, status="failed", error=failure, output=output)
        return data + self._encode_event(("response.failed", {"response": response}))

    def encode_end(self) -> bytes:
        if self._raw:
            return b""
        data = self._begin()
        response = _finish_response(self._response, self._output, self._reason, self._usage or Usage())
        return data + self._encode_event((f"response.{response.status}", {"response": response}))

    def _begin(self) -> bytes:
        if self._number:
            return b""
        fields = {"response": self._response}
        return self._encode_event(("response.created", fields)) + self._encode_event(("response.in_progress", fields))

    def _encode_event(self, event: Event) -> bytes:
        name, fields = event
        number, self._number = self._number, self._number + 1
        data = ENCODE({"type": name, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def encode_body(begun: wire.Response, answer: Answer) -> bytes:
    """Encode the whole response."""
    output, reason = Output(), "stop"
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
    return ENCODE(_finish_response(begun, output, reason, answer.usage or Usage()))


def _finish_response(begun: wire.Response, output: Output, reason: str, usage: Usage) -> wire.Response:
    cut = _REASONS.get(reason)
    return msgspec.structs.replace(
        begun,
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


def _to_status(reason: str) -> Literal["completed", "incomplete"]:
    return "incomplete" if reason in _REASONS else "completed"


def _locate(item: _Item) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.number, "content_index": 0}


def _to_logprobs(tokens: list[TokenLogprob]) -> list[Any]:
    return list(to_logprobs(tokens).content)
