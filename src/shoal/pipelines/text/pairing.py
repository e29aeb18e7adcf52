"""Two texts that a model reads together, as tokens: framed and cut as the tokenizers library does it for pairs.

Each distinct text of a job is tokenised once, by itself, and the pairs are put together here: the library tokenises
each half of a pair on its own as well, so the tokens are the same. A single text is framed as a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import ShoalError
from shoal.pipelines import probing
from shoal.pipelines.text.tokenizer import FittedText, TextTokenizer, most_chars
from shoal.types import Direction


class PairInput(NamedTuple):
    """What is to be read: one text, or two. `most`: tokens that the second is cut to by itself, before all else."""

    first: str
    second: str | None
    direction: Direction
    most: int | None = None


@dataclass(frozen=True, slots=True)
class FramedText:
    """`ids`: what is kept, special tokens included. `first`, `second`: how many of them each text has; `second` None:
    there is one text. `total`: tokens before it was cut to what the model takes, a lower bound when not `exact`.
    `fits`: it was not. `cut`: not all of both texts was kept."""

    ids: list[int]
    first: int
    second: int | None
    total: int
    exact: bool
    fits: bool
    cut: bool


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts are kept where there is room for so many: the longer one is cut down to the other,
    then both are; of an odd number the longer one keeps one more, the second where they are equal. That is the strategy
    of this name of the tokenizers library and of transformers."""
    if first + second <= room:
        return first, second
    half = room // 2
    if first > second:
        return (room - second, second) if second <= half else (room - half, half)
    return (first, room - first) if first <= half else (half, room - half)


class PairTokenizer:
    """Reads single texts and pairs for a model that takes `max_tokens`, special ones included.

    `frame` is that of a pair. Safe to use from several threads at once. Raises ModelFileError where the tokenizer's
    post-processor frames pairs in a way that cannot be kept when cutting.
    """

    def __init__(self, tokenizer: TextTokenizer, file: str, max_tokens: int) -> None:
        self.frame = probing.find_pair_frame(tokenizer.raw, file)
        self._tokenizer = tokenizer
        self._edges = len(tokenizer.prefix) + len(tokenizer.suffix)
        self._alone = max(max_tokens - self._edges, 0)
        self._room = max(max_tokens - self.frame.size, 0)

    def read(self, readings: Sequence[PairInput]) -> list[FramedText | ShoalError]:
        """One entry a reading, in order: InvalidValue for a text that the tokenizer cannot read."""
        job = _Job(self._tokenizer, readings, max(self._alone, self._room))
        return [
            self._read_single(job, reading) if reading.second is None else self._read_pair(job, reading, reading.second)
            for reading in readings
        ]

    def types(self, framed: FramedText) -> list[int]:
        """The segment id of each token."""
        if framed.second is None:
            return [0] * len(framed.ids)
        return self.frame.types(framed.first, framed.second)

    def _read_single(self, job: _Job, reading: PairInput) -> FramedText | ShoalError:
        fitted = job.get_fitted(reading.first, reading.direction)
        if isinstance(fitted, ShoalError):
            return fitted
        ids = _cut_ids(fitted.ids, self._alone, reading.direction)
        return FramedText(
            ids=[*self._tokenizer.prefix, *ids, *self._tokenizer.suffix],
            first=len(ids),
            second=None,
            total=self._edges + fitted.total,
            exact=fitted.exact,
            fits=fitted.total <= len(ids),
            cut=fitted.total > len(ids),
        )

    def _read_pair(self, job: _Job, reading: PairInput, second_text: str) -> FramedText | ShoalError:
        direction, most = reading.direction, reading.most
        first, second = job.get_fitted(reading.first, direction), job.get_fitted(second_text, direction)
        if isinstance(first, ShoalError):
            return first
        if isinstance(second, ShoalError):
            return second
        counts = first.total, second.total if most is None else min(second.total, most)
        exact = first.exact and (second.exact or counts[1] == most)
        half = self._room // 2
        told = counts
        if self._room % 2 and min(counts) > half and not exact and not _is_order_known(first, second, most):
            told = job.count(reading.first), job.count(second_text)
            told = told if most is None else (told[0], min(told[1], most))
        keeps = longest_first(*told, self._room)
        left = _cut_ids(first.ids, keeps[0], direction)
        right = _cut_ids(_cut_ids(second.ids, most, direction), keeps[1], direction)
        kept = len(left) + len(right)
        return FramedText(
            ids=self.frame.ids(left, right),
            first=len(left),
            second=len(right),
            total=self.frame.size + sum(counts),
            exact=exact,
            fits=sum(counts) <= kept,
            cut=first.total + second.total > kept,
        )


class _Job:
    """The distinct texts of one job, each tokenised once and cut to `limit`, the most that is ever kept of it."""

    def __init__(self, tokenizer: TextTokenizer, readings: Sequence[PairInput], limit: int) -> None:
        self._tokenizer = tokenizer
        self._most = most_chars(limit)
        self._counts: dict[str, int] = {}
        texts: dict[tuple[str, Direction], None] = {}
        for reading in readings:
            texts[reading.first, reading.direction] = None
            if reading.second is not None:
                texts[reading.second, reading.direction] = None
        fits = tokenizer.fit_each(
            [text for text, _ in texts], [direction for _, direction in texts], limit, special=False
        )
        self._fits = dict(zip(texts, fits, strict=True))

    def get_fitted(self, text: str, direction: Direction) -> FittedText | ShoalError:
        return self._fits[text, direction]

    def count(self, text: str) -> int:
        """The tokens of a text; of one that is longer than anybody reads, a number that grows with its characters."""
        if text not in self._counts:
            count, whole = self._tokenizer.count(text, self._most)
            self._counts[text] = count if whole else count + len(text) - self._most
        return self._counts[text]


def _is_order_known(first: FittedText, second: FittedText, most: int | None) -> bool:
    """Whether their totals, of which some are lower bounds, tell which text is the longer one."""
    if most is not None and most <= second.total:
        second = FittedText(second.ids, most, True)
    if first.exact:
        return second.exact or second.total >= first.total
    return second.exact and first.total > second.total


def _cut_ids(ids: list[int], count: int | None, direction: Direction) -> list[int]:
    """The `count` tokens that are kept where the others are cut off in that direction."""
    if count is None or count >= len(ids):
        return ids
    return ids[:count] if direction == "right" else ids[len(ids) - count :]
