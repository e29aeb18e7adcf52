"""An online cost model: how long a replica's batches take, and which size is efficient, learned from those that ran.

The size of a batch is its work in tokens (`CostModel.work`), which is the number of its padded tokens for short texts.
"""

from __future__ import annotations

from math import ceil, isqrt

import msgspec

from shoal.core.protocols import EFFICIENCY, CostModel

DECAY = 0.98
"""Decay of older observations at each new one. About the last fifty batches count: the model follows a change of load
within seconds and ignores a single slow batch."""

PRIOR_WEIGHT = 4.0
LEAST_SPREAD = 0.05
"""Minimum relative spread of batch sizes; below it slope and offset cannot be separated."""

LARGEST = tuple(isqrt(1 << size) for size in range(32))
"""The largest batch of each size that `RateCurve` tells apart, in tokens of work: half octaves from 1 to 46,340. Powers
of two are the largest of their size, because lengths and numbers of items often are powers of two."""

TRUSTED_BATCHES = 8.0
"""Batches of one size whose mean rate is kept; the next one replaces an eighth of it."""

FORGETTING = 0.99
"""Decay of the weight of a size at each batch of any size. A size that was measured at a bad moment, and not used
since, is tried again after one to three hundred batches."""

STALE = 0.25
"""Weight below which a size counts as not measured of late."""

BATCHES_BETWEEN = 8
"""Batches between two searches for the efficient size: a search costs as much as admitting a request."""


class _Size(msgspec.Struct):
    """Mean seconds per token of batches of one size; `weight` as it was at the `latest` of them."""

    seconds: float = 0.0
    weight: float = 0.0
    latest: int = 0

    def weight_at(self, batches: int) -> float:
        return self.weight * FORGETTING ** (batches - self.latest)


class RateCurve:
    """Seconds per token of work by the size of the batch, of batches that left no core idle.

    Only those are comparable: a small batch on an otherwise idle machine is faster than the same batch beside others.
    A size without measurements counts as the straight line says.
    """

    def __init__(self) -> None:
        self.batches = 0
        self._sizes = [_Size() for _ in LARGEST]

    def observe(self, tokens: float, seconds: float) -> None:
        self.batches += 1
        size = self._sizes[min((ceil(tokens * tokens) - 1).bit_length(), len(LARGEST) - 1)]
        size.weight = min(size.weight * FORGETTING ** (self.batches - size.latest) + 1.0, TRUSTED_BATCHES)
        size.latest = self.batches
        size.seconds += (seconds / tokens - size.seconds) / size.weight

    def efficient_tokens(self, line: CostModel) -> int:
        """Return the largest batch of the smallest size that reaches `EFFICIENCY` of the best size's rate, or twice
        that if nothing of the octave in between has been measured of late."""
        estimates = []
        for size, tokens in zip(self._sizes, LARGEST, strict=True):
            weight = size.weight_at(self.batches) ** 2  # a few batches outweigh the line
            estimates.append((weight * size.seconds + line.seconds(tokens) / tokens) / (weight + 1.0))
        allowed = min(estimates) / EFFICIENCY
        place = next(index for index, seconds in enumerate(estimates) if seconds <= allowed)
        if all(size.weight_at(self.batches) < STALE for size in self._sizes[place + 1 : place + 3]):
            place = min(place + 2, len(LARGEST) - 1)
        return LARGEST[place]


class OnlineCost:
    """A least-squares fit of seconds over tokens of work with exponential decay, and the curve of the rate.

    Starts from the warm-up's model.
    """

    def __init__(self, prior: CostModel) -> None:
        self.model = prior
        self._curve = RateCurve()
        self._efficient_tokens = prior.efficient_tokens
        self._attention = prior.attention
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        for tokens in (32.0, 1024.0):
            self._add(tokens, prior.fixed + prior.per_token * tokens, PRIOR_WEIGHT / 2)

    def observe(self, tokens: float, seconds: float, *, saturated: bool = False) -> None:
        """Add a batch with the work of `tokens` that took `seconds` on a slot. `saturated`: no core was idle."""
        self._add(tokens, seconds, 1.0, DECAY)
        fixed, per_token = self._fit()
        if saturated and tokens > 0:
            self._curve.observe(tokens, seconds)
            if self._curve.batches % BATCHES_BETWEEN == 0:
                self._efficient_tokens = self._curve.efficient_tokens(CostModel(fixed, per_token))
        self.model = CostModel(fixed, per_token, self._efficient_tokens, self._attention)

    def _add(self, x: float, y: float, weight: float, decay: float = 1.0) -> None:
        self._weight = self._weight * decay + weight
        self._x = self._x * decay + weight * x
        self._y = self._y * decay + weight * y
        self._xx = self._xx * decay + weight * x * x
        self._xy = self._xy * decay + weight * x * y

    def _fit(self) -> tuple[float, float]:
        """Return the seconds of a call and of a token."""
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance <= (LEAST_SPREAD * mean_x) ** 2:
            scale = mean_y / self.model.seconds(round(mean_x))
            return self.model.fixed * scale, self.model.per_token * scale
        slope = (self._xy / self._weight - mean_x * mean_y) / variance
        slope = min(max(slope, 1e-9), mean_y / mean_x)
        return max(mean_y - slope * mean_x, 0.0), slope
