"""Split one answer's text into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeAlias

from shoal.pipelines.chat.reasoning import ReasoningSplit
from shoal.pipelines.chat.tools import ToolParser
from shoal.types import ToolDelta

Kind: TypeAlias = Literal["reasoning", "text", "tools"]


@dataclass(frozen=True, slots=True)
class Segment:
    kind: Kind
    text: str = ""
    tools: Sequence[ToolDelta] = ()

    @property
    def size(self) -> int:
        """Length in characters; for a call, of the name and arguments emitted so far."""
        return len(self.text) + sum(len(delta.name) + len(delta.arguments) for delta in self.tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """How to read an answer.

    `reasoning`: it may begin with reasoning; `starts_in_reasoning`: it begins inside of it. `parser` reads calls.
    `guided`: first characters of JSON that guided decoding may have forced from the first token on, instead of
    reasoning or call markup. An answer that begins so has no reasoning, and if a call was required, `plain` reads it.
    """

    reasoning: bool = False
    starts_in_reasoning: bool = False
    parser: Callable[[], ToolParser] | None = None
    guided: str = ""
    plain: Callable[[], ToolParser] | None = None


class Segments:
    """Converts fragments of an answer to segments, in order; holds back text that is still ambiguous.

    Calls come after the text released with them, unless `exact` is set, which takes about a microsecond per character.
    """

    def __init__(self, reading: AnswerFormat, *, exact: bool = False) -> None:
        self._format = reading
        self._exact = exact
        self._pending: str | None = None
        self._split: ReasoningSplit | None = None
        self._parser: ToolParser | None = None
        if reading.guided:
            self._pending = ""
        else:
            self._decide(plain=False)

    @property
    def calls(self) -> int:
        return self._parser.calls if self._parser else 0

    @property
    def is_divided(self) -> bool:
        """Whether anything but text can come out."""
        return self._pending is not None or self._split is not None or self._parser is not None

    def push(self, text: str) -> list[Segment]:
        """Return the new segments; neighbors differ in kind."""
        if not (self._exact and self._format.parser):
            return _merge_neighbors(self._push(text))
        return _merge_neighbors([segment for letter in text for segment in self._push(letter)])

    def _push(self, text: str) -> list[Segment]:
        if self._pending is not None:
            text = self._pending + text
            begun = text.lstrip()
            if not begun:
                self._pending = text
                return []
            self._decide(plain=begun[0] in self._format.guided)
        if self._split is None:
            return self._parse_text(text)
        made: list[Segment] = []
        for kind, part in self._split.push(text):
            made += [Segment("reasoning", part)] if kind == "reasoning" else self._parse_text(part)
        return made

    def flush(self) -> list[Segment]:
        made: list[Segment] = []
        if self._pending is not None:
            text = self._pending
            self._decide(plain=False)
            made += self._push(text)
        for kind, part in self._split.flush() if self._split else ():
            made += [Segment("reasoning", part)] if kind == "reasoning" else self._parse_text(part)
        return _merge_neighbors(made + (_to_segments(*self._parser.flush()) if self._parser else []))

    def _decide(self, *, plain: bool) -> None:
        self._pending = None
        reading = self._format
        if reading.reasoning and not plain:
            self._split = ReasoningSplit(reading.starts_in_reasoning)
        make = reading.plain if plain and reading.plain else reading.parser
        self._parser = make() if make else None

    def _parse_text(self, text: str) -> list[Segment]:
        if self._parser is not None:
            return _to_segments(*self._parser.push(text))
        return [Segment("text", text)] if text else []


def _to_segments(text: str, tools: Sequence[ToolDelta]) -> list[Segment]:
    made = [Segment("text", text)] if text else []
    return [*made, Segment("tools", tools=tools)] if tools else made


def _merge_neighbors(segments: Sequence[Segment]) -> list[Segment]:
    if len(segments) < 2:
        return list(segments)
    made: list[Segment] = []
    for kind, group in groupby(segments, key=lambda segment: segment.kind):
        own = list(group)
        made.append(Segment(kind, "".join(each.text for each in own), [d for each in own for d in each.tools]))
    return made
