"""Build Anthropic's messages from answers, and the events that stream them.

A stream has one open content block at a time. Fragments of a tool call that begins before the one before it is complete
wait for its end.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from shoal.errors import ShoalError, UpstreamFailed
from shoal.http.request import Request
from shoal.surfaces.anthropic import wire
from shoal.surfaces.anthropic.errors import ENCODE, describe_error
from shoal.surfaces.shared import generation
from shoal.types import Chunk, ToolDelta, Usage

Display: TypeAlias = Literal["none", "omitted", "full"]
"""How an answer shows what the model thought: not at all, as an empty block, or as it is."""

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_REASONS: dict[str, wire.StopReason] = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


def start_message(model: str) -> wire.Answer:
    """Build an empty message with a new id."""
    return wire.Answer(id=f"msg_{secrets.token_hex(16)}", model=model)


def display_of(thinking: wire.Thinking | None) -> Display:
    if thinking is None or thinking.type == "disabled":
        return "none"
    return "omitted" if thinking.display == "omitted" else "full"


def to_usage(usage: Usage | None) -> wire.MessageUsage:
    usage = usage or Usage()
    return wire.MessageUsage(
        input_tokens=max(0, usage.prompt_tokens - usage.cached_tokens),
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        output_tokens_details=wire.OutputDetails(thinking_tokens=usage.reasoning_tokens),
    )


def encode_message(begun: wire.Answer, display: Display, stops: Sequence[str], answer: generation.Answer) -> bytes:
    """Encode the whole message."""
    choice = answer.choices[0] if answer.choices else generation.Choice(0)
    content: list[wire.AnswerBlock] = []
    if choice.reasoning and display != "none":
        thought = choice.reasoning if display == "full" else ""
        content.append(wire.ThinkingBlock(thinking=thought, signature=begun.id))
    if choice.text:
        content.append(wire.TextBlock(text=choice.text))
    content += [
        wire.ToolUseBlock(id=call.id, name=call.name, input=_parse_input(call.arguments)) for call in choice.tools
    ]
    reason, stop = _to_stop(choice.finish_reason, choice.stop, stops, called=bool(choice.tools))
    return ENCODE(
        msgspec.structs.replace(
            begun, content=content, stop_reason=reason, stop_sequence=stop, usage=to_usage(answer.usage)
        )
    )


def _parse_input(arguments: str) -> Any:
    """Return the arguments as an object. What is none, as of a call that was cut, goes to the client as a text."""
    try:
        _OBJECT.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {"INVALID_JSON": arguments}
    return msgspec.Raw((arguments or "{}").encode())


def _to_stop(reason: str, stop: str, stops: Sequence[str], *, called: bool) -> tuple[wire.StopReason, str | None]:
    """Return the stop reason, and the stop sequence that was met. Some servers say "stop" after calls."""
    if reason == "stop" and stop in stops:
        return "stop_sequence", stop
    return _REASONS.get(reason, "tool_use" if called else "end_turn"), None


class MessageEvents:
    """Encodes the stream of a message; `begun` is the message without its content.

    `display` as in Display; `stops` are the stop sequences of the request. The last events wait for the usage.
    """

    heartbeat = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, begun: wire.Answer, request: Request, display: Display, stops: Sequence[str]) -> None:
        self._begun = begun
        self._request = request
        self._display = display
        self._stops = stops
        self._raw = False
        self._has_begun = False
        self._count = 0
        self._kind = ""  # of the open block; "" if none is open
        self._call = -1  # the index of the open call
        self._arguments = ""
        self._waiting: dict[int, list[ToolDelta]] = {}
        self._ended_calls: set[int] = set()
        self._called = False
        self._reason = "stop"
        self._stop = ""
        self._usage: Usage | None = None

    def encode_chunk(self, chunk: Chunk) -> bytes:
        if chunk.usage is not None:
            self._usage = self._request.usage = chunk.usage
        if chunk.raw is not None:
            self._raw = True
            return chunk.raw[1]
        if chunk.finish_reason is not None:
            self._reason, self._stop = chunk.finish_reason, chunk.stop
        return b"".join((*self._begin(), *self._push(chunk)))

    def encode_error(self, error: ShoalError) -> bytes:
        return _encode("error", describe_error(error.for_request(self._request.id)))

    def encode_end(self) -> bytes:
        if self._raw:
            return b""
        return b"".join((*self._begin(), *self._finish_calls(), *self._close(), *self._end()))

    def _begin(self) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield _encode("message_start", {"type": "message_start", "message": self._begun})

    def _end(self) -> Iterator[bytes]:
        reason, stop = _to_stop(self._reason, self._stop, self._stops, called=self._called)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        yield _encode("message_delta", {"type": "message_delta", "delta": delta, "usage": to_usage(self._usage)})
        yield _encode("message_stop", {"type": "message_stop"})

    def _push(self, chunk: Chunk) -> Iterator[bytes]:
        if chunk.reasoning and self._display != "none":
            yield from self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            if self._display == "full":
                yield self._delta({"type": "thinking_delta", "thinking": chunk.reasoning})
        if chunk.text and not (chunk.text.isspace() and self._is_within_call()):
            yield from self._switch("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": chunk.text})
        for delta in chunk.tools:
            yield from self._push_call(delta)

    def _push_call(self, delta: ToolDelta) -> Iterator[bytes]:
        self._called = True
        if delta.index in self._ended_calls:
            if delta.arguments.strip():
                raise UpstreamFailed("the server continued a tool call after its end: see its log")
        elif delta.index == self._call:
            yield from self._grow_call(delta)
        elif self._is_within_call():
            self._waiting.setdefault(delta.index, []).append(delta)
        else:
            yield from self._open_call([*self._waiting.pop(delta.index, ()), delta])

    def _is_within_call(self) -> bool:
        """Whether the open block is a call whose arguments are not whole yet."""
        return self._call >= 0 and not _is_object(self._arguments)

    def _open_call(self, deltas: Sequence[ToolDelta]) -> Iterator[bytes]:
        first = deltas[0]
        yield from self._close()
        self._call = first.index
        yield self._start("tool_use", {"type": "tool_use", "id": first.id, "name": first.name, "input": {}})
        for delta in deltas:
            yield from self._grow_call(delta)

    def _grow_call(self, delta: ToolDelta) -> Iterator[bytes]:
        if delta.arguments:
            self._arguments += delta.arguments
            yield self._delta({"type": "input_json_delta", "partial_json": delta.arguments})

    def _finish_calls(self) -> Iterator[bytes]:
        """Send the calls that waited for the end of another."""
        for index in sorted(self._waiting):
            yield from self._open_call(self._waiting.pop(index))

    def _switch(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        """Make a block of text or thinking the open one."""
        if self._kind != kind:
            yield from self._finish_calls()
            yield from self._close()
            yield self._start(kind, block)

    def _start(self, kind: str, block: dict[str, Any]) -> bytes:
        self._kind = kind
        return self._encode_block("content_block_start", "content_block", block)

    def _close(self) -> Iterator[bytes]:
        if not self._kind:
            return
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._begun.id})
        yield _encode("content_block_stop", {"type": "content_block_stop", "index": self._count})
        self._ended_calls.add(self._call)
        self._kind, self._call, self._arguments = "", -1, ""
        self._count += 1

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._encode_block("content_block_delta", "delta", delta)

    def _encode_block(self, name: str, field: str, value: dict[str, Any]) -> bytes:
        return _encode(name, {"type": name, "index": self._count, field: value})


def _is_object(text: str) -> bool:
    try:
        _OBJECT.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _encode(name: str, data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), ENCODE(data))
