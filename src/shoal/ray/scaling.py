"""How many replicas a model needs: an autoscaling policy for Ray Serve, from what Shoal's replicas count themselves.

Serve's own policy would see no requests: they reach replicas past Serve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

POLICY = "shoal.ray.scaling:QueuePolicy"
REQUESTS, QUEUED_TOKENS = "requests", "queued_tokens"
"""What a replica reports: requests that it has not answered, and tokens that wait in its queues."""


class QueuePolicy:
    """Wants a replica for every `requests_per_replica` requests and for every `tokens_per_replica` queued tokens,
    whichever asks for more; none where there is no request. Serve applies the bounds and delays of its
    `autoscaling_config`."""

    def __init__(self, requests_per_replica: float = 64, tokens_per_replica: float = 16384) -> None:
        if min(requests_per_replica, tokens_per_replica) <= 0:
            raise ValueError("requests_per_replica and tokens_per_replica must be above 0")
        self._requests = requests_per_replica
        self._tokens = tokens_per_replica

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        reported = ctx.aggregated_metrics or {}
        requests = _add(reported.get(REQUESTS)) + (ctx.total_queued_requests or 0.0)
        wanted = max(requests / self._requests, _add(reported.get(QUEUED_TOKENS)) / self._tokens)
        # An average over the look-back period falls towards zero and never reaches it.
        return (0 if requests < 1 / 100 else max(1, math.ceil(wanted - 1e-9))), {}


def _add(by_replica: Mapping[Any, float] | None) -> float:
    return sum((by_replica or {}).values())
