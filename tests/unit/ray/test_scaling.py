"""The autoscaling policy, which is pure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.ray.scaling import QUEUED_TOKENS, REQUESTS, QueuePolicy


def decide(requests: list[float], tokens: list[float] | None = None, queued: float = 0.0) -> int:
    reported = {REQUESTS: dict(enumerate(requests)), QUEUED_TOKENS: dict(enumerate(tokens or []))}
    ctx = SimpleNamespace(aggregated_metrics=reported, total_queued_requests=queued)
    return QueuePolicy(requests_per_replica=10, tokens_per_replica=1000)(cast(Any, ctx))[0]


@pytest.mark.parametrize(
    ("requests", "tokens", "queued", "wanted"),
    [
        ([], [], 0, 0),
        ([0.0, 0.0], [0.0], 0, 0),
        ([0.004], [], 0, 0),  # what an average keeps of requests that are long answered
        ([1.0], [], 0, 1),
        ([10.0], [], 0, 1),
        ([10.0, 1.0], [], 0, 2),
        ([20.0, 20.0], [100.0], 0, 4),
        ([1.0], [2500.0], 0, 3),
        ([], [], 1, 1),  # nothing runs, and a request waits
    ],
)
def test_replicas_follow_requests_and_queued_tokens(
    requests: list[float], tokens: list[float], queued: float, wanted: int
) -> None:
    assert decide(requests, tokens, queued) == wanted


def test_a_share_of_nothing_is_rejected() -> None:
    with pytest.raises(ValueError, match="above 0"):
        QueuePolicy(requests_per_replica=0)
