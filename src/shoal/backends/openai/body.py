"""Replaces the model's name in JSON bodies, in requests and in answers, and keeps every other byte."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from shoal.decoding import json_decoder
from shoal.types import Fields

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
# The end of an object whose last fields are "model" and simple values without escapes, as some servers write it behind
# the choices. It begins outside of a string, since no quote of it is escaped and an object ends outside.
_PLAIN_TEXT = rb'"[^"\\]*+"'
_MODEL_LAST = re.compile(
    rb',[ \t]*+"model"[ \t]*+:[ \t]*+(%b)(?:[ \t]*+,[ \t]*+%b[ \t]*+:[ \t]*+(?:%b|[\w.+-]++))*+[ \t]*+\}[\r\n]++\Z'
    % (_PLAIN_TEXT, _PLAIN_TEXT, _PLAIN_TEXT)
)
_MODEL = b'"model"'
_HOLDERS = (b'"response"', b'"message"')
_NEXT_DATA = b"\ndata:"
_LENGTHS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})


def requested_model(fields: Fields) -> str:
    """Return the model's name in the fields of a request, "" if there is none."""
    try:
        return _TEXT.decode(fields["model"])
    except (KeyError, msgspec.DecodeError, RecursionError):
        return ""


def encode_request(received: Fields, model: str, *, strip: Collection[str], defaults: Mapping[str, Any]) -> bytes:
    """Encode the fields that a client sent, each value with its bytes, with `model` as the model, without the fields in
    `strip`, and with the `defaults` that are missing.

    `stream_options` is sent only with `stream`: OpenAI rejects it otherwise, but clients send it regardless. A length
    of -1 means unlimited and is not sent, because most servers reject it.
    """
    fields: dict[str, Any] = {**received} if "model" in received else {"model": model, **received}
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
    the Responses API, or the `message` of one of Anthropic's. Nothing else changes.

    Events of one answer share their bytes up to the model's name or, if it follows the choices, from it on. That prefix
    or suffix is remembered, so most events cost one comparison, or a share of one replacement in all events that
    arrived together.
    """

    def __init__(self, served: str) -> None:
        self._encoded_name = msgspec.json.encode(served)
        self._old_prefix = b""
        self._new_prefix = b""
        self._old_suffix = b""
        self._new_suffix = b""

    def __call__(self, data: bytes) -> bytes:
        """Return `data`, one event or one whole body, with the served name."""
        old = self._old_prefix
        if old and data.startswith(old):
            return self._new_prefix + data[len(old) :]
        if _MODEL not in data:
            return data
        old = self._old_suffix
        if old and data.endswith(old) and data.count(_MODEL) == 1:
            return data[: -len(old)] + self._new_suffix
        place = _find_model_span(data)
        if place is None:
            return data
        start, stop = place
        self._old_prefix = data[:stop]
        self._new_prefix = data[:start] + self._encoded_name
        last = _MODEL_LAST.search(data) if data.endswith(b"\n") and data.count(_MODEL) == 1 else None
        if last is not None and last.span(1) == place:
            self._old_suffix = data[last.start() :]
            self._new_suffix = data[last.start() : start] + self._encoded_name + data[stop:]
        return self._new_prefix + data[stop:]

    def rewrite_events(self, events: bytes, *, learns: bool = True) -> bytes | None:
        """Return whole joined events with the served name, or None unless each is certain to have a remembered prefix
        or suffix: then they must be split. Each must have one line of data, a JSON object. `learns`: the first event
        may be remembered."""
        old, new = self._old_prefix, self._new_prefix
        if old and events.startswith(old) and events.count(_NEXT_DATA) == events.count(b"\n" + old):
            return events if old == new else new + events[len(old) :].replace(b"\n" + old, b"\n" + new)
        if _MODEL not in events:
            return events
        old = self._old_suffix
        if old and events.endswith(old) and 1 + events.count(_NEXT_DATA) == events.count(old) == events.count(_MODEL):
            return events.replace(old, self._new_suffix)
        if not learns:
            return None
        self(events[: events.find(_NEXT_DATA) + 1 or None])
        return self.rewrite_events(events, learns=False)


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
        elif text == _MODEL and (depth == 1 or (depth == 2 and holder in _HOLDERS)):
            value = _VALUE.match(data, token.end())
            if value is not None:
                return value.span(1)
    return None
