"""Parser of the pythonic format of Llama 3.2 and 4, a Python list of calls: `[get_weather(city="Paris"), other(x=[1,
2])]`.

Source of the format: Meta's model cards of Llama 3.2 and 4; LFM2 writes the same between tags of its own.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from shoal.pipelines.chat.tools.call_object import Extent
from shoal.pipelines.chat.tools.literals import arguments_json
from shoal.pipelines.chat.tools.reader import MAX_NAME, SEPARATORS, WORD, Reader
from shoal.pipelines.chat.tools.result_collector import DeltaCollector
from shoal.types import Tool

OPEN = ("<|python_start|>", "<|python_tag|>", "<|tool_call_start|>")
CLOSE = ("<|python_end|>", "<|tool_call_end|>")


class PythonicParser(Reader):
    """Parses a list after a tag, or at the start of an answer. Arguments must be named literals; anything else is never
    executed and is content, not a call.

    A call is emitted once it is complete, since its JSON is built from the literals. Without a tag, its name must have
    been offered.
    """

    _marks = OPEN
    _closes = CLOSE
    markup = (*OPEN, *CLOSE)

    def __init__(self, out: DeltaCollector, tools: Sequence[Tool]) -> None:
        super().__init__(out, tools)
        self._known_names: Container[str] | None = self._tools
        self._has_call = False
        self._name: list[str] = []
        self._arguments: list[str] = []
        self._extent = Extent(single=True)
        self._step = self._start

    def _between_calls(self) -> bool:
        return self._has_call and self._step == self._next

    def _start(self, text: str, at: int) -> int | None:
        return self._begin(text, at, self._tools)

    def _read_opening(self, text: str, at: int) -> int | None:
        return self._begin(text, at, None)

    def _begin(self, text: str, at: int, known: Container[str] | None) -> int:
        after = self._skip(text, at)
        if after > at:
            return after
        if text[at] != "[":
            self._give_back()
            return at
        self._out.hold_back("[")
        self._known_names, self._has_call = known, False
        self._step = self._next
        return at + 1

    def _next(self, text: str, at: int) -> int | None:
        """Read the next call of the list, or its end. A list without calls is content."""
        after = self._skip(text, at, SEPARATORS)
        if after > at:
            return after
        if text[at] == "]" and self._has_call:
            self._out.drop()
            self._step = self._read_closing
            return at + 1
        self._name = []
        self._step = self._read_name
        return at

    def _read_name(self, text: str, at: int) -> int | None:
        after = self._skip(text, at, WORD)
        self._name.append(text[at:after])
        if after == len(text):
            return after
        name = "".join(self._name)
        usable = (
            0 < len(name) <= MAX_NAME
            and not name[0].isdigit()
            and (self._known_names is None or name in self._known_names)
        )
        if text[after] != "(" or not usable:
            self._give_back()
            return after
        self._extent, self._arguments = Extent(single=True), []
        self._step = self._read_arguments
        return after

    def _read_arguments(self, text: str, at: int) -> int | None:
        after = self._extent.read(text, at)
        self._arguments.append(text[at:after])
        self._out.hold_back(text[at:after])
        if self._extent.ended:
            found = arguments_json("".join(self._arguments))
            self._arguments = []
            if found is None:
                self._give_back()
            else:
                self._out.begin("".join(self._name))
                self._out.arguments(found)
                self._has_call = True
                self._step = self._next
        return after
