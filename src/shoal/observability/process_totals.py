"""What all processes of a server use: processor time, memory, file descriptors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_START, _OPEN, _LIMIT = "process_start_time_seconds", "process_open_fds", "process_max_fds"


class ProcessTotals(Collector):
    """The usual metrics of a process, of this one and `others` together: the earliest start, the files and the limit of
    the process that is nearest to its limit, and the sums of all else."""

    def __init__(self, others: Callable[[], Iterable[int]]) -> None:
        self._others = others
        self._own = _collector(os.getpid())

    def collect(self) -> Iterator[Metric]:
        metrics = {metric.name: metric for metric in self._own.collect()}
        for pid in self._others():
            theirs = {metric.name: metric for metric in _collector(pid).collect()}
            if _used_share(theirs) > _used_share(metrics):
                metrics |= {name: theirs[name] for name in (_OPEN, _LIMIT)}
            for name in metrics.keys() & theirs.keys() - {_OPEN, _LIMIT}:
                combine = min if name == _START else _add
                metrics[name].samples = [
                    mine._replace(value=combine(mine.value, other.value))
                    for mine, other in zip(metrics[name].samples, theirs[name].samples, strict=True)
                ]
        yield from metrics.values()


def _used_share(metrics: Mapping[str, Metric]) -> float:
    """Return the part of its file descriptors that a process uses; 0 for one that has ended."""
    if _OPEN not in metrics or _LIMIT not in metrics:
        return 0.0
    return metrics[_OPEN].samples[0].value / metrics[_LIMIT].samples[0].value


def _collector(pid: int) -> ProcessCollector:
    return ProcessCollector(pid=lambda: pid, registry=CollectorRegistry())


def _add(one: float, other: float) -> float:
    return one + other
