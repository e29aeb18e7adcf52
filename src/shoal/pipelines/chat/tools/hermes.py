"""Parser of the Hermes and Qwen format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Source of the format: the chat templates of NousResearch's Hermes 2 Pro and of Qwen 2.5, Qwen 3 and Qwen3-Coder.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.pipelines.chat.tools.call_object import CallObject
from shoal.pipelines.chat.tools.qwen import FUNCTION, TaggedCall
from shoal.pipelines.chat.tools.reader import Reader, begins
from shoal.pipelines.chat.tools.result_collector import DeltaCollector
from shoal.types import Tool

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser(Reader):
    """Parses one or more calls per pair of tags, each an object or the tagged form of Qwen3-Coder.

    Tolerates a missing end tag, and an object that lacks its last brace before the end tag.
    """

    _marks = (OPEN,)
    markup = (OPEN, CLOSE)

    def __init__(self, out: DeltaCollector, tools: Sequence[Tool]) -> None:
        super().__init__(out)
        self._tools = {tool.name: tool for tool in tools}
        self._call: CallObject | TaggedCall = CallObject(out)

    def _read_opening(self, text: str, at: int) -> int | None:
        after = self._skip(text, at)
        return after if after > at else self._begin(text, at, closes=False)

    def _read_closing(self, text: str, at: int) -> int | None:
        after = self._skip(text, at)
        return after if after > at else self._begin(text, at, closes=True)

    def _begin(self, text: str, at: int, *, closes: bool) -> int | None:
        """Start a call, consume an allowed end tag, or give the text back as content."""
        if text[at] == "{":
            self._call, self._step = CallObject(self._out), self._read_call
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
            self._call, self._step = TaggedCall(self._out, self._tools), self._read_call
            return at + len(FUNCTION)
        self._give_back()
        return at

    def _read_call(self, text: str, at: int) -> int | None:
        call = self._call
        after = call.read(text, at)
        if call.ended or (call.broken and call.sent):
            self._step = self._read_closing
        elif call.broken:
            self._give_back()
        return after
