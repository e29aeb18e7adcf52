"""Parser of the Llama 3.1 and later format: `<|python_tag|>{"name": ..., "parameters": {...}}; {...}`, often without
the tag.

Source of the format: Meta's model cards and chat templates of Llama 3.1, 3.2 and 4.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

from shoal.pipelines.chat.tools.call_object import CallObject
from shoal.pipelines.chat.tools.reader import CallReader, begins
from shoal.pipelines.chat.tools.result_collector import DeltaCollector
from shoal.types import Tool

OPEN = ("<|python_tag|>", "<|python_start|>")
CLOSE = "<|python_end|>"
_SEPARATORS = re.compile(r"[ \t\r\n;,]*")


class Llama3Parser(CallReader):
    """Parses objects after a tag, or at the start of an answer; more may follow, separated by nothing, blanks or `;`.

    Without a tag, an object is a call only if it starts the answer or follows such a call, and its name was offered: a
    plain JSON answer may have a "name" too.
    """

    _marks = OPEN
    markup = (*OPEN, CLOSE)

    def __init__(self, out: DeltaCollector, tools: Sequence[Tool]) -> None:
        super().__init__(out, tools)
        self._known_names: Container[str] | None = self._tools
        self._step = self._start

    def _between_calls(self) -> bool:
        return self._step == self._between

    def _start(self, text: str, at: int) -> int | None:
        after = self._skip(text, at)
        if after > at:
            return after
        if text[at] == "{":
            self._begin(self._tools)
        else:
            self._give_back()
        return at

    def _read_opening(self, text: str, at: int) -> int | None:
        after = self._skip(text, at)
        if after > at:
            return after
        if text[at] == "{":
            self._begin(None)
        else:
            self._give_back()
        return at

    def _begin(self, known: Container[str] | None) -> None:
        self._known_names = known
        self._begin_call(CallObject(self._out, known))

    def _end_call(self) -> None:
        self._step = self._between

    def _between(self, text: str, at: int) -> int | None:
        after = self._skip(text, at, _SEPARATORS)
        if after > at:
            return after
        if text[at] == "{":
            self._begin(self._known_names)
            return at
        mark = begins(text, at, (*OPEN, CLOSE))
        if mark is None:
            return None
        if not mark:
            self._give_back()
            return at
        self._out.drop()
        if mark == CLOSE:
            self._known_names = self._tools
            return at + len(mark)
        self._step = self._content
        return at
