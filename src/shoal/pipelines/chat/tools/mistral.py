"""Parser of Mistral's formats: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, and in newer models
`[TOOL_CALLS]name[ARGS]{...}` or `[TOOL_CALLS]name{...}`, once per call.

Source of the format: Mistral's documentation of its tokenizers, v3 to v13, and its chat templates.
"""

from __future__ import annotations

from shoal.pipelines.chat.tools.call_object import NamedCallReader, ObjectListReader
from shoal.pipelines.chat.tools.reader import WORD

OPEN = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"


class MistralParser(ObjectListReader, NamedCallReader):
    """Parses an array of objects, one object, or a name with arguments after each marker. Ignores the model's call ids,
    since only Shoal's own are known to be unique."""

    _marks = (OPEN,)
    markup = (OPEN, ARGS, CALL_ID)

    def _read_other(self, text: str, at: int) -> int | None:
        self._begin_name(self._behind_name)
        return at

    def _behind_name(self, text: str, at: int) -> int | None:
        """Read the arguments, with or without a marker; a call id may come before it."""
        after = self._skip(text, at)
        if after > at:
            return after
        if text[at] == "{":
            self._begin_arguments()
            return at
        mark = self._hold_mark(text, at, (ARGS, CALL_ID))
        if mark == CALL_ID:
            self._step = self._read_id
        return None if mark is None else at + len(mark)

    def _read_id(self, text: str, at: int) -> int | None:
        after = self._skip(text, at, WORD)
        if after < len(text):
            self._step = self._behind_name
        return after

    def _end_arguments(self) -> None:
        self._step = self._content
