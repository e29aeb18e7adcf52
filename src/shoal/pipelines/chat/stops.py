"""Texts that end an answer, found across the borders of its pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Passes a text on up to the first stop text in it, however it is cut into pieces.

    The match that begins first counts, and of those that begin there the shortest. `include`: the stop text is passed
    on as well. What may be the beginning of a stop text is kept back, and nothing else.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(sorted({stop for stop in stops if stop}, key=len))
        self._beginnings = [_PrefixMatcher(stop) for stop in self._stops]
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """What can be passed on, and whether a stop text was met; after that nothing more is to be pushed."""
        if not self._stops:
            return text, False
        begun = max(beginning.push(text) for beginning in self._beginnings)
        text = self._held + text
        match, begun = self._match(text), len(text) - begun
        if match is not None and match[0] <= begun:
            return self._end(text, match)
        self._held = text[begun:]
        return text[:begun], False

    def flush(self) -> tuple[str, bool]:
        """What was kept back. It may hold a stop text: one that another, longer one could have begun before."""
        text = self._held
        match = self._match(text)
        return self._end(text, match or (len(text), len(text)))[0], match is not None

    def _end(self, text: str, match: tuple[int, int]) -> tuple[str, bool]:
        self._held = ""
        for beginning in self._beginnings:
            beginning.length = 0
        return text[: match[1] if self._include else match[0]], True

    def _match(self, text: str) -> tuple[int, int] | None:
        """Where the first stop text begins and ends."""
        found = [(at, at + len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found, default=None)


class _PrefixMatcher:
    """How much of one stop text a growing text ends with, never all of it. Each letter is looked at about twice
    (Knuth, Morris and Pratt: Fast Pattern Matching in Strings, 1977)."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.length = 0
        # For each beginning of the stop text, the longest shorter one that it ends with.
        self._shorter = [0]
        length = 0
        for letter in stop[1:]:
            length = self._extend(length, letter)
            self._shorter.append(length)

    def push(self, text: str) -> int:
        most = len(self._stop) - 1
        length = self.length
        if len(text) >= most:
            text, length = text[len(text) - most :], 0
        for letter in text:
            length = self._extend(length, letter)
            if length > most:
                length = self._shorter[most]
        self.length = length
        return length

    def _extend(self, length: int, letter: str) -> int:
        while length and self._stop[length] != letter:
            length = self._shorter[length - 1]
        return length + (self._stop[length] == letter)
