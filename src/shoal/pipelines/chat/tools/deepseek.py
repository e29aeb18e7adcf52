"""Parser of DeepSeek's format: a list of calls between markers, each a name and its arguments.

Source of the format: DeepSeek's chat templates. R1 and V3 write a type, the name and a block of code with the
arguments; V3.1 writes only the name and the arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.pipelines.chat.tools.call_object import NamedCallReader
from shoal.pipelines.chat.tools.reader import begins
from shoal.pipelines.chat.tools.result_collector import DeltaCollector
from shoal.types import Tool

OPEN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
CLOSE = "<\uff5ctool\u2581calls\u2581end\uff5c>"
OPEN_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"
CLOSE_CALL = "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
OPEN_CODE = "```json"
CLOSE_CODE = "```"


class DeepSeekParser(NamedCallReader):
    """Parses calls between markers. Tolerates missing markers around the list, and a missing one after a call."""

    _marks = (OPEN, OPEN_CALL)
    markup = (OPEN, CLOSE, OPEN_CALL, CLOSE_CALL, SEPARATOR)

    def __init__(self, out: DeltaCollector, tools: Sequence[Tool]) -> None:
        super().__init__(out, tools)
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
        mark = self._hold_mark(text, at, (OPEN_CALL,))
        if mark:
            self._begin_name(self._behind_head)
        return None if mark is None else at + len(mark)

    def _behind_head(self, text: str, at: int) -> int | None:
        mark = self._hold_mark(text, at, (SEPARATOR,))
        if mark:
            self._in_code = False
            self._step = self._behind_separator
        return None if mark is None else at + len(mark)

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
        mark = self._hold_mark(text, at, (OPEN_CODE,))
        if mark:
            self._in_code = True
        return None if mark is None else at + len(mark)

    def _end_arguments(self) -> None:
        self._step = self._read_closing

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
