"""Parses answers of chat and completions, streamed or whole, into typed chunks."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shoal.backends.base.finish_reasons import ABORTED_REASONS
from shoal.backends.base.http_answer import Answer
from shoal.backends.openai.errors import failure_error, find_failure, invalid_answer_error
from shoal.backends.openai.tool_calls import ToolCalls
from shoal.backends.openai.wire import (
    AnswerWire,
    ChoiceWire,
    LogprobsWire,
    MessageWire,
    TokenWire,
    TypedWholeWire,
    UsageEventWire,
    UsageWire,
    WholeWire,
)
from shoal.decoding import json_decoder
from shoal.errors import UpstreamFailed
from shoal.types import Chunk, TokenLogprob, Usage

_ANSWER = json_decoder(AnswerWire)
_WHOLE = json_decoder(WholeWire)
_WHOLE_USAGE = json_decoder(UsageWire)
_USAGE = json_decoder(UsageEventWire)
_TYPED_WHOLE = json_decoder(TypedWholeWire)
NO_CHOICES = "no choices"
NO_OUTPUT = "no output"
_REASONS = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}


def read_whole(answer: Answer) -> Usage | None:
    """Return the usage of a whole answer of chat or completions, None if it reports none, without decoding the rest.
    Raises UpstreamRefused for an answer that is an error, has no choices, or is not JSON."""
    if error := find_failure(answer.body, answer.key):
        raise error
    try:
        whole = _WHOLE.decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise invalid_answer_error(NO_CHOICES if answer.has_json_body else "invalid JSON") from None
    if not whole.choices:
        raise invalid_answer_error(NO_CHOICES)
    try:
        return _WHOLE_USAGE.decode(whole.usage).to_usage()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_typed_whole(answer: Answer) -> Usage | None:
    """As `read_whole`, for the Responses API and Anthropic's Messages, whose answers may be empty lists. A response
    that failed has its error beside its output, and is an answer."""
    try:
        whole = _TYPED_WHOLE.decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise invalid_answer_error(NO_OUTPUT if answer.has_json_body else "invalid JSON") from None
    if not any(bytes(each).startswith(b"[") for each in (whole.output, whole.content)):
        raise find_failure(answer.body, answer.key) or invalid_answer_error(NO_OUTPUT)
    return parse_usage(answer.body)


def parse_usage(body: bytes, before: Usage | None = None) -> Usage | None:
    """Return the usage in the JSON of an event or a whole answer, or None. `before`: that of the event before it, whose
    counts hold where this one has none."""
    try:
        parsed = _USAGE.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # the answer is passed on anyway, without a count
    inner = parsed.response or parsed.message
    usage = parsed.usage or (inner.usage if inner is not None else None)
    if usage is None:
        return None
    found = usage.to_usage()
    if before is None:
        return found
    counts = msgspec.structs.asdict(found)
    return msgspec.structs.replace(before, **{name: count for name, count in counts.items() if count})


class AnswerReader:
    """Parses the events or the single body of one answer into chunks. `usage` is the last one reported.

    `read` raises UpstreamRefused for any other JSON and for an error in mid-stream; the message never contains Shoal's
    `key`. `replica` goes on the first chunk. `finish` returns the last chunks: the finish reasons, held back because
    some servers continue after sending one, then the usage.
    """

    def __init__(self, *, reasoning: bool = True, key: bytes = b"", replica: int | None = None) -> None:
        self.usage: Usage | None = None
        self._key = key
        self._reasoning = reasoning
        self._reasons: dict[int, str] = {}  # by choice that began; "" if there is none yet
        self._stops: dict[int, str] = {}
        self._calls = ToolCalls()
        self._replica = replica

    @property
    def began(self) -> bool:
        """Whether any choice began."""
        return bool(self._reasons)

    @property
    def finished(self) -> bool:
        """Whether at least one choice began, and all that began have a finish reason."""
        return bool(self._reasons) and all(self._reasons.values())

    def read(self, body: bytes) -> Iterator[Chunk]:
        try:
            answer = _ANSWER.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid_answer_error(f"a response that does not match OpenAI's API ({error})") from None
        if answer.error:
            raise failure_error(body, self._key)
        if answer.usage is not None:
            self.usage = answer.usage.to_usage()
        for place, choice in enumerate(answer.choices or ()):
            chunks = self._chunks(choice, place if choice.index is None else choice.index)
            yield from chunks if self._replica is None else self._mark(chunks)

    def _mark(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks, the first one with the number of the replica."""
        for chunk in chunks:
            yield msgspec.structs.replace(chunk, replica=self._replica)
            self._replica = None
            yield from chunks

    def finish(self) -> Iterator[Chunk]:
        for index, reason in self._reasons.items():
            rest, stop = list(self._calls.rest(index)), self._stops.get(index, "")
            yield Chunk(index=index, tools=rest, finish_reason=reason or "stop", stop=stop)
        if self.usage is not None:
            yield Chunk(usage=self.usage)

    def _chunks(self, choice: ChoiceWire, index: int) -> Iterator[Chunk]:
        message = choice.delta or choice.message or MessageWire()
        text = choice.text or _text(message.content) or message.refusal or ""
        thought = (message.reasoning_content or message.reasoning or "") if self._reasoning else ""
        tools = self._calls.read(index, message)
        logprobs = _logprobs(choice.logprobs)
        self._reasons.setdefault(index, "")
        if choice.finish_reason:  # some servers send "" for null
            if choice.finish_reason.lower() in ABORTED_REASONS:
                raise UpstreamFailed(f"the server aborted the answer ({choice.finish_reason}): send the request again")
            self._reasons[index] = _REASONS.get(choice.finish_reason, "stop")
            self._stops[index] = choice.stop
        if thought and text:  # reasoning precedes the text
            yield Chunk(index=index, reasoning=thought)
            thought = ""
        if text or thought or tools or logprobs:
            yield Chunk(index=index, text=text, reasoning=thought, tools=tools, logprobs=logprobs)


def _text(content: str | list[dict[str, object]] | None) -> str:
    if isinstance(content, list):
        return "".join(text for part in content if isinstance(text := part.get("text"), str))
    return content or ""


def _logprobs(logprobs: LogprobsWire | None) -> list[TokenLogprob]:
    if logprobs is None:
        return []
    if logprobs.content:
        return [_token(token) for token in logprobs.content]
    tokens, values = logprobs.tokens or [], logprobs.token_logprobs or []
    tops = logprobs.top_logprobs or [None] * len(tokens)
    return [
        TokenLogprob(
            token=token,
            logprob=0.0 if value is None else value,  # null for the first token of an echoed prompt
            top=[TokenLogprob(token=other, logprob=logprob) for other, logprob in (top or {}).items()],
        )
        for token, value, top in zip(tokens, values, tops, strict=False)
    ]


def _token(token: TokenWire) -> TokenLogprob:
    data = None if token.bytes is None else bytes(byte & 0xFF for byte in token.bytes)
    return TokenLogprob(
        token=token.token,
        logprob=token.logprob,
        data=None if data == token.token.encode() else data,
        top=[_token(other) for other in token.top_logprobs or ()],
    )
