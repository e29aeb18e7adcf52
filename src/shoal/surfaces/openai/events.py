"""Shared code of the streams and answers of chat and legacy completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import NamedTuple, Self

import msgspec

from shoal.errors import InvalidValue, ShoalError
from shoal.http.errors import render_stream_error
from shoal.http.request import Request
from shoal.surfaces.openai import wire_chat as wire
from shoal.surfaces.shared.generation import Answer, estimate_answer_start
from shoal.types import Chunk, Usage

ENCODE = msgspec.json.Encoder().encode
HEARTBEAT = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
_DONE_LINES = (b"data: [DONE]", b"data:[DONE]")  # the forms that upstreams use


class AnswerHeader(NamedTuple):
    """The fields that every event of an answer repeats."""

    id: str
    created: int
    model: str

    @classmethod
    def create(cls, model: str, prefix: str) -> Self:
        """Create a header with a new id: the prefix and 32 random characters, which nobody can guess: stored answers
        are found by it."""
        return cls(f"{prefix}{secrets.token_hex(16)}", int(time.time()), model)


class CompletionEvents:
    """Encodes a stream of completions. Subclasses encode the chunks of a choice in `_encode_choice_chunk`.

    The event that finishes the last choice is held back until the usage arrives, which comes next. It then carries the
    timings if the client did not request a usage event. `choices` is the number of choices that will finish.
    """

    heartbeat = HEARTBEAT

    def __init__(
        self,
        header: AnswerHeader,
        object_name: str,
        request: Request,
        *,
        choices: int,
        include_usage: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request = request
        self._include_usage = include_usage
        self._clock = clock
        self._open_choices = choices
        self._held_events = b""
        self._first: float | None = None
        self._pieces = 0
        self._last_raw = b""
        head = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"choices":['
        self.head = head % (ENCODE(header.id), ENCODE(object_name), header.created, ENCODE(header.model))
        self.tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def encode_chunk(self, chunk: Chunk) -> bytes:
        if self._first is None:
            self._first = self._clock()
        if chunk.usage is not None:
            self._request.usage = chunk.usage
        if chunk.raw is not None:
            self._last_raw = chunk.raw[1]
            return self._last_raw
        if chunk.usage is not None:
            return self._encode_usage(chunk.usage, self._first)
        self._pieces += bool(chunk.text or chunk.reasoning or chunk.tools)
        return self._encode_choice_chunk(chunk)

    def encode_error(self, error: ShoalError) -> bytes:
        # langchain4j only recognizes named error events. [DONE] is left out, so that no client takes the answer for
        # complete.
        return b"%bevent: error\ndata: %b\n\n" % (self._release(), render_stream_error(error))

    def encode_end(self) -> bytes:
        done = self._last_raw[-32:].rstrip().endswith(_DONE_LINES)
        return self._release() + (b"" if done else DONE)

    def finish_choice(self, event: bytes) -> bytes:
        """Return the event that finishes a choice, or b"" for the last choice, whose event is held back."""
        self._open_choices -= 1
        if self._open_choices:
            return event
        self._held_events += event
        return b""

    def _encode_choice_chunk(self, chunk: Chunk) -> bytes:
        raise NotImplementedError

    def _release(self, more: bytes = b"") -> bytes:
        """Return the held-back event. `more` is added to its JSON object."""
        held, self._held_events = self._held_events, b""
        return b"%b%b}\n\n" % (held[: -len(b"}\n\n")], more) if held else b""

    def _encode_usage(self, usage: Usage, first: float) -> bytes:
        started = self._request.started
        took = ENCODE(compute_timings(usage, first - started, self._clock() - started, self._pieces))
        if not self._include_usage:
            return self._release(b',"timings":' + took)
        tail = b'],"usage":%b,"timings":%b}\n\n' % (ENCODE(to_usage(usage)), took)
        return self._release() + self.head + tail


def wants_usage(payload: wire.CompletionFields) -> bool:
    """Whether a stream ends with a usage event. Raises InvalidValue, as OpenAI does, for stream options without a
    stream."""
    if payload.stream_options is None:
        return False
    if not payload.stream:
        raise InvalidValue(
            "'stream_options' is only allowed when 'stream' is true; set it, or omit the options.",
            param="stream_options",
        )
    return bool(payload.stream_options.include_usage)


def to_usage(usage: Usage) -> wire.CompletionUsage:
    return wire.CompletionUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=wire.PromptDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=wire.CompletionDetails(reasoning_tokens=usage.reasoning_tokens),
    )


def compute_timings(usage: Usage, first_s: float, seconds: float, pieces: int) -> wire.Timings:
    """Compute the timings of a request with its first chunk after `first_s` and `seconds` in all, both in seconds.

    `pieces` is the number of chunks with content.
    """
    began = estimate_answer_start(usage, first_s, seconds, pieces)
    prompt = usage.prompt_tokens - usage.cached_tokens
    counts = wire.Timings(prompt_n=prompt, predicted_n=usage.completion_tokens, cache_n=usage.cached_tokens)
    if began is None:
        return counts
    return msgspec.structs.replace(
        counts,
        prompt_ms=began * 1000,
        prompt_per_second=_rate(prompt, began),
        predicted_ms=(seconds - began) * 1000,
        predicted_per_second=_rate(usage.completion_tokens, seconds - began),
    )


def to_timings(answer: Answer) -> wire.Timings | msgspec.UnsetType:
    if answer.usage is None:
        return msgspec.UNSET
    return compute_timings(answer.usage, answer.first_s, answer.seconds, answer.pieces)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
