"""Counters and histograms that cost a few hundred nanoseconds, exported through prometheus-client.

The library's own metrics take a lock and scan their buckets on every call, several microseconds per request in all.
Here only the event loop writes, so plain attributes suffice. Reading from another thread is safe: a scrape may see a
request partly counted, but never a torn number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString


class Count:
    """A counter: add to `value`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Histogram:
    """Counts values at or below each of the ascending `bounds`; the last bucket is unbounded."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper bound, observations at or below it), up to +Inf, as the exposition format requires."""
        return list(zip(_write_bounds(self.bounds), map(float, accumulate(self.counts)), strict=True))


@lru_cache
def _write_bounds(bounds: tuple[float, ...]) -> list[str]:
    return [*map(floatToGoString, bounds), "+Inf"]


def observe_all(observations: Iterable[tuple[Histogram, float]]) -> None:
    """Add a value to each of several histograms, in one call: a request adds to eight."""
    for histogram, value in observations:
        histogram.counts[bisect_left(histogram.bounds, value)] += 1
        histogram.total += value


I = TypeVar("I", Count, Histogram)  # noqa: E741 - an instrument


class Family(Generic[I]):
    """All series of one metric. `child` returns the one with these label values, and creates it if needed."""

    def __init__(self, name: str, text: str, labels: Sequence[str], make: Callable[[], I]) -> None:
        self.name = name
        self._text = text
        self._labels = tuple(labels)
        self._create: Callable[[], I] = make
        self._children: dict[tuple[str, ...], I] = {}

    def child(self, *labels: str) -> I:
        found = self._children.get(labels)
        if found is None:
            found = self._children[labels] = self._create()
        return found

    def series(self) -> list[tuple[tuple[str, ...], I]]:
        """Return a snapshot of the series, unaffected by later children."""
        return list(self._children.items())

    def collect(self) -> Metric:
        histogram = HistogramMetricFamily(self.name, self._text, labels=self._labels)
        counter = CounterMetricFamily(self.name, self._text, labels=self._labels)
        for labels, instrument in self.series():
            if isinstance(instrument, Histogram):
                histogram.add_metric(labels, instrument.cumulative(), instrument.total)
            else:
                counter.add_metric(labels, instrument.value)
        return histogram if isinstance(self._create(), Histogram) else counter


def gauge(name: str, text: str, labels: Sequence[str], rows: Iterator[tuple[Sequence[str], float]]) -> Metric:
    """Return a gauge read at scrape time, with one row per series."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family
