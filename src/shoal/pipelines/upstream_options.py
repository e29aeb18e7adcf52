"""Support for servers with their own tokenizer: options passed to them, truncation and token estimates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from shoal.core.protocols import CountedRow, Prepared, Row
from shoal.errors import InvalidValue, ShoalError, Unsupported
from shoal.pipelines.text.pairing import FramedText
from shoal.pipelines.text.tokenizer import FittedText, too_long_error
from shoal.types import Array, BatchTask, Direction

TEXT = "text"
PAIR = "pair"
BYTES_PER_TOKEN = 4
"""Bytes per token of ordinary prose, for usage when nobody counts tokens. Admission uses 3 to be on the safe side."""

Passes: TypeAlias = frozenset[str]
"""Options that a server applies itself, by the names of the task fields. They are sent as call parameters
(`Prepared.params`), so items with different options go in different calls. Neutral values are omitted, except for
`truncate`, `normalize` and `raw_scores`, for which servers have their own defaults."""

R = TypeVar("R", bound=Row | ShoalError)


class Count(NamedTuple):
    """Number of tokens in a text; a lower bound (`exact` false) if the text is far too long."""

    total: int
    exact: bool


def count_tokens(read: FittedText | FramedText | ShoalError) -> Count | None:
    """Return the token count of a text or pair, or None for one that the tokenizer cannot read."""
    return None if isinstance(read, ShoalError) else Count(read.total, read.exact)


class Weight(NamedTuple):
    """What a text costs an engine in tokens, its tokens for usage, and whether the server truncates it."""

    cost: int
    tokens: int
    truncated: bool


class TruncationPolicy:
    """Decides how texts that are too long are cut. The server cuts them, either as requested (`passes`) or silently, so
    only a token count reveals it. `limit`: where it cuts; 0 if the limit or the count is unknown. `default`: whether to
    truncate if a request does not say. `max_counted`: maximum tokens of a text worth counting."""

    def __init__(self, passes: Passes, *, limit: int, default: bool) -> None:
        self.limit = limit
        self.max_counted = limit or _ALL
        self._passes = passes
        self._default = default

    def check(self, task: BatchTask) -> None:
        """Raises Unsupported (truncate, truncation_direction) for an option that neither Shoal nor the server can
        apply."""
        if self.limit:
            return
        if task.truncate is False and "truncate" not in self._passes:
            raise Unsupported(
                "the model truncates long texts itself without reporting it: omit truncate, or set `tokenizer` "
                "and `max_tokens` for the model so that Shoal can reject them",
                param="truncate",
            )
        if task.truncation_direction == "left" and "truncation_direction" not in self._passes:
            raise Unsupported(_ONLY_RIGHT, param="truncation_direction")

    def should_truncate(self, task: BatchTask) -> bool:
        return self._default if task.truncate is None else task.truncate

    def params(self, task: BatchTask) -> dict[str, Any]:
        """Return the truncation parameters to send to the server."""
        params: dict[str, Any] = {}
        cut = self.should_truncate(task)
        if "truncate" in self._passes:
            params["truncate"] = cut
        if cut and task.truncation_direction == "left" and "truncation_direction" in self._passes:
            params["truncation_direction"] = "left"
        return params

    def weigh(
        self, texts: Sequence[str], count: Count | None, *, truncate: bool, direction: Direction
    ) -> Weight | ShoalError:
        """Weigh an item by its texts and their number of tokens (None: unknown). Returns the error of one that cannot
        be sent, or that is too long and cannot be cut as requested."""
        try:
            size = sum([len(text.encode()) for text in texts])
        except UnicodeEncodeError:
            return InvalidValue("the text contains half of a surrogate pair, which UTF-8 cannot encode", param="input")
        if count is None:
            return Weight(min(self.max_counted, max(1, size // 3)), max(1, size // BYTES_PER_TOKEN), False)
        truncated = 0 < self.limit < count.total
        if truncated and not truncate:
            return too_long_error(count.total, count.exact, self.limit)
        if truncated and direction == "left" and "truncation_direction" not in self._passes:
            return Unsupported(_ONLY_RIGHT, param="truncation_direction")
        tokens = min(self.max_counted, count.total)
        return Weight(max(1, tokens), tokens, truncated)


def to_object_array(values: Sequence[object]) -> Array:
    """Return an object array [rows]. Unlike numpy, it does not turn lists into further axes."""
    array = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):
        array[place] = value
    return array


def join_tensors(batch: Sequence[Prepared], name: str) -> Array:
    """Collect each item's tensor of that name, each [1], into an object array [rows]."""
    return to_object_array([item.tensors[name][0] for item in batch])


def attach_counts(rows: Sequence[R], tokens: Array) -> list[R | CountedRow]:
    """Attach the server's token counts, [rows, 1] or longer, to the rows; errors stay unchanged."""
    counts = tokens[: len(rows)].reshape(len(rows), -1)[:, 0].tolist()
    return [
        row if isinstance(row, ShoalError) else CountedRow(row, int(read))
        for row, read in zip(rows, counts, strict=True)
    ]


_ALL = 2**31
_ONLY_RIGHT = "the model truncates long texts at the end: omit truncation_direction, or send only the end of the text"
