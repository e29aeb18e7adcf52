"""An online cost model: predicts how long a replica's batches take from those that ran."""

from __future__ import annotations

from shoal.core.protocols import CostModel

DECAY = 0.98
"""Decay of older observations at each new one. About the last fifty batches count: the model follows a change of load
within seconds and ignores a single slow batch."""

PRIOR_WEIGHT = 4.0
LEAST_SPREAD = 0.05
"""Minimum relative spread of batch sizes; below it slope and offset cannot be separated."""


class OnlineCost:
    """A least-squares fit of seconds over padded tokens with exponential decay; starts from the warm-up's model."""

    def __init__(self, prior: CostModel) -> None:
        self.model = prior
        tokens = (32, 1024)
        seconds = [prior.fixed + prior.per_token * each for each in tokens]
        each_weight = PRIOR_WEIGHT / len(tokens)
        self._weight = PRIOR_WEIGHT
        self._x = each_weight * sum(tokens)
        self._y = each_weight * sum(seconds)
        self._xx = each_weight * sum(x * x for x in tokens)
        self._xy = each_weight * sum(x * y for x, y in zip(tokens, seconds, strict=True))

    def observe(self, tokens: int, seconds: float) -> None:
        """Add a batch of `tokens` padded tokens that took `seconds` on a slot."""
        self._weight = self._weight * DECAY + 1
        self._x = self._x * DECAY + tokens
        self._y = self._y * DECAY + seconds
        self._xx = self._xx * DECAY + tokens * tokens
        self._xy = self._xy * DECAY + tokens * seconds
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance <= (LEAST_SPREAD * mean_x) ** 2:
            scale = mean_y / self.model.seconds(round(mean_x))
            self.model = CostModel(self.model.fixed * scale, self.model.per_token * scale)
            return
        slope = (self._xy / self._weight - mean_x * mean_y) / variance
        slope = min(max(slope, 1e-9), mean_y / mean_x)
        self.model = CostModel(max(mean_y - slope * mean_x, 0.0), slope)
