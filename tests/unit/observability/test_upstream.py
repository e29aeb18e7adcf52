"""Backend counters on the metrics page."""

from __future__ import annotations

from shoal.observability.metrics import PrometheusObserver
from shoal.types import BatchStats, DurationStat, InferenceStats, ModelStats

STATS = ModelStats(
    name="m",
    version="1",
    inference_count=40,
    execution_count=7,
    inference_stats=InferenceStats(
        success=DurationStat(count=9, ns=5_000_000_000),
        fail=DurationStat(count=2, ns=1),
        queue=DurationStat(count=9, ns=250_000_000),
        compute_infer=DurationStat(count=9, ns=4_000_000_000),
    ),
    batch_stats=[
        BatchStats(batch_size=1, compute_infer=DurationStat(count=3, ns=1)),
        BatchStats(batch_size=8, compute_infer=DurationStat(count=4, ns=2)),
    ],
)


def lines(observer: PrometheusObserver) -> set[str]:
    return {line for line in observer.render().decode().splitlines() if line.startswith("shoal_backend_")}


def test_counts_of_each_replica_are_shown() -> None:
    """Requests by outcome, seconds by stage, items, and batches by size."""
    observer = PrometheusObserver()
    observer.record_backends([("org/m", 0, STATS), ("org/m", 1, ModelStats(name="m"))])
    metric_lines = lines(observer)
    assert 'shoal_backend_requests_total{model="org/m",outcome="success",replica="0"} 9.0' in metric_lines
    assert 'shoal_backend_requests_total{model="org/m",outcome="fail",replica="0"} 2.0' in metric_lines
    assert 'shoal_backend_seconds_total{model="org/m",replica="0",stage="queue"} 0.25' in metric_lines
    assert 'shoal_backend_seconds_total{model="org/m",replica="0",stage="compute_infer"} 4.0' in metric_lines
    assert 'shoal_backend_items_total{model="org/m",replica="0"} 40.0' in metric_lines
    assert 'shoal_backend_items_total{model="org/m",replica="1"} 0.0' in metric_lines
    assert 'shoal_backend_batches_total{model="org/m",replica="0",size="8"} 4.0' in metric_lines


def test_without_backends_there_are_no_series() -> None:
    """A server of local models has no empty families."""
    assert not lines(PrometheusObserver())
