"""Parser of DeepSeek's format: a list of calls between markers, each a name and its arguments.

Source of the format: DeepSeek's chat templates. R1 and V3 write a type, the name and a block of code with the
arguments; V3.1 writes only the name and the arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.pipelines.chat.tools.call_object import Extent
from shoal.pipelines.chat.tools.reader import Reader, Step, begins
from shoal.pipelines.chat.tools.result_collector import DeltaCollector
from shoal.types import Tool

OPEN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
CLOSE = "<\uff5ctool\u2581calls\u2581end\uff5c>"
OPEN_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"
CLOSE_CALL = "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
OPEN_CODE = "```json"
CLOSE_CODE = "```"


class DeepSeekParser(Reader):
    """Parses calls between markers. Tolerates missing markers around the list, and a missing one after a call."""

    _marks = (OPEN, OPEN_CALL)
    markup = (OPEN, CLOSE, OPEN_CALL, CLOSE_CALL, SEPARATOR)

    def __init__(self, out: DeltaCollector, tools: Sequence[Tool]) -> None:
        super().__init__(out, tools)
        self._extent = Extent()
        self._name: list[str] = []
        self._then: Step = self._behind_head
        self._in_code = False

    def _between_calls(self) -> bool:
        return self._step == self._read_closing

    def _content(self, text: str, at: int) -> int | None:
        after = super()._content(text, at)
        if self._step == self._read_opening and after is not None and text.endswith(OPEN_CALL, at, after):
            self._begin_name(self._behind_head)
        return after

    def _read_opening(self, text: str, at: int) -> int | None:
        after = self._skip(text, at)
        if after > at:
            return after
        mark = begins(text, at, (OPEN_CALL,))
        if mark is None:
            return None
        if not mark:
            self._give_back()
            return at
        self._out.hold_back(mark)
        self._begin_name(self._behind_head)
        return at + len(mark)

    def _begin_name(self, then: Step) -> None:
        self._name, self._then, self._step = [], then, self._read_name
        self._in_code = False

    def _read_name(self, text: str, at: int) -> int | None:
        """Read the type of a call or its name."""
        after = self._skip(text, at, self._word)
        self._name.append(text[at:after])
        if after < len(text):
            if self._to_name(self._name):
                self._step = self._then
            else:
                self._give_back()
        return after

    def _behind_head(self, text: str, at: int) -> int | None:
        mark = begins(text, at, (SEPARATOR,))
        if mark is None:
            return None
        if not mark:
            self._give_back()
            return at
        self._out.hold_back(mark)
        self._step = self._behind_separator
        return at + len(mark)

    def _behind_separator(self, text: str, at: int) -> int | None:
        """Read arguments; if a word comes first, that is the name."""
        after = self._skip(text, at)
        if after > at:
            return after
        if text[at] == "{":
            self._begin_arguments()
        else:
            self._begin_name(self._behind_name)
        return at

    def _behind_name(self, text: str, at: int) -> int | None:
        after = self._skip(text, at)
        if after > at:
            return after
        if text[at] == "{":
            self._begin_arguments()
            return at
        mark = begins(text, at, (OPEN_CODE,))
        if mark is None:
            return None
        if not mark:
            self._give_back()
            return at
        self._out.hold_back(mark)
        self._in_code = True
        return at + len(mark)

    def _begin_arguments(self) -> None:
        self._out.begin(self._to_name(self._name))
        self._extent, self._step = Extent(), self._read_arguments

    def _read_arguments(self, text: str, at: int) -> int | None:
        after = self._extent.read(text, at)
        self._out.arguments(text[at:after])
        if self._extent.ended:
            self._step = self._read_closing
        return after

    def _read_closing(self, text: str, at: int) -> int | None:
        after = self._skip(text, at)
        if after > at:
            return after
        marks = (CLOSE_CALL, CLOSE, OPEN_CALL)
        mark = begins(text, at, (CLOSE_CODE, *marks) if self._in_code else marks)
        if mark is None:
            return None
        if not mark:
            self._give_back()
            return at
        self._out.drop()
        self._in_code = False
        if mark == OPEN_CALL:
            self._out.hold_back(mark)
            self._begin_name(self._behind_head)
        elif mark == CLOSE:
            self._step = self._content
        return at + len(mark)
