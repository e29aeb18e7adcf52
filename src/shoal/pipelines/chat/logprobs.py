"""The log probabilities of the tokens that a reader is shown, told together with their text."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate

from shoal.pipelines.chat.segments import Segment
from shoal.types import TokenLogprob


class LogprobQueue:
    """Keeps each token back as long as its text is kept back.

    Tokens of thoughts, of calls and of marks between them are dropped: what is told are those of the content, as
    OpenAI's API has it. Where a backend gives many tokens in one piece, and the same text is thought and said, some of
    the thoughts' may be taken for those of the content.
    """

    def __init__(self) -> None:
        self._pending: deque[TokenLogprob] = deque()
        self._placed: deque[tuple[int, TokenLogprob]] = deque()
        self._size = 0
        self._within = False

    def add(self, tokens: Iterable[TokenLogprob]) -> None:
        self._pending.extend(tokens)

    def place(self, segments: Sequence[Segment], divided: bool) -> None:
        """What came of the text since the last call; nothing leaves the tokens waiting. `divided`: there may be marks
        that are in no segment."""
        if not segments:
            return
        if not divided or (self._within and len(segments) == 1 and segments[0].kind == "text"):
            for segment in segments:
                self._place(list(self._pending), len(segment.text))
                self._pending.clear()
        else:
            self._match_segments(segments)
        self._within = segments[-1].kind == "text"

    def pop_tokens(self, size: int) -> list[TokenLogprob]:
        """The tokens that begin within the first `size` characters of content, and were not told before."""
        made: list[TokenLogprob] = []
        while self._placed and self._placed[0][0] < size:
            made.append(self._placed.popleft()[1])
        return made

    def _match_segments(self, segments: Sequence[Segment]) -> None:
        """Which tokens made which segment is told by finding its text among theirs."""
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
            # Half a character counts more here than it is; no token may lie behind the text that it is of.
            self._placed.append((min(at, self._size - 1), token))
            at += len(token.token)


def _octets(token: TokenLogprob) -> bytes:
    return token.data if token.data is not None else token.token.encode("utf-8", "replace")
