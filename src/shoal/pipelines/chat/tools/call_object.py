"""Parse a tool call given as a JSON object, incrementally: no character is read twice, and arguments stream through."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Container, Sequence

from shoal.pipelines.chat.tools.reader import BLANK_RUN, MAX_NAME, SEPARATORS, CallReader, NameReader
from shoal.pipelines.chat.tools.result_collector import DeltaCollector
from shoal.types import Tool

_BRACKET_OR_QUOTE = {"": re.compile(r"[\"{}\[\]]"), "'": re.compile(r"[\"'{}\[\]()]")}
_END_OR_ESCAPE = {'"': re.compile(r"[\"\\]"), "'": re.compile(r"['\\]")}
_SCALAR_END = re.compile(r"[ \t\r\n,}\]]")
_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")


class Extent:
    """Finds where a bracketed or quoted value ends, tracking only strings, escapes and the number of open brackets.

    Brackets are counted, not matched, so depth costs no memory; errors inside are left to the reader of the value.
    `single`: strings may have single quotes and brackets may be round, as in Python. `ended` once the value is
    complete.
    """

    __slots__ = ("_brackets", "_depth", "_escaped", "_quote", "ended")

    def __init__(self, *, single: bool = False) -> None:
        self.ended = False
        self._brackets = _BRACKET_OR_QUOTE["'" if single else ""]
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def read(self, text: str, at: int) -> int:
        """Return how far the value reaches, from a position inside it or from its first character."""
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_END_OR_ESCAPE[self._quote] if self._quote else self._brackets).search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            if self._take(found[0]):
                self.ended = True
                return at
        return at

    def _take(self, mark: str) -> bool:
        """Whether this character ends the value."""
        if mark == "\\":
            self._escaped = True
            return False
        if self._quote:
            self._quote = ""
        elif mark in "\"'":
            self._quote = mark
            return False
        else:
            self._depth += 1 if mark in "{[(" else -1
        return self._depth <= 0


class CallObject:
    """Reads `{"name": "f", "arguments": {...}}` with keys in any order; other keys are skipped.

    - "parameters" equals "arguments". "function" is the name if it is a string, and contains both if it is an object.
      Arguments may be a string that contains an object; missing or null arguments are `{}`.
    - The call begins at the outlet once its name is known and its arguments begin; from then on they pass through as
      the model writes them.
    - `ended`: the call is complete. `broken`: it is not a call, or no longer one; parse what follows as something else.
      `sent`: the call has begun at the outlet. Until then all text read is held back there.
    - `known`: names that may be called; any other name means that this is not a call. None: all names.
    """

    def __init__(self, out: DeltaCollector, known: Container[str] | None = None) -> None:
        self.ended = self.broken = self.sent = False
        self._out = out
        self._known_names = known
        self._expect = "{"
        self._inner = 0
        self._key = ""
        self._name = ""
        self._early_arguments: str | None = None
        self._extent: Extent | None = None
        self._captured_parts: list[str] = []
        self._streaming = False

    def read(self, text: str, at: int) -> int:
        """Return how far it got; if that is before the end of the text, the call is ended or broken."""
        while at < len(text) and not self.ended and not self.broken:
            sent = self.sent
            after = (
                self._read_value(text, at)
                if self._extent or self._expect == "scalar"
                else self._read_structure(text, at)
            )
            if not sent and not self.sent:
                self._out.hold_back(text[at:after])
            at = after
        return at

    def _read_structure(self, text: str, at: int) -> int:
        """Read blanks, brackets, commas and colons, and set up the value that begins."""
        match = BLANK_RUN.match(text, at)
        if match and match.end() > at:
            return match.end()
        char, expect = text[at], self._expect
        if expect == "value":
            return self._begin_value(char, at)
        if char == '"' and expect in ("key or }", "key"):
            self._begin_capture("key")
            return at
        if char == "{" and expect == "{":
            self._expect = "key or }"
        elif char == ":" and expect == ":":
            self._expect = "value"
        elif char == "," and expect == ", or }":
            self._expect = "key"
        elif char == "}" and expect in ("key or }", ", or }"):
            return self._end_object(at)
        else:
            self.broken = True
            return at
        return at + 1

    def _begin_capture(self, expect: str) -> None:
        self._expect = expect
        self._captured_parts = []
        self._extent = Extent()

    def _begin_value(self, char: str, at: int) -> int:
        kind = self._classify_value()
        if char == "{" and self._key == "function" and not self._name:
            self._inner += 1
            self._expect = "key or }"
            return at + 1
        if char == "{" and kind == "arguments" and self._name:
            self._begin_call()
            self._streaming = True
            self._extent = Extent()
            self._expect = "value"
            return at
        if char in '"{[':
            if (kind == "name" and char != '"') or (kind == "arguments" and char == "["):
                self.broken = True
                return at
            self._begin_capture("value")
        elif char in ",:]}":
            self.broken = True
        else:
            self._captured_parts = []
            self._expect = "scalar"
        return at

    def _classify_value(self) -> str:
        """Return the role of the current key's value; "" if it is skipped."""
        if self._key in _NAMES and not self._name:
            return "name"
        return "arguments" if self._key in _ARGUMENTS and self._early_arguments is None and not self.sent else ""

    def _read_value(self, text: str, at: int) -> int:
        if self._extent is None:
            found = _SCALAR_END.search(text, at)
            after, ended = (found.start(), True) if found else (len(text), False)
        else:
            after = self._extent.read(text, at)
            ended = self._extent.ended
        if self._streaming:
            self._out.arguments(text[at:after])
        elif self._expect == "key" or self._classify_value():
            self._captured_parts.append(text[at:after])
        if ended:
            self._end_value()
        return after

    def _end_value(self) -> None:
        self._extent = None
        streamed, self._streaming = self._streaming, False
        captured = "".join(self._captured_parts)
        if self._expect == "key":
            self._key = _decode_string(captured) or ""
            self._expect = ":"
            return
        self._expect = ", or }"
        kind = "" if streamed else self._classify_value()
        if kind == "name":
            self._name = _decode_string(captured) or ""
            usable = 0 < len(self._name) <= MAX_NAME and self._name.isprintable()
            self.broken = not usable or (self._known_names is not None and self._name not in self._known_names)
        elif kind == "arguments":
            self._early_arguments = _to_object_text(captured)
            self.broken = self._early_arguments is None
        if self._name and self._early_arguments is not None and not self.sent and not self.broken:
            self._begin_call()
            self._out.arguments(self._early_arguments)

    def _end_object(self, at: int) -> int:
        if self._inner:
            self._inner -= 1
            self._expect = ", or }"
            return at + 1
        if not self._name:
            self.broken = True
            return at
        if not self.sent:
            self._begin_call()
            self._out.arguments("{}")
        self.ended = True
        return at + 1

    def _begin_call(self) -> None:
        self._out.begin(self._name)
        self.sent = True


class ObjectListReader(CallReader):
    """A reader of formats with an array of call objects, or one object, after each marker."""

    def __init__(self, out: DeltaCollector, tools: Sequence[Tool]) -> None:
        super().__init__(out, tools)
        self._array = False
        self._has_call = False

    def _between_calls(self) -> bool:
        return self._step == self._read_closing or (self._has_call and self._step == self._next)

    def _read_opening(self, text: str, at: int) -> int | None:
        after = self._skip(text, at)
        if after > at:
            return after
        self._array = text[at] == "["
        self._has_call = False
        if self._array:
            self._out.hold_back("[")
            self._step = self._next
            return at + 1
        if text[at] == "{":
            self._begin_call(CallObject(self._out))
            return at
        return self._read_other(text, at)

    def _read_other(self, text: str, at: int) -> int | None:
        """The step after a marker that neither an array nor an object follows."""
        self._give_back()
        return at

    def _next(self, text: str, at: int) -> int | None:
        """Read the next object of an array, or its end. An array without calls is content."""
        after = self._skip(text, at, SEPARATORS)
        if after > at:
            return after
        if text[at] == "{":
            self._begin_call(CallObject(self._out))
            return at
        if text[at] == "]" and self._has_call:
            self._out.drop()
            self._end_list()
            return at + 1
        self._give_back()
        return at

    def _end_call(self) -> None:
        self._has_call = True
        if self._array:
            self._step = self._next
        else:
            self._end_list()

    def _end_list(self) -> None:
        self._step = self._read_closing if self._closes else self._content


class NamedCallReader(NameReader):
    """A reader of formats in which the JSON object of a call's arguments follows its name."""

    def __init__(self, out: DeltaCollector, tools: Sequence[Tool]) -> None:
        super().__init__(out, tools)
        self._extent = Extent()

    def _begin_arguments(self) -> None:
        self._out.begin(self._to_name(self._name))
        self._extent, self._step = Extent(), self._read_arguments

    def _read_arguments(self, text: str, at: int) -> int | None:
        after = self._extent.read(text, at)
        self._out.arguments(text[at:after])
        if self._extent.ended:
            self._end_arguments()
        return after

    @abstractmethod
    def _end_arguments(self) -> None:
        """Set the step after the arguments."""


def _decode_string(text: str) -> str | None:
    """Decode a JSON string; None if it is not one. Raw line ends are allowed."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _to_object_text(text: str) -> str | None:
    """Return the JSON object that the arguments stand for: the object itself, the content of a string, or `{}` for null
    and an empty string. None if they are not arguments."""
    if text.startswith("{"):
        return text
    if text == "null":
        return "{}"
    inner = _decode_string(text)
    if inner is None:
        return None
    inner = inner.strip() or "{}"
    try:
        inner.encode()  # unpaired surrogates cannot be encoded
        return inner if isinstance(json.loads(inner), dict) else None
    except (ValueError, RecursionError):
        return None
