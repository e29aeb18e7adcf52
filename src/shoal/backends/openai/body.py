"""Replaces the model's name in JSON bodies, in requests and in answers, and keeps every other byte."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from shoal.decoding import json_decoder
from shoal.errors import Malformed

_FIELDS = json_decoder(dict[str, msgspec.Raw])
_TEXT = json_decoder(str)
_NUMBER = json_decoder(float)
# Possessive quantifiers avoid backtracking in a string; an unterminated string is a token too (without its last quote).
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("?+)|[{}\[\]]', re.DOTALL)
_VALUE = re.compile(rb'[ \t\r\n]*+:[ \t\r\n]*+("[^"\\]*+(?:\\.[^"\\]*+)*+")', re.DOTALL)
# An object whose first text named "model" is preceded by simple values only, as in nearly every answer.
_SIMPLE_FIELD = (
    rb'"(?!model")[^"\\]*+(?:\\.[^"\\]*+)*+"[ \t\r\n]*+:[ \t\r\n]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\w.+-]++)'
)
_MODEL_FIRST = re.compile(
    rb'(?:data: ?)?[ \t\r\n]*+\{[ \t\r\n]*+(?:%b[ \t\r\n]*+,[ \t\r\n]*+)*+"model"%b' % (_SIMPLE_FIELD, _VALUE.pattern),
    re.DOTALL,
)
_MODEL = b'"model"'
_EVENT_END = b"\n\n"
_LENGTHS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})


class RequestBody:
    """A client's request, as received: every value keeps its bytes.

    Of a duplicate key the last value counts, as in nearly every parser, and the first is not passed on. Raises
    Malformed if the body is not a JSON object.
    """

    def __init__(self, body: bytes) -> None:
        try:
            self._fields = _FIELDS.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Malformed(f"the body is not a JSON object: {error}") from None

    @property
    def model(self) -> str:
        """The model name in the request, "" if there is none."""
        try:
            return _TEXT.decode(self._fields["model"])
        except (KeyError, msgspec.DecodeError, RecursionError):
            return ""

    def encode(self, model: str, *, strip: Collection[str], defaults: Mapping[str, Any]) -> bytes:
        """Return the body with `model` as its model, without the fields in `strip`, and with the `defaults` it lacks.

        `stream_options` is sent only with `stream`: OpenAI rejects it otherwise, but clients send it regardless. A
        length of -1 means unlimited and is not sent, because most servers reject it.
        """
        fields: dict[str, Any] = self._fields.copy() if "model" in self._fields else {"model": model, **self._fields}
        for name in strip:
            fields.pop(name, None)
        for name in _LENGTHS & fields.keys():
            if _is_unlimited(fields[name]):
                del fields[name]
        if "stream_options" in fields and bytes(fields.get("stream", b"")).strip() != b"true":
            del fields["stream_options"]
        fields["model"] = model
        for name, value in defaults.items():
            if name not in fields and name not in strip:
                fields[name] = value
        return msgspec.json.encode(fields)


class ModelNameRewriter:
    """Replaces the model's name in answers with the served name: at the top level, or in the `response` of an event of
    the Responses API. Nothing else changes.

    Events of one answer share their bytes up to the model's name. That prefix is remembered, so most events cost one
    comparison, or a share of one replacement in all events that arrived together.
    """

    def __init__(self, served: str) -> None:
        self._encoded_name = msgspec.json.encode(served)
        self._old_prefix = b""
        self._new_prefix = b""

    def __call__(self, data: bytes) -> bytes:
        """Return `data`, one event or one whole body, with the served name."""
        if self._old_prefix and data.startswith(self._old_prefix):
            return self._new_prefix + data[len(self._old_prefix) :]
        if _MODEL not in data:
            return data
        place = _find_model_span(data)
        if place is None:
            return data
        start, stop = place
        self._old_prefix = data[:stop]
        self._new_prefix = data[:start] + self._encoded_name
        return self._new_prefix + data[stop:]

    def rewrite_events(self, events: bytes) -> bytes | None:
        """Return whole joined events with the served name, or None unless each is certain to be one line of data that
        begins with the remembered prefix: then they must be split."""
        if not (self._old_prefix and events.startswith(self._old_prefix)):
            self(events[: events.find(_EVENT_END) + len(_EVENT_END)])
        old, new = self._old_prefix, self._new_prefix
        start = _EVENT_END + old
        if not (
            old.startswith(b"data:")
            and events.startswith(old)
            and events.endswith(_EVENT_END)
            # Each event has its prefix and two line ends, so no line is unaccounted for.
            and events.count(b"\n") == 2 + 2 * events.count(start)
            and b"\r" not in events
        ):
            return None
        return events if old == new else new + events[len(old) :].replace(start, _EVENT_END + new)


def _is_unlimited(raw: msgspec.Raw) -> bool:
    try:
        return _NUMBER.decode(raw) == -1
    except msgspec.DecodeError:
        return False


def _find_model_span(data: bytes) -> tuple[int, int] | None:
    """Return start and end of the model's name, including its quotes, or None if there is none."""
    first = _MODEL_FIRST.match(data)
    if first is not None:
        return first.span(1)
    depth = 0
    holder = b""
    for token in _TOKEN.finditer(data):
        text = token[0]
        if token[1] == b"":  # an unterminated string: the rest is not JSON
            return None
        if text in (b"{", b"["):
            depth += 1
        elif text in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and text != _MODEL:
            holder = text
        elif text == _MODEL and (depth == 1 or (depth == 2 and holder == b'"response"')):
            value = _VALUE.match(data, token.end())
            if value is not None:
                return value.span(1)
    return None
