"""Parser of Mistral's formats: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, and in newer models
`[TOOL_CALLS]name[ARGS]{...}` or `[TOOL_CALLS]name{...}`, once per call.

Source of the format: Mistral's documentation of its tokenizers, v3 to v13, and its chat templates.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.pipelines.chat.tools.call_object import Extent, ObjectListReader
from shoal.pipelines.chat.tools.reader import WORD, begins
from shoal.pipelines.chat.tools.result_collector import DeltaCollector
from shoal.types import Tool

OPEN = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"


class MistralParser(ObjectListReader):
    """Parses an array of objects, one object, or a name with arguments after each marker. Ignores the model's call ids,
    since only Shoal's own are known to be unique."""

    _marks = (OPEN,)
    markup = (OPEN, ARGS, CALL_ID)

    def __init__(self, out: DeltaCollector, tools: Sequence[Tool]) -> None:
        super().__init__(out, tools)
        self._extent = Extent()
        self._name: list[str] = []

    def _read_other(self, text: str, at: int) -> int | None:
        self._name = []
        self._step = self._read_name
        return at

    def _read_name(self, text: str, at: int) -> int | None:
        after = self._skip(text, at, self._word)
        self._name.append(text[at:after])
        if after < len(text):
            if self._to_name(self._name):
                self._step = self._behind_name
            else:
                self._give_back()
        return after

    def _behind_name(self, text: str, at: int) -> int | None:
        """Read the arguments, with or without a marker; a call id may come before it."""
        after = self._skip(text, at)
        if after > at:
            return after
        if text[at] == "{":
            self._out.begin(self._to_name(self._name))
            self._extent, self._step = Extent(), self._arguments
            return at
        mark = begins(text, at, (ARGS, CALL_ID))
        if mark is None:
            return None
        if not mark:
            self._give_back()
            return at
        self._out.hold_back(mark)
        if mark == CALL_ID:
            self._step = self._read_id
        return at + len(mark)

    def _read_id(self, text: str, at: int) -> int | None:
        after = self._skip(text, at, WORD)
        if after < len(text):
            self._step = self._behind_name
        return after

    def _arguments(self, text: str, at: int) -> int | None:
        after = self._extent.read(text, at)
        self._out.arguments(text[at:after])
        if self._extent.ended:
            self._step = self._content
        return after
