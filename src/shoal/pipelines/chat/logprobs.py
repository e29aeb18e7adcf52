"""Log probabilities of the visible tokens, released together with their text."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate

from shoal.pipelines.chat.segments import Segment
from shoal.types import TokenLogprob


class LogprobQueue:
    """Holds each token back as long as its text is held back.

    Tokens of reasoning, calls and markers between them are dropped: as in OpenAI's API, only those of the content are
    returned. If a backend puts many tokens in one piece, and reasoning and content share the same text, some tokens of
    the reasoning may be attributed to the content.
    """

    def __init__(self) -> None:
        self._pending: deque[TokenLogprob] = deque()
        self._positioned: deque[tuple[int, TokenLogprob]] = deque()
        self._size = 0
        self._ends_in_text = False

    def add(self, tokens: Iterable[TokenLogprob]) -> None:
        self._pending.extend(tokens)

    def place(self, segments: Sequence[Segment], divided: bool) -> None:
        """Assign pending tokens to the segments since the last call; no segments keep the tokens waiting. `divided`:
        there may be markers that are in no segment."""
        if not segments:
            return
        if not divided or (self._ends_in_text and len(segments) == 1 and segments[0].kind == "text"):
            for segment in segments:
                self._place(list(self._pending), len(segment.text))
                self._pending.clear()
        else:
            self._match_segments(segments)
        self._ends_in_text = segments[-1].kind == "text"

    def pop_tokens(self, size: int) -> list[TokenLogprob]:
        """Return the unreleased tokens that begin within the first `size` characters of content."""
        made: list[TokenLogprob] = []
        while self._positioned and self._positioned[0][0] < size:
            made.append(self._positioned.popleft()[1])
        return made

    def _match_segments(self, segments: Sequence[Segment]) -> None:
        """Assign tokens to segments by searching for each segment's text among theirs."""
        tokens = list(self._pending)
        self._pending.clear()
        spelt = [_octets(token) for token in tokens]
        ends = list(accumulate(map(len, spelt)))
        whole, at = b"".join(spelt), 0
        for number, segment in enumerate(segments):
            octets = segment.text.encode("utf-8", "replace")
            last = number == len(segments) - 1
            found = whole.rfind(octets, at) if last else whole.find(octets, at)
            start = found if found >= 0 else max(at, len(whole) - len(octets)) if last else at
            at = start + len(octets)
            if segment.kind == "text":
                first = bisect_right(ends, start)
                self._place(tokens[first : bisect_left(ends, at) + 1], len(segment.text))

    def _place(self, tokens: Sequence[TokenLogprob], size: int) -> None:
        at = self._size
        self._size += size
        for token in tokens:
            # Half a character counts more here than it is; no token may lie after its text.
            self._positioned.append((min(at, self._size - 1), token))
            at += len(token.token)


def _octets(token: TokenLogprob) -> bytes:
    return token.data if token.data is not None else token.token.encode("utf-8", "replace")
