"""Base class of the tool call parsers: walks through an answer that arrives in fragments."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from shoal.pipelines.chat.tools.result_collector import MAX_BEGUN, DeltaCollector
from shoal.types import Tool, ToolDelta

MAX_NAME = 256

Step: TypeAlias = Callable[[str, int], int | None]

BLANK_RUN = re.compile(r"[ \t\r\n]*")
SEPARATORS = re.compile(r"[ \t\r\n,]*")
WORD = re.compile(r"[\w.-]*")
_BEHIND_NAMES = frozenset("[{<")
"""Characters that end a name in every format, even if an offered name has them."""


def overlap(text: str, start: int, marks: tuple[str, ...]) -> int:
    """Return how many characters at the end of `text[start:]` may begin one of the markers, not counting complete
    ones."""
    longest = max(map(len, marks)) - 1
    for size in range(min(longest, len(text) - start), 0, -1):
        end = text[-size:]
        if any(mark.startswith(end) for mark in marks):
            return size
    return 0


def begins(text: str, start: int, marks: tuple[str, ...]) -> str | None:
    """Return the marker at the start of `text[start:]`; "" if there is none; None while it may become one."""
    for mark in marks:
        if text.startswith(mark, start):
            return mark
    rest = text[start : start + max(map(len, marks))]
    return None if any(mark.startswith(rest) for mark in marks) else ""


class Reader(ABC):
    """A parser as a chain of steps: the part shared by all formats.

    A step takes the text and a position, returns how far it got, and may set another `_step`. It returns None if it
    needs more text; then at most the beginning of a marker is left to be read again. So each character is read once,
    and an answer of n characters takes time proportional to n however it is split. Steps decide by the text read, never
    by where a fragment ends, so the result does not depend on the fragments either.

    `_marks`: markers that begin a call within content; `_read_opening` reads the text after one. `_closes`: those that
    may follow a call, for `_read_closing`. `markup`: all markers of the format. `_tools`: the offered tools by name.
    `_word`: a run of characters of names, including those of the offered tools.
    """

    _marks: tuple[str, ...] = ()
    _closes: tuple[str, ...] = ()
    markup: tuple[str, ...] = ()

    def __init__(self, out: DeltaCollector, tools: Sequence[Tool]) -> None:
        self._out = out
        self._tools = {tool.name: tool for tool in tools}
        unusual = sorted({char for name in self._tools for char in name if char.isprintable()} - _BEHIND_NAMES)
        self._word = re.compile(rf"[\w.\-{re.escape(''.join(unusual))}]*")
        self._pending = ""
        self._step: Step = self._content
        self._pattern = re.compile("|".join(map(re.escape, self._marks)))

    @property
    def calls(self) -> int:
        """Number of calls emitted so far."""
        return self._out.calls

    def push(self, text: str) -> tuple[str, list[ToolDelta]]:
        """Return content that is certainly not a call, and fragments of calls."""
        start = 0
        while start < len(text):
            # Read no more than may still be undecided, so that the limit always falls on the same character.
            stop = start + MAX_BEGUN - self._out.pending_size - len(self._pending)
            self._read(text[start:stop])
            start = stop
            if self._out.pending_size + len(self._pending) >= MAX_BEGUN:
                self._give_back()
        return self._out.take()

    def flush(self) -> tuple[str, list[ToolDelta]]:
        """Return the rest at the end of the answer. Text held back that is not a call yet is content. A call of which
        something was emitted stays incomplete: a made-up end could make half of a command look whole."""
        if self._between_calls():
            self._out.drop()
        self._out.give_back()
        self._out.content(self._pending)
        self._pending = ""
        self._out.finish()
        return self._out.take()

    def _read(self, text: str) -> None:
        text = self._pending + text
        self._pending = ""
        at = 0
        while at < len(text):
            after = self._step(text, at)
            if after is None:
                self._pending = text[at:]
                return
            at = after

    def _content(self, text: str, at: int) -> int | None:
        found = self._pattern.search(text, at)
        if found:
            self._out.content(text[at : found.start()])
            self._out.hold_back(found[0])
            self._step = self._read_opening
            return found.end()
        end = len(text) - overlap(text, at, self._marks)
        self._out.content(text[at:end])
        return end if end > at else None

    @abstractmethod
    def _read_opening(self, text: str, at: int) -> int | None:
        """The step after a marker."""

    def _read_closing(self, text: str, at: int) -> int | None:
        """The step after a call that a marker may follow; anything else but blanks is content."""
        after = self._skip(text, at)
        if after > at:
            return after
        mark = begins(text, at, self._closes)
        if mark is None:
            return None
        if mark:
            self._out.drop()
            self._step = self._content
            return at + len(mark)
        self._give_back()
        return at

    def _between_calls(self) -> bool:
        """Whether the text held back is only separators after a call, to be dropped at the end of the answer."""
        return False

    def _give_back(self) -> None:
        """Release the text held back as content, and continue with content."""
        self._out.give_back()
        self._step = self._content

    def _hold_mark(self, text: str, at: int, marks: tuple[str, ...]) -> str | None:
        """As `begins`; a marker is held back, and where there is none, all is content."""
        mark = begins(text, at, marks)
        if mark:
            self._out.hold_back(mark)
        elif mark is not None:
            self._give_back()
        return mark

    def _skip(self, text: str, at: int, pattern: re.Pattern[str] = BLANK_RUN) -> int:
        """Skip blanks, or whatever the pattern matches, and hold them back."""
        match = pattern.match(text, at)
        end = match.end() if match else at
        self._out.hold_back(text[at:end])
        return end


class NameReader(Reader):
    """A Reader of formats in which the name of a call stands by itself."""

    def __init__(self, out: DeltaCollector, tools: Sequence[Tool]) -> None:
        super().__init__(out, tools)
        self._name: list[str] = []
        self._behind: Step = self._content

    def _begin_name(self, behind: Step) -> None:
        """Read a name next, then go on with the step `behind`."""
        self._name, self._behind, self._step = [], behind, self._read_name

    def _read_name(self, text: str, at: int) -> int | None:
        after = self._skip(text, at, self._word)
        self._name.append(text[at:after])
        if after < len(text):
            if self._to_name(self._name):
                self._step = self._behind
            else:
                self._give_back()
        return after

    def _to_name(self, parts: Sequence[str]) -> str:
        """Return the name that the text read is; "" if it is none. A name with other characters than those of WORD must
        have been offered."""
        name = "".join(parts).strip(" ")
        return name if len(name) <= MAX_NAME and (WORD.fullmatch(name) or name in self._tools) else ""


class Call(Protocol):
    """One call as it is read. `ended`: it is complete. `broken`: it is not a call, or no longer one. `sent`: something
    of it was emitted."""

    ended: bool
    broken: bool
    sent: bool

    def read(self, text: str, at: int) -> int | None: ...


class CallReader(Reader):
    """A Reader of formats in which a Call reads each call."""

    _call: Call

    def _begin_call(self, call: Call) -> None:
        self._call, self._step = call, self._read_call

    @abstractmethod
    def _end_call(self) -> None:
        """Set the step after a call."""

    def _read_call(self, text: str, at: int) -> int | None:
        call = self._call
        after = call.read(text, at)
        if call.ended or (call.broken and call.sent):
            self._end_call()
        elif call.broken:
            self._give_back()
        return after
