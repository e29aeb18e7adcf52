"""Tokenize pairs of texts for one model input, framed and cut as the tokenizers library does for pairs.

Tokenizes each distinct text of a job once, by itself, and assembles the pairs here. The tokens are the same, since the
library tokenizes each half of a pair separately as well. A single text is framed as a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shoal.errors import ShoalError
from shoal.pipelines import probing
from shoal.pipelines.text.tokenizer import FittedText, TextTokenizer, most_chars
from shoal.types import Direction


class PairInput(NamedTuple):
    """One text or a pair to tokenize. `max_second`: tokens that the second text is cut to before anything else."""

    first: str
    second: str | None
    direction: Direction
    max_second: int | None = None


class FramedText(msgspec.Struct, frozen=True, array_like=True):
    """A framed text or pair. `ids`: the ids kept, special tokens included. `first`, `second`: how many of them each
    text has; `second` None for a single text. `total`: tokens before cutting to the model's limit, a lower bound if not
    `exact`. `fits`: whether nothing was cut to that limit. `cut`: whether part of a text is missing."""

    ids: list[int]
    first: int
    second: int | None
    total: int
    exact: bool
    fits: bool
    cut: bool


def longest_first(first: int, second: int, max_tokens: int) -> tuple[int, int]:
    """Return how many tokens of two texts to keep within `max_tokens`, by the "longest_first" strategy of the
    tokenizers library and of transformers. The longer text is cut down to the shorter, then both equally. If
    `max_tokens` is odd, the longer one keeps one more, or the second if both are equal."""
    if first + second <= max_tokens:
        return first, second
    half = max_tokens // 2
    if first > second:
        return (max_tokens - second, second) if second <= half else (max_tokens - half, half)
    return (first, max_tokens - first) if first <= half else (half, max_tokens - half)


class PairTokenizer:
    """Tokenizes single texts and pairs for a model with `max_tokens`, special tokens included.

    `frame` is the frame of a pair, of `overhead` tokens. Safe to use from several threads at once. Raises
    ModelFileError if the tokenizer's post-processor frames pairs in a way that cutting would break.
    """

    def __init__(self, tokenizer: TextTokenizer, file: str, max_tokens: int) -> None:
        self.frame = probing.find_pair_frame(tokenizer.raw, file)
        self.overhead = self.frame.size
        self._tokenizer = tokenizer
        self._edges = len(tokenizer.prefix) + len(tokenizer.suffix)
        self._max_single = max(max_tokens - self._edges, 0)
        self._max_pair = max(max_tokens - self.frame.size, 0)

    def read(self, readings: Sequence[PairInput]) -> list[FramedText | ShoalError]:
        """Return one entry per reading, in order: InvalidValue for a text that the tokenizer cannot read."""
        job = _Job(self._tokenizer, readings, max(self._max_single, self._max_pair))
        return [
            self._read_single(job, reading) if reading.second is None else self._read_pair(job, reading, reading.second)
            for reading in readings
        ]

    def types(self, framed: FramedText) -> list[int]:
        """Return the segment id of each token."""
        if framed.second is None:
            return [0] * len(framed.ids)
        return self.frame.types(framed.first, framed.second)

    def _read_single(self, job: _Job, reading: PairInput) -> FramedText | ShoalError:
        fitted = job.get_fitted(reading.first, reading.direction)
        if isinstance(fitted, ShoalError):
            return fitted
        ids = _cut_ids(fitted.ids, self._max_single, reading.direction)
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
        direction, max_second = reading.direction, reading.max_second
        first, second = job.get_fitted(reading.first, direction), job.get_fitted(second_text, direction)
        if isinstance(first, ShoalError):
            return first
        if isinstance(second, ShoalError):
            return second
        counts = first.total, second.total if max_second is None else min(second.total, max_second)
        exact = first.exact and (second.exact or counts[1] == max_second)
        half = self._max_pair // 2
        lengths = counts
        if self._max_pair % 2 and min(counts) > half and not exact and not _is_order_known(first, second, max_second):
            lengths = job.count(reading.first), job.count(second_text)
            lengths = lengths if max_second is None else (lengths[0], min(lengths[1], max_second))
        keeps = longest_first(*lengths, self._max_pair)
        left = _cut_ids(first.ids, keeps[0], direction)
        right = _cut_ids(_cut_ids(second.ids, max_second, direction), keeps[1], direction)
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
    """The distinct texts of one job, each tokenized once and cut to `limit`, the most that is ever kept of it."""

    def __init__(self, tokenizer: TextTokenizer, readings: Sequence[PairInput], limit: int) -> None:
        self._tokenizer = tokenizer
        self._max_chars = most_chars(limit)
        self._counts: dict[str, int] = {}
        texts: dict[tuple[str, Direction], None] = {}
        for reading in readings:
            texts[reading.first, reading.direction] = None
            if reading.second is not None:
                texts[reading.second, reading.direction] = None
        fits = tokenizer.fit_each(
            [text for text, _ in texts],
            [direction for _, direction in texts],
            [limit] * len(texts),
            special=False,
        )
        self._fits = dict(zip(texts, fits, strict=True))

    def get_fitted(self, text: str, direction: Direction) -> FittedText | ShoalError:
        return self._fits[text, direction]

    def count(self, text: str) -> int:
        """Return the token count of a text; for one longer than the reading limit, an estimate that grows with its
        characters."""
        if text not in self._counts:
            count, whole = self._tokenizer.count(text, self._max_chars)
            self._counts[text] = count if whole else count + len(text) - self._max_chars
        return self._counts[text]


def _is_order_known(first: FittedText, second: FittedText, max_second: int | None) -> bool:
    """Whether the totals, some of which may be lower bounds, show which text is longer."""
    if max_second is not None and max_second <= second.total:
        second = FittedText(second.ids, max_second, True)
    if first.exact:
        return second.exact or second.total >= first.total
    return second.exact and first.total > second.total


def _cut_ids(ids: list[int], count: int | None, direction: Direction) -> list[int]:
    """Keep `count` tokens and cut the others off in that direction."""
    if count is None or count >= len(ids):
        return ids
    return ids[:count] if direction == "right" else ids[len(ids) - count :]
