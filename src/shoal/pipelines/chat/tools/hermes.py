"""Parser of the Hermes and Qwen format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Source of the format: the chat templates of NousResearch's Hermes 2 Pro and of Qwen 2.5, Qwen 3 and Qwen3-Coder.
"""

from __future__ import annotations

from shoal.pipelines.chat.tools.call_object import CallObject
from shoal.pipelines.chat.tools.qwen import FUNCTION, TaggedCall
from shoal.pipelines.chat.tools.reader import CallReader, begins

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser(CallReader):
    """Parses one or more calls per pair of tags, each an object or the tagged form of Qwen3-Coder.

    Tolerates a missing end tag, and an object that lacks its last brace before the end tag.
    """

    _marks = (OPEN,)
    markup = (OPEN, CLOSE)

    def _read_opening(self, text: str, at: int) -> int | None:
        after = self._skip(text, at)
        return after if after > at else self._begin(text, at, closes=False)

    def _read_closing(self, text: str, at: int) -> int | None:
        after = self._skip(text, at)
        return after if after > at else self._begin(text, at, closes=True)

    def _begin(self, text: str, at: int, *, closes: bool) -> int | None:
        """Start a call, consume an allowed end tag, or give the text back as content."""
        if text[at] == "{":
            self._begin_call(CallObject(self._out))
            return at
        mark = begins(text, at, (FUNCTION, CLOSE) if closes else (FUNCTION,))
        if mark is None:
            return None
        if mark == CLOSE:
            self._out.drop()
            self._step = self._content
            return at + len(CLOSE)
        if mark == FUNCTION:
            self._out.hold_back(FUNCTION)
            self._begin_call(TaggedCall(self._out, self._tools))
            return at + len(FUNCTION)
        self._give_back()
        return at

    def _end_call(self) -> None:
        self._step = self._read_closing
