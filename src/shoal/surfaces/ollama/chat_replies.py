"""Convert chunks to Ollama's answers: one line of JSON per chunk, or a single object."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from shoal.errors import ShoalError
from shoal.http.request import Request
from shoal.surfaces.ollama import wire
from shoal.surfaces.shared.generation import estimate_answer_start
from shoal.surfaces.shared.logprobs import to_finite_logprob, token_bytes
from shoal.types import Chunk, TokenLogprob, ToolDelta, Usage

ENCODE = msgspec.json.Encoder().encode
_NS = 1_000_000_000
_ARGUMENTS = msgspec.json.Decoder(dict[str, Any])
_REASONS = {"length": "length"}
"""Every other finish reason is "stop" for Ollama, including tool calls."""


def format_timestamp(ns: int | None = None) -> str:
    """Format nanoseconds since the Unix epoch (None: now) as RFC 3339 in UTC."""
    seconds, rest = divmod(time.time_ns() if ns is None else ns, _NS)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


@dataclass(slots=True, kw_only=True)
class Line:
    """The content of one line."""

    text: str = ""
    thinking: str = ""
    calls: list[wire.OllamaToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.calls or self.logprobs)

    def add(self, other: Line) -> None:
        self.text += other.text
        self.thinking += other.thinking
        self.calls += other.calls
        self.logprobs += other.logprobs


class LineEncoder:
    """Encodes one answer, as a stream (`streaming.StreamEncoder`) or as one object (`gather` and `encode_whole`).

    `kind` decides whether the text is in `message` ("chat") or in `response` ("generate"). `loaded` is when the model
    was ready for the `request`, in seconds of `clock`. Tool calls are sent once their arguments are complete, as an
    object. Arguments that are no object are sent as text, so that nothing is lost. `cut` counts messages that were left
    out.
    """

    heartbeat = b""  # clients read every line as JSON

    def __init__(
        self,
        kind: Literal["chat", "generate"],
        model: str,
        request: Request,
        loaded: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cut = 0
        self.ignored: tuple[str, ...] = ()
        self.replica: int | None = None
        self._kind = kind
        self._model = model
        self._request = request
        self._loaded = loaded
        self._clock = clock
        self._first: float | None = None
        self._pieces = 0
        self._reason = "stop"
        self._open: dict[int, ToolDelta] = {}  # calls that have begun, by their index
        self._calls = 0
        self._total = Line()

    def encode_chunk(self, chunk: Chunk) -> bytes:
        """Encode the line of a chunk; b"" if it has no content yet."""
        line = self._to_line(chunk)
        return self._encode(line, done=False) if line else b""

    def encode_error(self, error: ShoalError) -> bytes:
        return ENCODE(wire.OllamaError(error=error.message)) + b"\n"

    def encode_end(self) -> bytes:
        """Encode the last line, with token counts and durations."""
        return self._encode(self._finish(), done=True)

    def gather(self, chunk: Chunk) -> None:
        self._total.add(self._to_line(chunk))

    def encode_whole(self) -> bytes:
        self._total.add(self._finish())
        return self._encode(self._total, done=True)

    def encode_empty(self, reason: Literal["load", "unload"]) -> bytes:
        """Encode the answer to a request that only loads or unloads the model."""
        counts = wire.OllamaCounts(done_reason=reason)
        return self._encode_object(Line(), counts, done=True) + b"\n"

    def _to_line(self, chunk: Chunk) -> Line:
        if self._first is None:
            self._first = self._clock()
        self.cut += chunk.cut
        self.ignored += chunk.ignored
        self.replica = chunk.replica if self.replica is None else self.replica
        self._pieces += bool(chunk.text or chunk.reasoning or chunk.tools)
        line = Line(text=chunk.text, thinking=chunk.reasoning, logprobs=list(chunk.logprobs))
        for delta in chunk.tools:
            self._take(delta, line)
        if chunk.finish_reason is not None:
            self._reason = _REASONS.get(chunk.finish_reason, "stop")
            self._complete_calls(line, ended=True)
        if chunk.usage is not None:
            self._request.usage = chunk.usage
        return line

    def _take(self, delta: ToolDelta, line: Line) -> None:
        begun = self._open.get(delta.index)
        if begun is not None:
            self._open[delta.index] = msgspec.structs.replace(begun, arguments=begun.arguments + delta.arguments)
            return
        self._complete_calls(line, ended=False)
        self._open[delta.index] = delta

    def _complete_calls(self, line: Line, *, ended: bool) -> None:
        """Complete the open calls in order: if the answer has ended, all of them, else up to one without whole
        arguments, since fragments of several calls may alternate."""
        for index, call in list(self._open.items()):
            arguments = _read_arguments(call.arguments or ("{}" if ended else ""))
            if arguments is None and not ended:
                return
            del self._open[index]
            if arguments is None:
                line.text += f'{{"name": {ENCODE(call.name).decode()}, "arguments": {call.arguments}}}'
                continue
            called = wire.OllamaCalled(name=call.name, arguments=arguments, index=self._calls)
            line.calls.append(wire.OllamaToolCall(id=call.id or None, function=called))
            self._calls += 1

    def _finish(self) -> Line:
        line = Line()
        self._complete_calls(line, ended=True)
        return line

    def _encode(self, line: Line, *, done: bool) -> bytes:
        return self._encode_object(line, self._build_counts() if done else wire.OllamaCounts(), done=done) + b"\n"

    def _build_counts(self) -> wire.OllamaCounts:
        now = self._clock()
        first = now if self._first is None else self._first
        usage = self._request.usage or Usage()
        loaded = self._loaded
        began = estimate_answer_start(usage, first - loaded, now - loaded, self._pieces)
        started = self._request.started
        return wire.OllamaCounts(
            done_reason=self._reason,
            total_duration=_to_ns(now - started),
            load_duration=_to_ns(loaded - started),
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=None if began is None else _to_ns(began),
            eval_count=usage.completion_tokens,
            eval_duration=None if began is None else _to_ns(now - loaded - began),
        )

    def _encode_object(self, line: Line, counts: wire.OllamaCounts, *, done: bool) -> bytes:
        shared: dict[str, Any] = {"model": self._model, "created_at": format_timestamp(), "done": done}
        shared |= msgspec.structs.asdict(counts)
        shared["logprobs"] = [_to_logprob(each) for each in line.logprobs] or None
        thinking = line.thinking or None
        if self._kind == "generate":
            # /api/generate takes no tools, so there are no calls.
            return ENCODE(wire.OllamaGenerateAnswer(response=line.text, thinking=thinking, **shared))
        message = wire.OllamaSaid(role="assistant", content=line.text, thinking=thinking, tool_calls=line.calls or None)
        return ENCODE(wire.OllamaChatAnswer(message=message, **shared))


def _to_ns(seconds: float) -> int:
    return max(0, round(seconds * _NS))


def _to_logprob(each: TokenLogprob) -> wire.OllamaLogprob:
    top: Sequence[TokenLogprob] = each.top
    return wire.OllamaLogprob(
        token=each.token,
        logprob=to_finite_logprob(each.logprob),
        bytes=token_bytes(each),
        top_logprobs=[_to_logprob(other) for other in top] or None,
    )


def _read_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call, None unless the text is a whole object."""
    try:
        return _ARGUMENTS.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
