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
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """What can be passed on, and whether a stop text was met; after that nothing more is to be pushed."""
        if not self._stops:
            return text, False
        text = self._held + text
        match, begun = self._match(text), self._begun(text)
        if match is not None and match[0] <= begun:
            return self._end(text, match)
        self._held = text[begun:]
        return text[:begun], False

    def flush(self) -> tuple[str, bool]:
        """What was kept back. It may hold a stop text: one that another, longer one could have begun before."""
        text, self._held = self._held, ""
        match = self._match(text)
        return (text, False) if match is None else self._end(text, match)

    def _end(self, text: str, match: tuple[int, int]) -> tuple[str, bool]:
        self._held = ""
        return text[: match[1] if self._include else match[0]], True

    def _match(self, text: str) -> tuple[int, int] | None:
        """Where the first stop text begins and ends."""
        found = [(at, at + len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found, default=None)

    def _begun(self, text: str) -> int:
        """The first place from which the rest is the beginning of a longer stop text; the end where there is none."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            rest = text[at:]
            if any(len(stop) > len(rest) and stop.startswith(rest) for stop in self._stops):
                return at
        return len(text)
