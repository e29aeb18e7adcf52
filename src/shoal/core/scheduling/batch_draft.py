"""The batch that the planner is filling, and its limits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Generic

import msgspec

from shoal.core.protocols import EngineFacts
from shoal.core.scheduling.fair_queue import E


class Draft(msgspec.Struct, Generic[E]):
    """The batch being filled. `max_items` and `max_tokens` are limits of the replica and the operator, `longest` is the
    work that its duration allows (set by `open`). `waste`: padding tokens by bucket length."""

    facts: EngineFacts
    max_items: int
    max_tokens: int
    longest: float = 0.0
    entries: list[E] = msgspec.field(default_factory=list)
    length: int = 0
    tokens: int = 0
    work: float = 0.0
    waste: dict[int, int] = msgspec.field(default_factory=dict)
    limited: bool = False
    is_full: bool = False
    _rows: int = 0
    _rows_length: int = -1

    def open(self, longest: float) -> None:
        """Let the next class fill the batch up to the work of `longest`."""
        self.longest, self.is_full, self._rows_length = longest, False, -1

    def fits(self, entry: E, length: int) -> bool:
        """Whether one more item keeps a non-empty batch within every limit; a negative answer sets `limited`."""
        if self.facts.pads_batches:
            inside = len(self.entries) < self._max_rows(max(length, self.length))
        else:
            inside = len(self.entries) < self.max_items and self._holds(
                self.tokens + entry.cost, self.work + entry.work
            )
        self.limited = self.limited or not inside
        return inside

    def count_run(self, queue: Sequence[E], length: int, most: int, portion: float) -> int:
        """Return how many of a queue's first `most` entries can be served together: the head, which fits, and those
        with its deadline that fit too, until the batch has the work of `portion`."""
        pads = self.facts.pads_batches
        rows = self._max_rows(max(length, self.length)) if pads else self.max_items
        most = min(most, len(queue), rows - len(self.entries))
        head = queue[0]
        tokens, work = self.tokens + head.cost, self.work + head.work
        count = 1
        while count < most and work < portion:
            entry = queue[count]
            tokens, work = tokens + entry.cost, work + entry.work
            if not (entry.queued and entry.deadline == head.deadline and (pads or self._holds(tokens, work))):
                break
            count += 1
        return count

    def _holds(self, tokens: int, work: float) -> bool:
        return tokens <= self.max_tokens and work <= self.longest

    def _max_rows(self, length: int) -> int:
        """Return how many items a padded batch of this length may have."""
        if length != self._rows_length:
            facts = self.facts
            rows = int(min(self.max_tokens, self.longest / facts.cost.work(1.0, length)) / max(length, 1))
            index = bisect_right(facts.size_buckets, rows)
            if index < len(facts.size_buckets):
                rows = facts.size_buckets[index - 1] if index else 0
            self._rows, self._rows_length = min(rows, self.max_items), length
        return self._rows

    def worth(self, length: int) -> bool:
        """Whether padding items of this bucket costs less than the call that it saves."""
        cost = self.facts.cost
        padding = self.waste.get(length, 0) + self._padding(length)
        return cost.work(padding, max(length, self.length)) * cost.per_token < cost.fixed

    def add(self, entries: Sequence[E], length: int) -> None:
        """Add entries of one bucket."""
        if length != self.length:
            padding = self._padding(length) * (len(entries) if length < self.length else 1)
            self.waste[length] = self.waste.get(length, 0) + padding
            self.length = max(self.length, length)
        self.entries += entries
        for entry in entries:
            self.tokens += entry.cost
            self.work += entry.work

    def is_closed(self, portion: float) -> bool:
        return self.is_full or (bool(self.entries) and (self.entries[0].runs_alone or self.work >= portion))

    def _padding(self, length: int) -> int:
        """Padding tokens that an item of this length adds: to its own row, or to all others if it is the longest."""
        if not self.facts.pads_batches:
            return 0
        return self.length - length if length < self.length else len(self.entries) * (length - self.length)
