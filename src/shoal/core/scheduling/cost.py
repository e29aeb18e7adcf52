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
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        for tokens in (32.0, 1024.0):
            self._add(tokens, prior.fixed + prior.per_token * tokens, PRIOR_WEIGHT / 2)

    def observe(self, tokens: int, seconds: float) -> None:
        """Add a batch of `tokens` padded tokens that took `seconds` on a slot."""
        self._add(float(tokens), seconds, 1.0, DECAY)
        self.model = self._fit()

    def _add(self, x: float, y: float, weight: float, decay: float = 1.0) -> None:
        self._weight = self._weight * decay + weight
        self._x = self._x * decay + weight * x
        self._y = self._y * decay + weight * y
        self._xx = self._xx * decay + weight * x * x
        self._xy = self._xy * decay + weight * x * y

    def _fit(self) -> CostModel:
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance <= (LEAST_SPREAD * mean_x) ** 2:
            scale = mean_y / self.model.seconds(round(mean_x))
            return CostModel(self.model.fixed * scale, self.model.per_token * scale)
        slope = (self._xy / self._weight - mean_x * mean_y) / variance
        slope = min(max(slope, 1e-9), mean_y / mean_x)
        return CostModel(max(mean_y - slope * mean_x, 0.0), slope)
