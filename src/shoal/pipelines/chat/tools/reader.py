"""How the parsers walk through an answer that comes in fragments."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

from shoal.pipelines.chat.tools.outlet import MAX_BEGUN, DeltaCollector
from shoal.types import ToolDelta

Step: TypeAlias = Callable[[str, int], int | None]

_BLANK_RUN = re.compile(r"[ \t\r\n]*")


def overlap(text: str, start: int, marks: tuple[str, ...]) -> int:
    """How many characters at the end of `text[start:]` may be the beginning of one of the marks, which it does not
    hold whole."""
    longest = max(map(len, marks)) - 1
    for size in range(min(longest, len(text) - start), 0, -1):
        end = text[-size:]
        if any(mark.startswith(end) for mark in marks):
            return size
    return 0


def begins(text: str, start: int, marks: tuple[str, ...]) -> str | None:
    """The mark that `text[start:]` begins with; "" where it has none of them; None while it may become one."""
    for mark in marks:
        if text.startswith(mark, start):
            return mark
    rest = text[start : start + max(map(len, marks))]
    return None if any(mark.startswith(rest) for mark in marks) else ""


class Reader(ABC):
    """A parser as a chain of steps: the shared part of all formats.

    A step takes the text and a place in it and answers how far it got, after it has perhaps set another `_step`; or
    None when it must see more, and then at most the beginning of a mark is left to be seen again. So every character is
    read once, and an answer of n characters takes time proportional to n however it is cut. Steps decide by what was
    read, never by where a fragment ends: the outcome does not depend on that either.

    `_marks`: what begins a call in the midst of content; the text after one is read by `_read_opening`. `markup`: all
    marks of the format.
    """

    _marks: tuple[str, ...] = ()
    markup: tuple[str, ...] = ()

    def __init__(self, out: DeltaCollector) -> None:
        self._out = out
        self._kept = ""
        self._step: Step = self._content
        self._pattern = re.compile("|".join(map(re.escape, self._marks)))

    @property
    def calls(self) -> int:
        """Calls told so far."""
        return self._out.calls

    def push(self, text: str) -> tuple[str, list[ToolDelta]]:
        """Content that is certainly no call, and fragments of calls."""
        start = 0
        while start < len(text):
            # Not more at once than may still be undecided, so that the limit falls on the same character always.
            stop = start + MAX_BEGUN - self._out.begun_size - len(self._kept)
            self._read(text[start:stop])
            start = stop
            if self._out.begun_size + len(self._kept) >= MAX_BEGUN:
                self._give_back()
        return self._out.take()

    def flush(self) -> tuple[str, list[ToolDelta]]:
        """The rest, now that nothing follows. What was begun and is no call yet is content. A call of which something
        was told stays as far as it came: an end made up here could make half of a command look whole."""
        if self._between_calls():
            self._out.drop()
        self._out.give_back()
        self._out.content(self._kept)
        self._kept = ""
        self._out.finish()
        return self._out.take()

    def _read(self, text: str) -> None:
        text = self._kept + text
        self._kept = ""
        at = 0
        while at < len(text):
            after = self._step(text, at)
            if after is None:
                self._kept = text[at:]
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
        """The step behind a mark."""

    def _between_calls(self) -> bool:
        """Whether what was begun are separators behind a call: nothing, when nothing follows."""
        return False

    def _give_back(self) -> None:
        """What was begun is no call: on with content."""
        self._out.give_back()
        self._step = self._content

    def _skip(self, text: str, at: int, pattern: re.Pattern[str] = _BLANK_RUN) -> int:
        """Behind the blanks, or what else the pattern takes; they belong to what was begun."""
        match = pattern.match(text, at)
        end = match.end() if match else at
        self._out.hold_back(text[at:end])
        return end
