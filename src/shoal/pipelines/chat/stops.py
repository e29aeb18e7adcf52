"""Find stop texts in an answer, across the boundaries of its pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Passes text on up to the first stop text in it, however it is split into pieces.

    The match that begins first wins, and among those the shortest. `include`: pass the stop text on as well. Only a
    possible beginning of a stop text is held back. `found`: the stop text that ended the answer, "" if none did.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(sorted({stop for stop in stops if stop}, key=len))
        self._beginnings = [_PrefixMatcher(stop) for stop in self._stops]
        self._include = include
        self._pending = ""
        self.found = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text to pass on, and whether a stop text was found; after that, push nothing more."""
        if not self._stops:
            return text, False
        begun = max(beginning.push(text) for beginning in self._beginnings)
        text = self._pending + text
        match, begun = self._match(text), len(text) - begun
        if match is not None and match[0] <= begun:
            return self._end(text, match)
        self._pending = text[begun:]
        return text[:begun], False

    def flush(self) -> tuple[str, bool]:
        """Return the text held back. It may contain a stop text that a longer, earlier candidate was hiding."""
        text = self._pending
        match = self._match(text)
        return self._end(text, match or (len(text), len(text)))[0], match is not None

    def _end(self, text: str, match: tuple[int, int]) -> tuple[str, bool]:
        self._pending = ""
        self.found = text[match[0] : match[1]]
        for beginning in self._beginnings:
            beginning.length = 0
        return text[: match[1] if self._include else match[0]], True

    def _match(self, text: str) -> tuple[int, int] | None:
        """Return where the first stop text begins and ends."""
        found = [(at, at + len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found, default=None)


class _PrefixMatcher:
    """Tracks how much of one stop text a growing text ends with, never all of it. Looks at each character about twice
    (Knuth, Morris and Pratt: Fast Pattern Matching in Strings, 1977)."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.length = 0
        # For each prefix of the stop text, the length of the longest shorter prefix that it ends with.
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
