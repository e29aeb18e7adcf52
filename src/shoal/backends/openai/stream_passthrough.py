"""Passes streams through unchanged, and detects how they end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from shoal.backends.openai.answers import NO_CHOICES, NO_OUTPUT, parse_usage
from shoal.backends.openai.body import ModelNameRewriter
from shoal.backends.openai.errors import failure_error, invalid_answer_error
from shoal.backends.openai.sse import is_done, payload, split_data_events
from shoal.backends.openai.wire import EndingWire
from shoal.decoding import json_decoder
from shoal.errors import ShoalError, TransportFailed, UpstreamFailed
from shoal.types import Chunk, Usage

RESPONSES = "openai.responses"
MESSAGES = "anthropic.messages"
"""Dialects whose streams end with a typed event instead of `[DONE]`."""

_ENDING = json_decoder(EndingWire)
_WHOLE = ("response.completed", "response.incomplete", "message_stop")
_FAILED = "response.failed"
# Quotes inside a JSON string are escaped, so no generated text matches. An empty reason counts as null.
_REASON = re.compile(rb'"finish_reason"[ \t\r\n]*:[ \t\r\n]*"[^"]')
_USAGE = re.compile(rb'"usage"(?!: ?null)')
# A name, not a text that ends a list or an object: an error nested too deeply to read is looked for as well.
_MARKS = (re.compile(rb'"error"(?![,}])'), _USAGE)
_TYPED_END = re.compile(rb"response\.(?:completed|incomplete|failed)|message_stop")
# A field or type in the data, or the event's type.
_TYPED_MARKS = (re.compile(rb'error["\r\n]'), _USAGE, _TYPED_END)
_DONE_ENDS = (b"[DONE]\n\n", b"[DONE]\r\n\r\n")
# What makes a stream an answer: a choice, or an event with a type.
_BEGIN = re.compile(rb'"choices"\s*:\s*\[\s*[^\]\s]')
_TYPED_BEGIN = re.compile(rb'"type"\s*:')
# Whole events of one line of data, a JSON object; those of typed dialects have a type before it. The dot matches CR.
_PLAIN_EVENTS = re.compile(rb"(?:data: ?+\{.*+\n\r?+\n)*+")
_PLAIN_TYPED_EVENTS = re.compile(rb"(?:event: .*+\ndata: ?+\{.*+\n\r?+\n)*+")
_ERROR_EVENT = re.compile(rb"(?:^|[\r\n])event: ?error[\r\n]")


class PassThroughStream:
    """Turns the events of one stream into raw chunks with the served name, and with the usage in the last one.

    `has_ended`: the final event has arrived. An error event is not passed on: it becomes `error`, which the caller
    raises after the events before it, so that it ends the stream like every other error and is reported once. It is
    UpstreamRefused, or UpstreamFailed if the event cannot be parsed. No error message contains `key`, which is Shoal's
    own.
    """

    def __init__(self, dialect: str, names: ModelNameRewriter, key: bytes = b"") -> None:
        self.has_ended = False
        self.error: ShoalError | None = None
        self._dialect = dialect
        self._names = names
        self._key = key
        self._has_finish_reason = False
        self._begin: re.Pattern[bytes] | None = _BEGIN  # None once it was found
        self._marks: Sequence[re.Pattern[bytes]] = (*_MARKS, _REASON)
        self._plain_events = _PLAIN_EVENTS
        self._event_start = b"\ndata:"
        self._is_typed = dialect in (RESPONSES, MESSAGES)
        if self._is_typed:
            self._begin = _TYPED_BEGIN
            self._marks = _TYPED_MARKS
            self._plain_events = _PLAIN_TYPED_EVENTS
            self._event_start = b"\nevent:"
        self._usage: Usage | None = None

    def push(self, events: bytes) -> Chunk | None:
        """Return one chunk for joined whole events, up to the one that ends the stream. Events without data are left
        out; None if nothing is left.

        Plain events before the first mark need no more than their names rewritten, all at once.
        """
        start = self._find_marked_event(events)
        plain = events if start == len(events) else events[:start]
        passed = None
        if self._plain_events.fullmatch(plain) is not None and (b"\r" not in plain or _has_only_crlf(plain)):
            passed = self._names.rewrite_events(plain)
        if passed is None:
            start, passed = 0, b""
        self._look_for_begin(events, start)
        usage = None
        if start < len(events) and (read := self._read_all(split_data_events(events[start:]))):
            passed += b"".join(map(self._names, read))
            if self._usage is not None and (self.has_ended or _is_usage_event(read[-1])):
                usage, self._usage = self._usage, None
        return Chunk(raw=(self._dialect, passed), usage=usage) if passed else None

    def finish(self) -> Iterator[Chunk]:
        """End the stream, with any pending usage. Raises TransportFailed if the answer is incomplete."""
        if self._usage is not None:  # of a server that reports usage in every event and sends no final one
            yield Chunk(raw=(self._dialect, b""), usage=self._usage)
        if not (self.has_ended or self._has_finish_reason):
            raise TransportFailed("the server ended its stream before the answer was complete: try again")

    def _find_marked_event(self, events: bytes) -> int:
        """Return where the first event begins that has a mark of the usage, an error or the end; the length if none has
        one."""
        first = events.rfind(b"[DONE]") if events.endswith(_DONE_ENDS) else len(events)
        for mark in self._marks:
            found = mark.search(events, 0, first)
            if found is not None:
                first = found.start()
        return first if first == len(events) else 1 + events.rfind(self._event_start, 0, first)

    def _read_all(self, events: Sequence[bytes]) -> Sequence[bytes]:
        """Read the events up to one that ends the stream; return those to pass on."""
        for count, event in enumerate(events):
            self.error = self._read(event)
            if self.error is not None:
                return events[:count]
            if self.has_ended:
                return events[: count + 1]
        return events

    def _read(self, event: bytes) -> ShoalError | None:
        """Record usage and end of the answer from an event; return the error if it is one, or ends a stream without an
        answer."""
        if is_done(event):
            if self._begin is not None:
                return invalid_answer_error(NO_OUTPUT if self._is_typed else NO_CHOICES)
            self.has_ended = True
            return None
        self._look_for_begin(event, len(event))
        if _USAGE.search(event) is not None:
            self._usage = parse_usage(payload(event), self._usage) or self._usage
        if not self._is_typed:
            if not self._has_finish_reason and _REASON.search(event) is not None:
                self._has_finish_reason = True
                self._marks = _MARKS
            ends = b'"error"' in event
        else:
            ends = b'"error"' in event or _TYPED_END.search(event) is not None
        named = b"error" in event and _ERROR_EVENT.search(event) is not None
        return self._read_ending(payload(event), named=named) if ends or named else None

    def _look_for_begin(self, events: bytes, end: int) -> None:
        if self._begin is not None and self._begin.search(events, 0, end) is not None:
            self._begin = None

    def _read_ending(self, body: bytes, *, named: bool) -> ShoalError | None:
        """As `_read`, for the data of an event that may end the stream. `named`: the event type is `error`."""
        try:
            event = _ENDING.decode(body)
            kind = event.type if self._is_typed else ""
            error = event.error
            if not error and (named or kind == "error"):
                error = {"message": event.message, "type": "server_error", "param": event.param, "code": event.code}
            if kind == _FAILED:
                error = (event.response.get("error") if isinstance(event.response, dict) else None) or {
                    "message": "the response failed"
                }
            if error:
                return failure_error(msgspec.json.encode({"error": error}), self._key)
        except (msgspec.DecodeError, UnicodeDecodeError):  # not valid JSON: pass it to the client
            return None
        except RecursionError:
            return UpstreamFailed("the server's error is nested too deeply to read: see its log")
        self.has_ended = kind in _WHOLE
        return None


def _has_only_crlf(events: bytes) -> bool:
    """Whether no CR ends a line by itself."""
    return events.count(b"\r") == events.count(b"\r\n")


def _is_usage_event(event: bytes) -> bool:
    """Whether the event is OpenAI's final usage event, which only `[DONE]` can follow."""
    return b'"choices":[]' in event or b'"choices": []' in event
