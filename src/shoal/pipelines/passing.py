"""Texts for servers that bring their own tokenizer: what they are told, what they cut, and what their texts weigh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from shoal.core.protocols import CountedRow, Prepared, Row
from shoal.errors import InvalidValue, ShoalError, Unsupported
from shoal.pipelines.text.tokenizer import too_long_error
from shoal.types import Array, BatchTask, Direction

TEXT = "text"
PAIR = "pair"
BYTES_PER_TOKEN = 4
"""For usage where nobody counts: what ordinary prose has. Admission takes 3, to be on the safe side."""

Passes: TypeAlias = frozenset[str]
"""Options that a server honours itself, by the names of the tasks' fields. They are told to it as the parameters of a
call (`Prepared.params`), so that items with others are in calls of their own; what stands at its neutral value is
left out, except `truncate`, `normalize` and `raw_scores`, for which servers have defaults of their own."""

R = TypeVar("R", bound=Row | ShoalError)


class Count(NamedTuple):
    """Tokens of a text; a lower bound for one that is far too long."""

    total: int
    exact: bool


class TruncationPolicy:
    """Who cuts a text that is too long: the server, as it is told (`passes`); or by itself, without a word, so that
    only who counts tokens knows. `limit`: where it cuts, 0 where that or the count is not known. `default`: whether to
    cut where a request does not say. `attach_counts`: how many tokens of a text matter to who counts them."""

    def __init__(self, passes: Passes, *, limit: int, default: bool) -> None:
        self.limit = limit
        self.counted = limit or _ALL
        self._passes = passes
        self._default = default

    def check(self, task: BatchTask) -> None:
        """Raises Unsupported (truncate, truncation_direction) for what nobody could see to."""
        if self.limit:
            return
        if task.truncate is False and "truncate" not in self._passes:
            raise Unsupported(
                "the model cuts long texts itself and does not tell: leave truncate out, or set `tokenizer` and "
                "`max_tokens` for the model, so that Shoal can refuse them",
                param="truncate",
            )
        if task.truncation_direction == "left" and "truncation_direction" not in self._passes:
            raise Unsupported(_ONLY_RIGHT, param="truncation_direction")

    def should_truncate(self, task: BatchTask) -> bool:
        return self._default if task.truncate is None else task.truncate

    def params(self, task: BatchTask) -> dict[str, Any]:
        """What the server is told of it."""
        params: dict[str, Any] = {}
        cut = self.should_truncate(task)
        if "truncate" in self._passes:
            params["truncate"] = cut
        if cut and task.truncation_direction == "left" and "truncation_direction" in self._passes:
            params["truncation_direction"] = "left"
        return params

    def must_truncate(self, count: Count | None) -> bool:
        return count is not None and 0 < self.limit < count.total

    def refusal(self, count: Count, wanted: bool, direction: Direction) -> ShoalError | None:
        """Why a text that is too long cannot be cut as it was asked for; None when it can."""
        if not wanted:
            return too_long_error(count.total, count.exact, self.limit)
        if direction == "left" and "truncation_direction" not in self._passes:
            return Unsupported(_ONLY_RIGHT, param="truncation_direction")
        return None

    def cap_tokens(self, tokens: int) -> int:
        return min(tokens, self.limit) if self.limit else tokens


def utf8_size(text: str) -> int | InvalidValue:
    """The bytes of a text on the wire."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return InvalidValue("the text holds half of a surrogate pair, which UTF-8 cannot carry", param="input")


def estimate_cost(size: int, count: Count | None, cutting: TruncationPolicy) -> tuple[int, int]:
    """(cost, tokens) of `size` bytes of text that hold `count` tokens, or nobody knows how many."""
    if count is None:
        return cutting.cap_tokens(max(1, size // 3)), max(1, size // BYTES_PER_TOKEN)
    tokens = cutting.cap_tokens(count.total)
    return max(1, tokens), tokens


def to_object_array(values: Sequence[object]) -> Array:
    """An object array [rows], also of lists, which numpy would take for more axes."""
    array = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):
        array[place] = value
    return array


def join_tensors(batch: Sequence[Prepared], name: str) -> Array:
    """[rows] of what each item has under that name: [1]."""
    return to_object_array([item.tensors[name][0] for item in batch])


def attach_counts(rows: Sequence[R], tokens: Array) -> list[R | CountedRow]:
    """Rows with the server's count of each, [rows, 1] or longer; what failed stays as it is."""
    counts = tokens[: len(rows)].reshape(len(rows), -1)[:, 0].tolist()
    return [
        row if isinstance(row, ShoalError) else CountedRow(row, int(read))
        for row, read in zip(rows, counts, strict=True)
    ]


_ALL = 2**31
_ONLY_RIGHT = (
    "the model cuts long texts at their end: leave truncation_direction out, or send the end of the text alone"
)
