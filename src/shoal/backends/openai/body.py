"""JSON bodies changed in one place and nowhere else: the model's name on the way to a server and back."""

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
# Possessive: no byte of a string is looked at twice, and one that never ends is a token too (without its last quote).
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("?+)|[{}\[\]]', re.DOTALL)
_VALUE = re.compile(rb'[ \t\r\n]*+:[ \t\r\n]*+("[^"\\]*+(?:\\.[^"\\]*+)*+")', re.DOTALL)
_MODEL = b'"model"'
_LENGTHS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})


class RequestBody:
    """A client's request, as received: every value keeps its bytes, whatever it is.

    Of a name that stands there twice the last one counts, as it does for nearly every parser, and the first is not
    passed on. Raises Malformed when the body is no JSON object.
    """

    def __init__(self, body: bytes) -> None:
        try:
            self._fields = _FIELDS.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Malformed(f"the body is not a JSON object: {error}") from None

    @property
    def model(self) -> str:
        """The name that the client gave; "" where it gave none."""
        try:
            return _TEXT.decode(self._fields["model"])
        except (KeyError, msgspec.DecodeError, RecursionError):
            return ""

    def encode(self, model: str, *, strip: Collection[str], defaults: Mapping[str, Any]) -> bytes:
        """The body with `model` in the place of its own, without the fields of `strip`, and with those of `defaults`
        that it does not name.

        `stream_options` goes out only with `stream`: OpenAI refuses it otherwise, and clients rely on that it does not
        matter. A length of -1, which is none, does not go out at all: most servers refuse it.
        """
        own = {name: value for name, value in self._fields.items() if name not in strip}
        for name in _LENGTHS & own.keys():
            if _is_unlimited(own[name]):
                del own[name]
        if bytes(own.get("stream", b"")).strip() != b"true":
            own.pop("stream_options", None)
        fields: dict[str, Any] = {} if "model" in own else {"model": model}
        fields |= own
        fields["model"] = model
        fields |= {name: value for name, value in defaults.items() if name not in fields and name not in strip}
        return msgspec.json.encode(fields)


class ModelNameRewriter:
    """Puts the served name where a server's answers name their model: at the top, or in the `response` of an event of
    the Responses API. Nothing else changes, and what has no such place comes back as it is.

    Events of one answer begin alike, up to the model's name: that beginning is remembered, so that most of them cost
    one comparison.
    """

    def __init__(self, served: str) -> None:
        self._served = msgspec.json.encode(served)
        self._seen = b""
        self._instead = b""

    def __call__(self, data: bytes) -> bytes:
        """`data`: one event, or one whole body."""
        if self._seen and data.startswith(self._seen):
            return self._instead + data[len(self._seen) :]
        if _MODEL not in data:
            return data
        place = _find_model_span(data)
        if place is None:
            return data
        start, stop = place
        self._seen = data[:stop]
        self._instead = data[:start] + self._served
        return self._instead + data[stop:]


def _is_unlimited(raw: msgspec.Raw) -> bool:
    try:
        return _NUMBER.decode(raw) == -1
    except msgspec.DecodeError:
        return False


def _find_model_span(data: bytes) -> tuple[int, int] | None:
    """Where the model's name stands, quotes included; None where there is none."""
    depth = 0
    holder = b""
    for token in _TOKEN.finditer(data):
        text = token[0]
        if token[1] == b"":  # a string without an end: what follows is no JSON
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
