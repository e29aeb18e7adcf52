"""What all processes of a server use: processor time, memory, file descriptors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_LEAST = ("process_start_time_seconds", "process_max_fds")
"""Metrics of which the smallest value is that of the whole; of all others it is the sum."""


class ProcessTotals(Collector):
    """The usual metrics of a process, of this one and `others` together."""

    def __init__(self, others: Callable[[], Iterable[int]]) -> None:
        self._others = others
        self._own = _collector(os.getpid())

    def collect(self) -> Iterator[Metric]:
        metrics = {metric.name: metric for metric in self._own.collect()}
        for pid in self._others():
            for metric in _collector(pid).collect():
                whole = metrics.get(metric.name)
                if whole is not None:
                    whole.samples = [
                        mine._replace(value=(min if mine.name in _LEAST else _add)(mine.value, other.value))
                        for mine, other in zip(whole.samples, metric.samples, strict=True)
                    ]
        yield from metrics.values()


def _collector(pid: int) -> ProcessCollector:
    return ProcessCollector(pid=lambda: pid, registry=CollectorRegistry())


def _add(one: float, other: float) -> float:
    return one + other
