"""Predict how long a lane's queue takes: the replicas' cost models, corrected by the measured throughput.

Items per second alone is not enough. A lane that serves single requests has a low rate because its batches are small;
it would refuse work that would only make the batches larger.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shoal.core.protocols import EngineFacts
from shoal.core.scheduling.planner import Limits, longest_batch_s

DECAY = 0.9
"""Decay of older batches at each new one: about ten count, so the estimate follows a change within a second."""

LEAST_BATCHES = 3
"""Batches that must finish under load before the first prediction."""


class FinishedBatch(NamedTuple):
    """A batch on a replica with `facts`: its items, true tokens and `padded_tokens`. `is_full`: no more items
    fitted."""

    facts: EngineFacts
    items: int
    tokens: int
    padded_tokens: int
    is_full: bool


class DrainRate:
    """Learns the pace of a lane from its finished batches. Not thread-safe; the caller passes the time as `now`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._mark: float | None = None
        self._batches = 0
        self._actual_s = self._predicted_s = 0.0
        self._tokens = self._padded_tokens = 1.0

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
        self._tokens = DECAY * self._tokens + batch.tokens
        self._padded_tokens = DECAY * self._padded_tokens + batch.padded_tokens
        if self._mark is not None and cores:
            seconds = batch.facts.cost.seconds(batch.padded_tokens)
            if batch.is_full:  # charge its share of a predicted full batch
                most = self._full_batch_tokens(batch.facts, batch.padded_tokens / batch.items)
                seconds = batch.padded_tokens * batch.facts.cost.seconds(round(most)) / most
            self._actual_s = DECAY * self._actual_s + (now - self._mark) * cores
            self._predicted_s = DECAY * self._predicted_s + seconds
            self._batches += 1
        self._mark = now if saturated else None

    def seconds(self, tokens: float, items: float, replicas: Iterable[EngineFacts]) -> float:
        """Seconds that these replicas together need for `tokens` tokens in `items` items."""
        padding = self._padded_tokens / self._tokens
        each = padding * tokens / max(items, 1.0)
        rate = least = 0.0
        for facts in replicas:
            batch = min(self._full_batch_tokens(facts, each), padding * tokens)
            seconds = facts.cost.seconds(round(batch))
            least = min(least, seconds) if least else seconds
            rate += (facts.parallel or facts.slots) * batch / padding / max(seconds, 1e-9)
        return max(tokens / rate, least) * self.pace if rate else 0.0

    def _full_batch_tokens(self, facts: EngineFacts, each: float) -> float:
        """Padded tokens of a full batch whose items have `each` padded tokens."""
        limits, cost = self._limits, facts.cost
        most: float = min(limits.max_batch_tokens, facts.max_batch_tokens or limits.max_batch_tokens)
        most = min(most, each * min(limits.max_batch_size, facts.max_batch_size))
        in_time = (longest_batch_s(limits, cost) - cost.fixed) / max(cost.per_token, 1e-12)
        return max(min(most, in_time), each, 1.0)
