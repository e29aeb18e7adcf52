"""The backends' own counts as Prometheus metrics; compared with Shoal's they show which side spends the time.

The counters restart when the backend does, like those of any process that Prometheus scrapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from prometheus_client.metrics_core import CounterMetricFamily, Metric

from shoal.types import DurationStat, ModelStats

BackendStats: TypeAlias = Iterable[tuple[str, int, ModelStats]]
"""(served name, replica number, its counts)."""

STAGES = ("queue", "compute_input", "compute_infer", "compute_output")
OUTCOMES = ("success", "fail")


def collect_families(backends: BackendStats) -> Iterator[Metric]:
    """Yield the counters of all replicas, by model and replica."""
    rows = list(backends)
    labels = ("model", "replica")
    requests = CounterMetricFamily(
        "shoal_backend_requests_total", "Requests finished by the backend.", labels=(*labels, "outcome")
    )
    seconds = CounterMetricFamily(
        "shoal_backend_seconds_total",
        "Time of requests in the backend: queueing, processing inputs, computing, processing outputs.",
        labels=(*labels, "stage"),
    )
    items = CounterMetricFamily("shoal_backend_items_total", "Items computed by the backend.", labels=labels)
    batches = CounterMetricFamily(
        "shoal_backend_batches_total", "Executions in the backend, by size in items.", labels=(*labels, "size")
    )
    for model, number, stats in rows:
        replica = str(number)
        items.add_metric((model, replica), stats.inference_count)
        for outcome in OUTCOMES:
            spent: DurationStat = getattr(stats.inference_stats, outcome)
            requests.add_metric((model, replica, outcome), spent.count)
        for stage in STAGES:
            spent = getattr(stats.inference_stats, stage)
            seconds.add_metric((model, replica, stage), spent.ns * 1e-9)
        for batch in stats.batch_stats:
            batches.add_metric((model, replica, str(batch.batch_size)), batch.compute_infer.count)
    yield from (requests, seconds, items, batches)
