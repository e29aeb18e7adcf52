"""The input of custom tools, any text, as the one argument of a function."""

from __future__ import annotations

import json
import re

import msgspec

FIELD = "input"
"""The argument that holds the whole input."""

_START = re.compile(rf'[ \t\r\n]*\{{[ \t\r\n]*"{FIELD}"[ \t\r\n]*:[ \t\r\n]*"')
# Whole characters of a JSON string. A high surrogate waits for the next escape, with which it is one character.
_WHOLE = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*'
)


def to_arguments(text: str) -> str:
    """Return the arguments of a call with this input."""
    return msgspec.json.encode({FIELD: text}).decode()


def read_input(arguments: str) -> str:
    """Return the input in complete arguments: that of the field, else the only text of an object, else all of it, since
    models write the input itself, too."""
    try:
        fields = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments
    values = [*fields.values()] if isinstance(fields, dict) else []
    found = fields[FIELD] if values and FIELD in fields else values[0] if len(values) == 1 else None
    return _clean(found) if isinstance(found, str) else arguments


class InputReader:
    """Reads the input out of arguments that arrive in fragments. `push` returns what is new of it, in whole characters;
    "" as long as the arguments do not begin as expected. `finish` returns the rest."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._rest = ""
        self._has_started = False
        self._has_ended = False
        self._read: list[str] = []

    def push(self, fragment: str) -> str:
        self._arguments.append(fragment)
        if self._has_ended:
            return ""
        self._rest += fragment
        if not self._has_started:
            start = _START.match(self._rest)
            if start is None:
                return ""
            self._has_started, self._rest = True, self._rest[start.end() :]
        return self._take()

    def finish(self) -> str:
        whole, read = read_input("".join(self._arguments)), "".join(self._read)
        return whole[len(read) :] if whole.startswith(read) else ""  # arguments that break off: all has been read

    def _take(self) -> str:
        whole = _WHOLE.match(self._rest)
        size = whole.end() if whole is not None else 0
        taken, self._rest = self._rest[:size], self._rest[size:]
        self._has_ended = self._rest.startswith('"')
        text = _decode(taken)
        self._read.append(text)
        return text


def _decode(escaped: str) -> str:
    """Return the text of whole characters of a JSON string. Models write control characters, too."""
    return _clean(json.loads(f'"{escaped}"', strict=False))


def _clean(text: str) -> str:
    """Return the text without halves of characters, which cannot be encoded."""
    return text.encode(errors="replace").decode()
