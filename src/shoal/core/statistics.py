"""Statistics of models, counted from observer events, for models whose backend keeps none."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from shoal.core.observers import ForwardingObserver
from shoal.core.protocols import BatchReport, CacheCounts, Observer
from shoal.types import BatchStats, DurationStat, InferenceStats, ModelStats, Result, TaskKind

MAX_MODELS = 1000
"""Maximum counted models. The oldest is dropped, so that new names do not accumulate."""


class _Tally:
    """The counts of one model. Each pair is [count, total seconds]."""

    __slots__ = ("fail", "finish", "items", "last", "sizes", "stages", "success")

    def __init__(self) -> None:
        self.last = 0.0
        self.items = 0
        self.success, self.fail = [0, 0.0], [0, 0.0]
        self.stages = [0, 0.0, 0.0, 0.0]  # count, then seconds of queue, prepare, infer
        self.finish = [0, 0.0]
        self.sizes: dict[int, list[float]] = {}


def _add(pair: list[float], seconds: float) -> None:
    pair[0] += 1
    pair[1] += seconds


def _spent(pair: Sequence[float]) -> DurationStat:
    return DurationStat(count=int(pair[0]), ns=round(pair[1] * 1e9))


class Counts(ForwardingObserver):
    """Counts events and forwards them to `inner`. `caches` returns the counts of each model that has a cache.

    Queue and compute times include answered requests only; `compute_output` is counted per batch. A cancelled request
    is neither a success nor a failure. Coalesced texts are computed and counted once.
    """

    def __init__(self, inner: Observer | None = None, caches: Callable[[], Mapping[str, CacheCounts]] = dict) -> None:
        super().__init__(inner)
        self._tallies: OrderedDict[str, _Tally] = OrderedDict()
        self._caches = caches

    def stats_for(self, model: str) -> ModelStats:
        """Return the statistics of a model, all zero if it has had no requests."""
        tally = self._tallies.get(model) or _Tally()
        answered, queue, prepare, infer = tally.stages
        cached = self._caches().get(model, CacheCounts())
        return ModelStats(
            name=model,
            last_inference=int(tally.last * 1000),
            inference_count=tally.items,
            execution_count=sum(int(pair[0]) for pair in tally.sizes.values()),
            inference_stats=InferenceStats(
                success=_spent(tally.success),
                fail=_spent(tally.fail),
                queue=_spent((answered, queue)),
                compute_input=_spent((answered, prepare)),
                compute_infer=_spent((answered, infer)),
                compute_output=_spent(tally.finish),
                cache_hit=DurationStat(count=cached.hits),
                cache_miss=DurationStat(count=cached.misses),
            ),
            batch_stats=[
                BatchStats(batch_size=size, compute_infer=_spent(pair)) for size, pair in sorted(tally.sizes.items())
            ],
        )

    def forget(self, model: str) -> None:
        """Forget an unloaded model, so that the next one under its name starts at zero."""
        self._tallies.pop(model, None)

    def batched(self, report: BatchReport) -> None:
        self._inner.batched(report)
        if report.error is None:
            tally = self._tallies.get(report.model) or self._add_tally(report.model)
            tally.items += report.items
            tally.last = time.time()
            _add(tally.sizes.setdefault(report.items, [0, 0.0]), report.seconds)
            if report.finish_seconds is not None:
                _add(tally.finish, report.finish_seconds)

    def finished(
        self, model: str, task: TaskKind, outcome: str, seconds: float, result: Result | None, surface: str = ""
    ) -> None:
        self._inner.finished(model, task, outcome, seconds, result, surface)
        if outcome == "cancelled":
            return
        tally = self._tallies.get(model) or self._add_tally(model)
        if outcome != "ok":
            _add(tally.fail, seconds)
            return
        _add(tally.success, seconds)
        if result is None:
            tally.items += 1
            tally.last = time.time()
            return
        facts = result.facts
        tally.stages[0] += 1
        tally.stages[1] += facts.queue_ms / 1e3
        tally.stages[2] += facts.prepare_ms / 1e3
        tally.stages[3] += facts.infer_ms / 1e3

    def _add_tally(self, model: str) -> _Tally:
        tally = self._tallies[model] = _Tally()
        if len(self._tallies) > MAX_MODELS:
            self._tallies.popitem(last=False)
        return tally
