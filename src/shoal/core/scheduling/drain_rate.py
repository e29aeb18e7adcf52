"""Predict how long a lane's queue takes: the replicas' cost models, corrected by the measured throughput.

Items per second alone is not enough. A lane that serves single requests has a low rate because its batches are small;
it would refuse work that would only make the batches larger.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from shoal.core.protocols import EngineFacts
from shoal.core.scheduling.planner import Limits, longest_batch_tokens

DECAY = 0.9
"""Decay of older batches at each new one: about ten count, so the estimate follows a change within a second."""

ROUNDING = 0.01
"""Fraction of a batch by which a queue may exceed whole batches and still be counted as them."""

LEAST_BATCHES = 3
"""Batches that must finish under load before the first prediction."""


class FinishedBatch(NamedTuple):
    """A batch on a replica with `facts`: its items, the work of these alone (`CostModel.work`), its own work, which
    has the padding, and `padded_tokens`. `is_full`: no more items fitted."""

    facts: EngineFacts
    items: int
    work: float
    padded_work: float
    padded_tokens: int
    is_full: bool


class DrainTime(NamedTuple):
    """Seconds that queued work takes.

    `last`: until its last item is answered, in whole batches, because later arrivals fill the batch of that item, and
    a batch runs on one core. `batch`: one batch of it, as large as there can be.
    """

    seconds: float
    last: float
    batch: float


class DrainRate:
    """Learns the pace of a lane from its finished batches. Not thread-safe; the caller passes the time as `now`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._mark: float | None = None
        self._batches = 0
        self._actual_s = self._predicted_s = 0.0
        self._work = self._padded_work = self._padded_tokens = 1.0

    @property
    def is_known(self) -> bool:
        return self._batches >= LEAST_BATCHES

    @property
    def pace(self) -> float:
        """Ratio of measured to predicted seconds."""
        return self._actual_s / self._predicted_s if self._predicted_s else 1.0

    def record_batch(self, now: float, batch: FinishedBatch, cores: int, *, saturated: bool) -> None:
        """Record a batch that ended on one of `cores`. `saturated`: all of them have work now.

        The time between two batches counts only if all cores had work throughout.
        """
        self._work = DECAY * self._work + batch.work
        self._padded_work = DECAY * self._padded_work + batch.padded_work
        self._padded_tokens = DECAY * self._padded_tokens + batch.padded_tokens
        if self._mark is not None and cores:
            seconds = batch.facts.cost.seconds(batch.padded_work)
            if batch.is_full:  # charge its share of a predicted full batch
                most = self._full_batch_work(batch.facts, batch.padded_work / batch.items)
                seconds = batch.padded_work * batch.facts.cost.seconds(round(most)) / most
            self._actual_s = DECAY * self._actual_s + (now - self._mark) * cores
            self._predicted_s = DECAY * self._predicted_s + seconds
            self._batches += 1
        self._mark = now if saturated else None

    def interrupt(self) -> None:
        """Record that a batch ended without a result: the time until the next one says nothing of the pace."""
        self._mark = None

    def predict(self, work: float, items: float, replicas: Iterable[EngineFacts]) -> DrainTime:
        """Predict how long these replicas together need for `work` in `items` items."""
        padding = self._padded_work / self._work
        each = padding * work / max(items, 1.0)
        rate = least = most = 0.0
        cores = 0
        for facts in replicas:
            batch = min(self._full_batch_work(facts, each), padding * work)
            seconds = facts.cost.seconds(round(batch))
            least = min(least, seconds) if least else seconds
            most = max(most, seconds)
            cores += facts.cores
            rate += facts.cores * batch / padding / max(seconds, 1e-9)
        if not rate:
            return DrainTime(0.0, 0.0, 0.0)
        seconds = last = max(work / rate, least)
        batches = work / rate * cores / max(most, 1e-9)
        if batches > 1.0 + ROUNDING:
            last = (ceil(batches - ROUNDING) + cores - 1) * most / cores
        return DrainTime(seconds * self.pace, last * self.pace, most * self.pace)

    def _full_batch_work(self, facts: EngineFacts, each: float) -> float:
        """Work of a full batch whose items have the work `each`, with padding."""
        limits = self._limits
        most: float = min(limits.max_batch_tokens, facts.max_batch_tokens or limits.max_batch_tokens)
        most *= self._padded_work / self._padded_tokens
        most = min(most, each * min(limits.max_batch_size, facts.max_batch_size))
        return max(min(most, longest_batch_tokens(limits, facts.cost)), each, 1.0)
