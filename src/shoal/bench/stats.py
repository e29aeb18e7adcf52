"""Percentiles and rates of a run: pure functions over what was recorded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


def percentile(ordered: Sequence[float], q: float) -> float:
    """The smallest value that at least a share `q` of `ordered` (ascending) does not exceed; NaN when it is empty.

    Nearest rank: always a latency that was measured, never one between two.
    """
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def summarize_latencies(seconds: Iterable[float]) -> dict[str, float]:
    """Milliseconds at QUANTILES, and `max` and `mean`; empty when nothing was measured."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    found = {name: percentile(ordered, q) for name, q in QUANTILES.items()}
    found |= {"max": ordered[-1], "mean": sum(ordered) / len(ordered)}
    return {name: round(value * 1000, 3) for name, value in found.items()}


@dataclass(slots=True)
class Record:
    """What one run saw. Times are seconds; `finished` counts from the start of the run.

    `latency` runs from when a request was due, not from when it could be sent, so that a stalled server cannot hide
    the requests that it kept from being sent (coordinated omission).
    """

    latency: list[float] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)
    texts: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    batch_sizes: list[int] = field(default_factory=list)
    queue_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in numbers; latencies are milliseconds; `batch_size` and `queue_ms` are what the server said."""

    requests: int
    texts: int
    seconds: float
    requests_per_s: float
    texts_per_s: float
    latency_ms: dict[str, float]
    errors: dict[str, int]
    batch_size: float | None = None
    queue_ms: dict[str, float] = {}


def summarize(record: Record) -> Summary:
    seconds = max(record.seconds, 1e-9)
    sizes = record.batch_sizes
    return Summary(
        requests=len(record.latency),
        texts=record.texts,
        seconds=round(record.seconds, 3),
        requests_per_s=round(len(record.latency) / seconds, 1),
        texts_per_s=round(record.texts / seconds, 1),
        latency_ms=summarize_latencies(record.latency),
        errors=dict(record.errors),
        batch_size=round(sum(sizes) / len(sizes), 2) if sizes else None,
        queue_ms=summarize_latencies(value / 1000 for value in record.queue_ms),
    )
