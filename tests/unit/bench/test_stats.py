"""Percentile arithmetic."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.bench.stats import Record, percentile, summarize, summarize_latencies


@pytest.mark.parametrize(
    ("q", "expected"), [(0.5, 50.0), (0.9, 90.0), (0.99, 99.0), (0.999, 100.0), (1.0, 100.0), (0.0, 1.0)]
)
def test_nearest_rank_over_a_hundred_values(q: float, expected: float) -> None:
    """Over 1..100 the percentile is the rank itself."""
    assert percentile([float(n) for n in range(1, 101)], q) == expected


def test_no_values_have_no_percentile() -> None:
    """Without measurements one figure is NaN, and a run has no figures."""
    assert math.isnan(percentile([], 0.5))
    assert summarize_latencies([]) == {}


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_covers_its_share(values: list[float], q: float) -> None:
    """It is a measured value: at least a share q of the values is at or below it, and a smaller value has less."""
    ordered = sorted(values)
    result = percentile(ordered, q)
    at_or_below = sum(value <= result for value in values)
    below = sum(value < result for value in values)
    assert result in values
    assert at_or_below >= q * len(values) - 1e-9
    assert below < q * len(values) or result == ordered[0]


def test_latencies_do_not_depend_on_order() -> None:
    """Shuffled measurements give the same figures, in milliseconds."""
    values = [n / 1000 for n in range(1, 1001)]
    shuffled = random.Random(1).sample(values, len(values))
    summary = summarize_latencies(shuffled)
    assert summary == summarize_latencies(values)
    assert summary["p50"] == 500
    assert summary["p99.9"] == 999
    assert summary["max"] == 1000


def test_a_summary_divides_by_the_time_of_the_run() -> None:
    """Rates are answers per second; server facts are averages of the reported values."""
    record = Record(latency=[0.01] * 50, texts=100, batch_sizes=[4, 8], queue_ms=[1.0, 3.0], seconds=2.0)
    record.errors["503"] = 2
    summary = summarize(record)
    assert summary.requests_per_s == 25
    assert summary.texts_per_s == 50
    assert summary.errors == {"503": 2}
    assert summary.batch_size == 6
    assert summary.queue_ms["max"] == 3


def test_a_server_without_batch_statistics() -> None:
    """Without headers the batch size is absent, not zero."""
    assert summarize(Record(latency=[0.1], texts=1, seconds=1.0)).batch_size is None
