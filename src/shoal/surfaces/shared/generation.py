"""Shared code of the dialects that generate: collect chunks into answers, measure times, build replies."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

import msgspec

from shoal.http.request import JSON, Headers, Reply, Request
from shoal.http.streaming import StreamEncoder, open_stream_body
from shoal.types import Chunk, Generate, TokenLogprob, ToolCall, ToolDelta, Usage

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

EVENT_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]
HEADER_DOCS = {
    "server-timing": "Milliseconds until the first token, and in total; not for streams.",
    "x-shoal-prompt-cut": "Messages dropped because the conversation was too long; absent if none.",
    "x-shoal-backend": "Number of the replica that answers, of several, in the order of their addresses.",
    "x-shoal-ignored": "Fields of the request that the model does not support and that were ignored; absent if none.",
}

_MAX_TOKENS_PER_PIECE = 8
"""With more tokens per piece than this, a stream was buffered and not sent token by token."""


class Choice(msgspec.Struct):
    """One complete answer. `tools` are the model's tool calls, in order; `stop` as in Chunk."""

    index: int
    text: str = ""
    reasoning: str = ""
    tools: list[ToolCall] = []
    logprobs: list[TokenLogprob] = []
    finish_reason: str = "stop"
    stop: str = ""


class Answer(msgspec.Struct):
    """The content of a whole stream of chunks. `choices` are sorted by index, without gaps if the runner leaves none.

    `raw` is (dialect, body) as an upstream sent it; `choices` is then empty. `first_s` is the time to the first chunk
    and `seconds` the total time, both in seconds. `pieces` counts the chunks with content, `cut` the messages that were
    left out.
    """

    choices: list[Choice] = []
    usage: Usage | None = None
    raw: tuple[str, bytes] | None = None
    first_s: float = 0.0
    seconds: float = 0.0
    pieces: int = 0
    cut: int = 0
    ignored: tuple[str, ...] = ()
    replica: int | None = None


async def collect(chunks: AsyncGenerator[Chunk]) -> Answer:
    """Collect all chunks into one answer, and close them in any case. Raises what the chunks raise."""
    collector = AnswerCollector()
    async with aclosing(chunks):
        async for chunk in chunks:
            collector.add(chunk)
    return collector.build_answer()


class AnswerCollector:
    """Puts chunks together, as they come. Measures from its construction."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._answer = Answer()
        self._parts: dict[int, _Parts] = {}
        self._raw: list[bytes] = []
        self._dialect = ""

    def add(self, chunk: Chunk) -> None:
        answer = self._answer
        answer.first_s = answer.first_s or time.monotonic() - self._began
        if chunk.usage is not None:
            answer.usage = chunk.usage
        if chunk.replica is not None:
            answer.replica = chunk.replica
        if chunk.cut or chunk.ignored:
            answer.cut += chunk.cut
            answer.ignored += chunk.ignored
        if chunk.raw is not None:
            self._dialect, piece = chunk.raw
            self._raw.append(piece)
        elif chunk.usage is None:
            answer.pieces += bool(chunk.text or chunk.reasoning or chunk.tools)
            self._parts.setdefault(chunk.index, _Parts()).add(chunk)

    def build_answer(self) -> Answer:
        """Return the answer of the chunks so far."""
        answer = self._answer
        answer.choices = [self._parts[index].to_choice(index) for index in sorted(self._parts)]
        answer.raw = (self._dialect, b"".join(self._raw)) if self._raw else None
        answer.seconds = time.monotonic() - self._began
        return answer


class _Parts:
    """Accumulates the pieces of one choice."""

    __slots__ = ("calls", "finish_reason", "logprobs", "reasoning", "stop", "text")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, list[ToolDelta]] = {}
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason = "stop"
        self.stop = ""

    def add(self, chunk: Chunk) -> None:
        if chunk.text:
            self.text.append(chunk.text)
        if chunk.reasoning:
            self.reasoning.append(chunk.reasoning)
        for delta in chunk.tools:
            self.calls.setdefault(delta.index, []).append(delta)
        self.logprobs += chunk.logprobs
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.stop = chunk.stop or self.stop

    def to_choice(self, index: int) -> Choice:
        calls = [
            ToolCall(id=deltas[0].id, name=deltas[0].name, arguments="".join(each.arguments for each in deltas))
            for _, deltas in sorted(self.calls.items())
        ]
        text, reasoning = "".join(self.text), "".join(self.reasoning)
        return Choice(index, text, reasoning, calls, self.logprobs, self.finish_reason, self.stop)


async def generate_reply(
    gateway: Gateway,
    request: Request,
    task: Generate,
    *,
    frames: Callable[[], StreamEncoder],
    body: Callable[[Answer], bytes],
    heartbeat_s: float,
    ignored: Sequence[str] = (),
) -> Reply:
    """Run a task and return its reply: a stream, or the whole answer.

    An upstream's raw reply in the same dialect is passed through unchanged. `ignored`: what of the request is not in
    the task, and so in no other reply. Raises what the gateway raises before the first chunk.
    """
    request.model, request.items = task.model, task.choices
    chunks = gateway.stream(task, request.context())
    if task.stream:
        stream = await open_stream_body(chunks, frames(), heartbeat_s, request_id=request.id, exchange=request.exchange)
        return Reply(200, [*EVENT_STREAM, *_list_remarks(stream.first, ignored)], stream)
    answer = await collect(chunks)
    request.usage = answer.usage
    timing = b"total;dur=%.2f" % (answer.seconds * 1000)
    if answer.usage and estimate_answer_start(answer.usage, answer.first_s, answer.seconds, answer.pieces) is not None:
        timing = b"first;dur=%.2f, %b" % (answer.first_s * 1000, timing)
    content = answer.raw[1] if answer.raw is not None else body(answer)
    return Reply(200, [JSON, (b"server-timing", timing), *_list_remarks(answer, ignored)], content)


def _list_remarks(answer: Answer | Chunk | None, ignored: Sequence[str]) -> Headers:
    """Return the headers of an answer. A server that got the request as it came has ignored nothing of it."""
    return prompt_headers(answer, ignored if answer is None or answer.raw is None else ())


def estimate_answer_start(usage: Usage, first_s: float, seconds: float, pieces: int) -> float | None:
    """Estimate when prompt processing ended and generation began: `first_s`, or None if it cannot be known.

    It is unknown for an answer in one piece. It is also unknown for an answer that was held back, as tool calls are,
    and came in a few large pieces at the end.
    """
    whole = pieces <= 1 < usage.completion_tokens
    held = pieces * _MAX_TOKENS_PER_PIECE < usage.completion_tokens and seconds - first_s < seconds / 4
    return None if whole or held else first_s


class PromptRemarks(Protocol):
    """Says what was left out of a request and which replica answers it: a chunk, or what is collected from chunks."""

    @property
    def cut(self) -> int: ...
    @property
    def ignored(self) -> tuple[str, ...]: ...
    @property
    def replica(self) -> int | None: ...


def prompt_headers(remarks: PromptRemarks | None, left_out: Sequence[str] = ()) -> Headers:
    """Return the headers that report left-out messages, ignored fields and the replica. `left_out`: further ignored
    fields."""
    made: Headers = []
    ignored = (*left_out, *(remarks.ignored if remarks is not None else ()))
    if remarks is not None and remarks.replica is not None:
        made.append((b"x-shoal-backend", b"%d" % remarks.replica))
    if remarks is not None and remarks.cut:
        made.append((b"x-shoal-prompt-cut", b"%d" % remarks.cut))
    if ignored:
        made.append((b"x-shoal-ignored", ", ".join(ignored).encode()))
    return made
