"""Convert Python literals to JSON without Python's parser, which is recursive in C and emits warnings in this process
about what it reads."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

MAX_DEPTH = 64

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\n]+)
    | (?P<string>"[^"\\]*+(?:\\.[^"\\]*+)*+" | '[^'\\]*+(?:\\.[^'\\]*+)*+')
    | (?P<number>[-+]?(?:0[xXoObB]\w+ | (?:\d[\d_]*+\.?[\d_]*+ | \.\d[\d_]*+)(?:[eE][-+]?\d+)?))
    | (?P<word>[A-Za-z_]\w*+)
    | (?P<mark>[][{}():,=])""",
    re.VERBOSE | re.DOTALL,
)
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*+)(?:\.\d++)?(?:[eE][-+]?\d++)?", re.ASCII)
_LEADING_ZERO = re.compile(r"[-+]?0[\d_]+")
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPE = re.compile(r"""\\(\n|[\\'"abfnrtv]|[0-7]{1,3}|x[\da-fA-F]{2}|u[\da-fA-F]{4}|U[\da-fA-F]{8})""")
_LETTERS = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}


class _NoLiteral(Exception):
    """The text is not a list of named literals."""


def arguments_json(text: str) -> str | None:
    """Convert `(city="Paris", days=[1, 2])` to the text of a JSON object; None for anything but named literals.

    Accepts strings, numbers, True, False and None (also in JSON's spelling), lists, tuples, and dicts with string keys,
    at most 64 levels deep. Numbers that JSON can express keep all their digits.
    """
    try:
        return _Literals(text).arguments()
    except _NoLiteral:
        return None


def value_json(text: str) -> str | None:
    """Convert one literal to the text of its JSON; None for anything else."""
    try:
        return _Literals(text).value()
    except _NoLiteral:
        return None


class _Literals:
    """Recursive descent over the tokens, up to MAX_DEPTH levels."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._position = 0
        self._depth = 0

    def arguments(self) -> str:
        seen: set[str] = set()

        def argument() -> str:
            kind, name = self._take()
            if kind != "word" or name in seen:
                raise _NoLiteral
            seen.add(name)
            self._expect("=")
            return f"{_quote_json(name)}: {self._value()}"

        self._expect("(")
        return self._whole("{" + self._join_items(")", argument) + "}")

    def value(self) -> str:
        return self._whole(self._value())

    def _whole(self, json_text: str) -> str:
        if self._position < len(self._tokens):
            raise _NoLiteral
        return json_text

    def _value(self) -> str:
        kind, text = self._take()
        if kind == "string":
            return _quote_json(self._string(text))
        if kind == "number":
            return _number(text)
        if kind == "word" and text in WORDS:
            return WORDS[text]
        if text not in ("[", "(", "{") or self._depth >= MAX_DEPTH:
            raise _NoLiteral
        self._depth += 1
        if text == "{":
            json_text = "{" + self._join_items("}", self._pair) + "}"
        else:
            json_text = "[" + self._join_items("]" if text == "[" else ")", self._value) + "]"
        self._depth -= 1
        return json_text

    def _pair(self) -> str:
        kind, text = self._take()
        if kind != "string":
            raise _NoLiteral
        key = _quote_json(self._string(text))
        self._expect(":")
        return f"{key}: {self._value()}"

    def _string(self, text: str) -> str:
        """Join adjacent string literals."""
        parts = [_unescape(text)]
        while self._peek()[0] == "string":
            parts.append(_unescape(self._take()[1]))
        return "".join(parts)

    def _join_items(self, close: str, item: Callable[[], str]) -> str:
        parts = []
        while self._peek() != ("mark", close):
            parts.append(item())
            if self._peek() != ("mark", close):
                self._expect(",")
        self._position += 1
        return ", ".join(parts)

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._position] if self._position < len(self._tokens) else ("", "")

    def _take(self) -> tuple[str, str]:
        token = self._peek()
        self._position += 1
        return token

    def _expect(self, mark: str) -> None:
        if self._take() != ("mark", mark):
            raise _NoLiteral


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _NoLiteral
        at = match.end()
        if match.lastgroup and match.lastgroup != "blank":
            tokens.append((match.lastgroup, match[0]))
    return tokens


def _number(text: str) -> str:
    if _JSON_NUMBER.fullmatch(text):
        return text
    if _LEADING_ZERO.fullmatch(text):
        raise _NoLiteral
    try:
        return str(int(text, 0))
    except ValueError:  # not an integer, or one with more digits than Python converts
        pass
    try:
        value = float(text)
    except ValueError:
        raise _NoLiteral from None
    if not math.isfinite(value):
        raise _NoLiteral
    return repr(value)


def _unescape(text: str) -> str:
    try:
        return _ESCAPE.sub(_decode_escape, text[1:-1])
    except (ValueError, OverflowError):  # \U above the last code point
        raise _NoLiteral from None


def _decode_escape(match: re.Match[str]) -> str:
    code = match[1]
    if code[0] in "xuU":
        return chr(int(code[1:], 16))
    return chr(int(code, 8)) if code.isdecimal() else _LETTERS.get(code, code)


def _quote_json(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # unpaired surrogates have no bytes, but JSON can escape them
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False)
