"""Answers of chat and completions, in events or whole, as typed chunks."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shoal.backends.openai.errors import failure_error, invalid_answer_error
from shoal.backends.openai.tool_calls import ToolCalls
from shoal.backends.openai.wire import (
    AnswerWire,
    ChoicesWire,
    ChoiceWire,
    LogprobsWire,
    MessageWire,
    TokenWire,
    UsageEventWire,
)
from shoal.decoding import json_decoder
from shoal.types import Chunk, TokenLogprob, Usage

_ANSWER = json_decoder(AnswerWire)
_CHOICES = json_decoder(ChoicesWire)
_USAGE = json_decoder(UsageEventWire)
_REASONS = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}


def has_choices(body: bytes) -> bool:
    """Whether a whole answer of chat or completions holds any."""
    try:
        return bool(_CHOICES.decode(body).choices)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def parse_usage(body: bytes) -> Usage | None:
    """The usage that the JSON of an event or of a whole answer tells; None where it does not."""
    try:
        told = _USAGE.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # it is passed on all the same; only nothing is counted
    usage = told.usage or (told.response.usage if told.response is not None else None)
    return None if usage is None else usage.to_usage()


class AnswerReader:
    """The events of one answer, or the one body of it, to chunks. `usage` is what it told last.

    `read` raises UpstreamRefused for what is no such answer, and for an error in mid-stream, in which Shoal's own `key`
    is not repeated. `finish` are the last chunks, once everything was read: the finish reasons, because some servers go
    on after they told one, then the usage.
    """

    def __init__(self, *, reasoning: bool = True, key: bytes = b"") -> None:
        self.usage: Usage | None = None
        self._key = key
        self._reasoning = reasoning
        self._reasons: dict[int, str] = {}  # of the choices that began; "" where there is none yet
        self._calls = ToolCalls()

    @property
    def began(self) -> bool:
        """There was a choice."""
        return bool(self._reasons)

    @property
    def finished(self) -> bool:
        """Every choice that began has its finish reason, and there is one."""
        return bool(self._reasons) and all(self._reasons.values())

    def read(self, body: bytes) -> Iterator[Chunk]:
        try:
            answer = _ANSWER.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid_answer_error(f"what is not of OpenAI's API ({error})") from None
        if answer.error:
            raise failure_error(body, self._key)
        if answer.usage is not None:
            self.usage = answer.usage.to_usage()
        for place, choice in enumerate(answer.choices or ()):
            yield from self._chunks(choice, place if choice.index is None else choice.index)

    def finish(self) -> Iterator[Chunk]:
        for index, reason in self._reasons.items():
            yield Chunk(index=index, tools=list(self._calls.rest(index)), finish_reason=reason or "stop")
        if self.usage is not None:
            yield Chunk(usage=self.usage)

    def _chunks(self, choice: ChoiceWire, index: int) -> Iterator[Chunk]:
        told = choice.delta or choice.message or MessageWire()
        text = choice.text or _text(told.content) or told.refusal or ""
        thought = (told.reasoning_content or told.reasoning or "") if self._reasoning else ""
        tools = self._calls.read(index, told)
        logprobs = _logprobs(choice.logprobs)
        self._reasons.setdefault(index, "")
        if choice.finish_reason:  # "" is how some servers write null
            self._reasons[index] = _REASONS.get(choice.finish_reason, "stop")
        if thought and text:  # a chunk's thoughts come before its text, whoever reads it
            yield Chunk(index=index, reasoning=thought)
            thought = ""
        if text or thought or tools or logprobs:
            yield Chunk(index=index, text=text, reasoning=thought, tools=tools, logprobs=logprobs)


def _text(content: str | list[dict[str, object]] | None) -> str:
    if isinstance(content, list):
        return "".join(text for part in content if isinstance(text := part.get("text"), str))
    return content or ""


def _logprobs(told: LogprobsWire | None) -> list[TokenLogprob]:
    if told is None:
        return []
    if told.content:
        return [_token(token) for token in told.content]
    tokens, values = told.tokens or [], told.token_logprobs or []
    tops = told.top_logprobs or [None] * len(tokens)
    return [
        TokenLogprob(
            token=token,
            logprob=0.0 if value is None else value,  # null for the first token of an echoed prompt
            top=[TokenLogprob(token=other, logprob=logprob) for other, logprob in (top or {}).items()],
        )
        for token, value, top in zip(tokens, values, tops, strict=False)
    ]


def _token(told: TokenWire) -> TokenLogprob:
    data = None if told.bytes is None else bytes(byte & 0xFF for byte in told.bytes)
    return TokenLogprob(
        token=told.token,
        logprob=told.logprob,
        data=None if data == told.token.encode() else data,
        top=[_token(other) for other in told.top_logprobs or ()],
    )
