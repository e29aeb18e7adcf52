"""Parser of Qwen3-Coder's tagged tool calls:

<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NoReturn

from shoal.pipelines.chat.tools.literals import WORDS, value_json
from shoal.pipelines.chat.tools.reader import BLANK_RUN, MAX_NAME, begins, overlap
from shoal.pipelines.chat.tools.result_collector import DeltaCollector
from shoal.pipelines.chat.tools.schema_types import argument_types
from shoal.types import Tool

FUNCTION = "<function="
PARAMETER = "<parameter="
END_PARAMETER = "</parameter>"
END_FUNCTION = "</function>"
_END_CALL = "</tool_call>"
_BETWEEN = (PARAMETER, END_FUNCTION, _END_CALL)

_NAME_RUN = re.compile(r"[^<>\r\n]*")


class TaggedCall:
    """Reads one call, from after its `<function=`, a step at a time; ends as CallObject does.

    Values are untyped text, so the tool's schema decides their type; a value that does not fit is emitted as a string.
    A parameter is emitted once it is complete; an unfinished one comes back as content, as does a call before its first
    parameter or its end. The call's end tag also ends the function.

    A value may contain `</parameter>`. If it begins with a line end, as the template writes it, or like JSON, this ends
    it only after a line end or before another tag.
    """

    def __init__(self, out: DeltaCollector, tools: Mapping[str, Tool]) -> None:
        self.ended = self.broken = self.sent = False
        self._out = out
        self._tools = tools
        self._head: list[str] | None = []
        self._value: list[str] | None = None
        self._end: list[str] = []
        self._name = ""
        self._key = ""

    def read(self, text: str, at: int) -> int | None:
        """Return how far one step got; None if it needs more text."""
        if self._head is not None:
            return self._read_head(self._head, text, at)
        if self._end and self._value is not None:
            return self._read_end(self._value, text, at)
        if self._value is not None:
            return self._read_value(self._value, text, at)
        return self._read_between(text, at)

    def _read_head(self, head: list[str], text: str, at: int) -> int:
        """Read the name of the function or of a parameter, and the `>` after it."""
        match = _NAME_RUN.match(text, at)
        after = match.end() if match else at
        head.append(text[at:after])
        self._out.hold_back(text[at:after])
        if after == len(text):
            return after
        name = "".join(head).strip()
        if text[after] != ">" or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
            self.broken = True
            return after
        self._out.hold_back(">")
        self._head = None
        if self._name:
            self._key, self._value = name, []
        else:
            self._name = name
        return after + 1

    def _read_between(self, text: str, at: int) -> int | None:
        match = BLANK_RUN.match(text, at)
        if match and match.end() > at:
            self._out.hold_back(match[0])
            return match.end()
        mark = begins(text, at, _BETWEEN)
        if mark is None:
            return None
        if mark == PARAMETER:
            self._out.hold_back(mark)
            self._head = []
            return at + len(mark)
        if not mark:
            self.broken = True
            return at
        self._emit("{}" if not self.sent else "}")
        self.ended = True
        return at + len(mark) if mark == END_FUNCTION else at

    def _read_value(self, value: list[str], text: str, at: int) -> int | None:
        end = text.find(END_PARAMETER, at)
        after = end if end >= 0 else len(text) - overlap(text, at, (END_PARAMETER,))
        if after > at:
            value.append(text[at:after])
            self._out.hold_back(text[at:after])
        if end < 0:
            return after if after > at else None
        if value and value[0][0] in "\r\n{[" and value[-1][-1] != "\n":
            self._end = [END_PARAMETER]
            self._out.hold_back(END_PARAMETER)
        else:
            self._end_value(value)
        return end + len(END_PARAMETER)

    def _read_end(self, value: list[str], text: str, at: int) -> int | None:
        """Read what follows an end tag that may be part of the value."""
        match = BLANK_RUN.match(text, at)
        if match and match.end() > at:
            self._end.append(match[0])
            self._out.hold_back(match[0])
            return match.end()
        mark = begins(text, at, _BETWEEN)
        if mark is None:
            return None
        if mark:
            self._end_value(value)
        else:
            value += self._end
        self._end = []
        return at

    def _end_value(self, value: list[str]) -> None:
        json_text = self._to_json_value("".join(value))
        self._emit(f"{', ' if self.sent else '{'}{_quote_json(self._key)}: {json_text}")
        self._value = None

    def _emit(self, fragment: str) -> None:
        if not self.sent:
            self._out.begin(self._name)
            self.sent = True
        self._out.drop()
        self._out.arguments(fragment)

    def _to_json_value(self, text: str) -> str:
        """Convert a value to JSON as its schema requires. Line ends next to the tags are not part of it."""
        text = text.removeprefix("\r").removeprefix("\n").removesuffix("\n").removesuffix("\r")
        tool = self._tools.get(self._name)
        types = argument_types(tool.parameters, self._key) if tool else set()
        bare = text.strip()
        if bare in ("null", "None") and "null" in types:
            return "null"
        if types and "string" not in types:
            bare = WORDS.get(bare, bare)
            try:
                json.loads(bare, parse_constant=_refuse)
            except (ValueError, RecursionError):
                literal = value_json(bare) if bare[:1] in ("[", "{") else None
                return literal or _quote_json(text)
            return bare
        return _quote_json(text)


def _quote_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")
