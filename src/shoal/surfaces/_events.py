"""What the streams and answers of chat and of legacy completions have in common."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import NamedTuple, Self

import msgspec

from shoal.errors import ShoalError
from shoal.surfaces import _wire_chat as wire
from shoal.surfaces._errors import error_object
from shoal.surfaces._generation import Answer
from shoal.surfaces._request import Request
from shoal.types import Chunk, TokenLogprob, Usage

ENCODE = msgspec.json.Encoder().encode
HEARTBEAT = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
_ENDS = (b"data: [DONE]", b"data:[DONE]")  # as upstreams write it
UNLIKELY = -9999.0
"""JSON has no infinity; OpenAI writes this instead."""

_HELD = 8
"""More tokens a piece than this are no stream of tokens."""


class Said(NamedTuple):
    """What every event of an answer repeats."""

    id: str
    created: int
    model: str

    @classmethod
    def by(cls, model: str, prefix: str) -> Self:
        """With a new id: the prefix and 32 random characters."""
        return cls(prefix + os.urandom(16).hex(), int(time.time()), model)


class Events:
    """The frames of a stream of completions, but for how a chunk of a choice is told: that is the subclass's `_told`.

    The event that finishes the last choice waits for the usage, which comes next, so that it can carry the timings
    where nobody asked for an event of the usage itself. `choices`: how many will finish.
    """

    heartbeat = HEARTBEAT

    def __init__(
        self,
        said: Said,
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
        self._unfinished = choices
        self._held = b""
        self._first: float | None = None
        self._pieces = 0
        self._done = False
        head = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"choices":['
        self.head = head % (ENCODE(said.id), ENCODE(object_name), said.created, ENCODE(said.model))
        self.tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, chunk: Chunk) -> bytes:
        if self._first is None:
            self._first = self._clock()
        if chunk.usage is not None:
            self._request.usage = chunk.usage
        if chunk.raw is not None:
            raw = chunk.raw[1]
            self._done = raw[-32:].rstrip().endswith(_ENDS)
            return raw
        if chunk.usage is not None:
            return self._used(chunk.usage, self._first)
        self._pieces += bool(chunk.text or chunk.reasoning or chunk.tools)
        return self._told(chunk)

    def failed(self, error: ShoalError) -> bytes:
        return b"%bdata: %b\n\n%b" % (self._released(), error_object(error), DONE)

    def end(self) -> bytes:
        return self._released() + (b"" if self._done else DONE)

    def finish(self, event: bytes) -> bytes:
        """The event that finishes a choice, or nothing yet where it is the last one."""
        self._unfinished -= 1
        if self._unfinished:
            return event
        self._held += event
        return b""

    def _told(self, chunk: Chunk) -> bytes:
        raise NotImplementedError

    def _released(self, more: bytes = b"") -> bytes:
        """What was held back; `more` becomes part of its object."""
        held, self._held = self._held, b""
        return b"%b%b}\n\n" % (held[: -len(b"}\n\n")], more) if held else b""

    def _used(self, usage: Usage, first: float) -> bytes:
        started = self._request.started
        took = ENCODE(timings(usage, first - started, self._clock() - started, self._pieces))
        if not self._include_usage:
            return self._released(b',"timings":' + took)
        tail = b'],"usage":%b,"timings":%b}\n\n' % (ENCODE(usage_of(usage)), took)
        return self._released() + self.head + tail


def usage_of(usage: Usage) -> wire.CompletionUsage:
    return wire.CompletionUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=wire.PromptDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=wire.CompletionDetails(reasoning_tokens=usage.reasoning_tokens),
    )


def timings(usage: Usage, first_s: float, seconds: float, pieces: int = 0) -> wire.Timings:
    """Of a request whose first chunk came after `first_s`, and which was told in so many `pieces` (0: not counted)."""
    first_s = answer_began(usage, first_s, seconds, pieces)
    prompt = usage.prompt_tokens - usage.cached_tokens
    return wire.Timings(
        prompt_n=prompt,
        prompt_ms=first_s * 1000,
        prompt_per_second=_rate(prompt, first_s),
        predicted_n=usage.completion_tokens,
        predicted_ms=(seconds - first_s) * 1000,
        predicted_per_second=_rate(usage.completion_tokens, seconds - first_s),
        cache_n=usage.cached_tokens,
    )


def answer_began(usage: Usage, first_s: float, seconds: float, pieces: int) -> float:
    """When the time of the answer began: `first_s`, or 0.

    An answer that came in one piece tells nothing of its prompt: all of its time counts as the answer's. So it is with
    one that was held back, as calls of tools are, and came in a few large pieces at the end.
    """
    held = 0 < pieces * _HELD < usage.completion_tokens and seconds - first_s < seconds / 4
    return 0.0 if held or seconds - first_s < seconds / 100 else first_s


def timings_of(answer: Answer) -> wire.Timings | msgspec.UnsetType:
    if answer.usage is None:
        return msgspec.UNSET
    return timings(answer.usage, answer.first_s, answer.seconds, answer.pieces)


def likelihood(value: float) -> float:
    return value if math.isfinite(value) else UNLIKELY


def bytes_of(token: TokenLogprob) -> list[int]:
    return list(token.data if token.data is not None else token.token.encode("utf-8", "replace"))


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
