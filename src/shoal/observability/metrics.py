"""Prometheus metrics of one server: all of Shoal's own metric names are in this file, those of backends in `upstream`.

shoal_requests_received_total equals the sum of shoal_requests_total over all outcomes plus the requests in flight. A
request rejected before it is accepted counts only in shoal_refused_total.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, PlatformCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.core.protocols import BatchReport, CacheCounts, GenerationReport, Observer, ReplicaStatus
from shoal.observability import upstream
from shoal.observability.instruments import Count, Family, Histogram, gauge, observe_all
from shoal.observability.process_totals import ProcessTotals
from shoal.types import ModelStats, Result, TaskKind, TrafficClass

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
UNKNOWN = "unknown"
"""The label of all models that are not served, so that clients cannot create series."""

MAX_MODELS = 1000
"""Maximum model names used as labels in a server's life, however many models are loaded and unloaded."""

STATES = ("loading", "ready", "failed", "unloading", "unloaded")

# A single short text takes 1-3 ms, a batch at most 40 ms, the starvation guard acts at 250 ms, the deadline is 30 s.
# There is a bound at each of these values, and bounds are dense where latency matters.
REQUEST_SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
# Stages range from tens of microseconds (tokenizing one short text) to the deadline.
STAGE_SECONDS = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04),
    *(0.1, 0.25, 1.0, 5.0, 30.0),
)
BATCH_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.25, 1.0, 5.0)
# Powers of two, like size buckets; the largest request has 2,048 items.
BATCH_SIZE = tuple(float(2**n) for n in range(12))
BATCH_TOKENS = tuple(float(2**n) for n in range(4, 17))
# 10 ms is about the wait of one short text; users notice stalls over 100 ms.
LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
# The first token takes milliseconds for a cached prompt and seconds for a long one; the timeout is 60 s.
FIRST_TOKEN_SECONDS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 60.0),
)
# 10 ms per token is a fast answer; 100 ms is about reading speed.
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)


class _Requests:
    """The series of one model, task and surface, found by one dictionary lookup per request."""

    __slots__ = ("infer", "items", "outcomes", "prepare", "queue", "received", "seconds", "tokens", "truncated")

    def __init__(self, metrics: _Families, model: str, task: str, surface: str) -> None:
        self.received: dict[str, Count] = {
            name: metrics.received.child(model, task, surface, name) for name in ("interactive", "bulk")
        }
        self.outcomes: dict[str, Count] = {"ok": metrics.requests.child(model, task, surface, "ok")}
        self.seconds = metrics.seconds.child(model, task, surface)
        self.items = metrics.items.child(model, task)
        self.tokens = metrics.tokens.child(model, task)
        self.truncated = metrics.truncated.child(model)
        self.prepare, self.queue, self.infer = (
            metrics.stage_seconds.child(model, stage) for stage in ("prepare", "queue", "infer")
        )


class _Batches:
    """The series of one model and replica."""

    __slots__ = ("finish", "flushes", "padded", "seconds", "size", "tokens")

    def __init__(self, metrics: _Families, model: str, replica: str) -> None:
        self.size = metrics.batch_size.child(model)
        self.tokens = metrics.batch_tokens.child(model)
        self.padded = metrics.padded_tokens.child(model)
        self.seconds = metrics.batch_seconds.child(model, replica)
        self.finish = metrics.stage_seconds.child(model, "finish")
        self.flushes: dict[str, Count] = {}


class _Generations:
    """The series of one generating model."""

    __slots__ = ("first", "generated", "prompt", "token")

    def __init__(self, metrics: _Families, model: str) -> None:
        self.prompt = metrics.prompt_tokens.child(model)
        self.generated = metrics.generated_tokens.child(model)
        self.first = metrics.first_token_seconds.child(model)
        self.token = metrics.token_seconds.child(model)


class _Families:
    """All counters and histograms."""

    def __init__(self) -> None:
        model, task, surface = ("model",), ("model", "task"), ("model", "task", "surface")
        self.received = Family(
            "shoal_requests_received_total", "Requests accepted, by traffic class.", (*surface, "class"), Count
        )
        self.requests = Family(
            "shoal_requests_total",
            "Requests finished, by outcome: ok, cancelled or the kind of error.",
            (*surface, "outcome"),
            Count,
        )
        self.refused = Family(
            "shoal_refused_total",
            "Requests rejected before they were accepted, by reason.",
            ("reason", "surface"),
            Count,
        )
        self.seconds = Family(
            "shoal_request_seconds", "Time from acceptance to answer.", surface, lambda: Histogram(REQUEST_SECONDS)
        )
        self.items = Family("shoal_items_total", "Items answered.", task, Count)
        self.tokens = Family("shoal_tokens_total", "Tokens processed for these items.", task, Count)
        self.truncated = Family("shoal_truncated_total", "Items truncated to the model's maximum length.", model, Count)
        self.batches = Family(
            "shoal_batches_total", "Engine calls, by what triggered the batch.", ("model", "replica", "flush"), Count
        )
        self.batch_errors = Family("shoal_batch_errors_total", "Engine calls that failed.", ("kind",), Count)
        self.batch_size = Family("shoal_batch_size", "Items in a batch.", model, lambda: Histogram(BATCH_SIZE))
        self.batch_tokens = Family(
            "shoal_batch_tokens", "Tokens in a batch, without padding.", model, lambda: Histogram(BATCH_TOKENS)
        )
        self.padded_tokens = Family(
            "shoal_batch_padded_tokens_total",
            "Tokens computed, with padding: 1 - shoal_batch_tokens_sum / this is the share of padding.",
            model,
            Count,
        )
        self.batch_seconds = Family(
            "shoal_batch_seconds", "Duration of an engine call.", ("model", "replica"), lambda: Histogram(BATCH_SECONDS)
        )
        self.stage_seconds = Family(
            "shoal_stage_seconds",
            "Time that a request spent in a stage: prepare, queue, infer, finish.",
            ("model", "stage"),
            lambda: Histogram(STAGE_SECONDS),
        )
        self.prompt_tokens = Family(
            "shoal_prompt_tokens_total", "Prompt tokens processed for generation.", model, Count
        )
        self.generated_tokens = Family("shoal_generated_tokens_total", "Tokens generated.", model, Count)
        self.first_token_seconds = Family(
            "shoal_first_token_seconds",
            "Time from acceptance to the first chunk of an answer.",
            model,
            lambda: Histogram(FIRST_TOKEN_SECONDS),
        )
        self.token_seconds = Family(
            "shoal_token_seconds",
            "Mean time per token after the first one, observed once per request.",
            model,
            lambda: Histogram(TOKEN_SECONDS),
        )
        self.lag = Family(
            "shoal_loop_lag_seconds", "How late the event loop woke a timer.", (), lambda: Histogram(LAG_SECONDS)
        )

    def collect(self, names: Collection[str] = ()) -> Iterator[Metric]:
        for family in vars(self).values():
            if not names or family.name in names:
                yield family.collect()


class PrometheusObserver(Observer, Collector):
    """Counts events. Its methods take at most a microsecond per stage and never raise.

    Called at scrape time: `models` returns (name, state) of every served model, from memory and without raising;
    `queues` the current (model, items, tokens) of each queue; `caches` the counts of each model that has a cache;
    `replicas` (model, status) of every replica; `other_pids` the processes that serve beside this one, whose use of the
    machine is added to its own.
    """

    def __init__(
        self,
        models: Callable[[], Iterable[tuple[str, str]]] = tuple,
        queues: Callable[[], Iterable[tuple[str, int, int]]] = tuple,
        caches: Callable[[], Mapping[str, CacheCounts]] = dict,
        replicas: Callable[[], Iterable[tuple[str, ReplicaStatus]]] = tuple,
        other_pids: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self._families = _Families()
        self._requests: dict[tuple[str, str, str], _Requests] = {}
        self._batches: dict[tuple[str, str], _Batches] = {}
        self._generations: dict[str, _Generations] = {}
        self._names: set[str] = set()
        self._models = models
        self._queues = queues
        self._caches = caches
        self._replicas = replicas
        self._backends: Sequence[tuple[str, int, ModelStats]] = ()
        self._lag = self._families.lag.child()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._registry.register(ProcessTotals(other_pids))
        PlatformCollector(registry=self._registry)

    def record_backends(self, stats: Sequence[tuple[str, int, ModelStats]]) -> None:
        """Store the backends' own statistics for the next scrape: (model, replica number, statistics)."""
        self._backends = stats

    def accepted(self, model: str, task: TaskKind, items: int, traffic: TrafficClass, surface: str = "") -> None:
        series = self._requests.get((model, task, surface)) or self._add_requests(model, task, surface)
        series.received[traffic].value += 1

    def batched(self, report: BatchReport) -> None:
        series = self._batches.get((report.model, report.replica)) or self._add_batches(report.model, report.replica)
        values = [(series.size, report.items), (series.tokens, report.tokens), (series.seconds, report.seconds)]
        if report.finish_seconds is not None:
            values.append((series.finish, report.finish_seconds))
        observe_all(values)
        series.padded.value += report.padded_tokens
        flush = series.flushes.get(report.flush)
        if flush is None:
            label = self._label(report.model)
            flush = series.flushes[report.flush] = self._families.batches.child(label, report.replica, report.flush)
        flush.value += 1
        if report.error is not None:
            self._families.batch_errors.child(report.error).value += 1

    def generated(self, report: GenerationReport) -> None:
        series = self._generations.get(report.model)
        if series is None:
            label = self._label(report.model)
            series = self._generations.setdefault(label, _Generations(self._families, label))
        series.prompt.value += report.prompt_tokens
        series.generated.value += report.completion_tokens
        if report.first_seconds is not None:
            series.first.observe(report.first_seconds)
            if report.completion_tokens > 1:
                series.token.observe((report.seconds - report.first_seconds) / (report.completion_tokens - 1))

    def finished(
        self, model: str, task: TaskKind, outcome: str, seconds: float, result: Result | None, surface: str = ""
    ) -> None:
        series = self._requests.get((model, task, surface)) or self._add_requests(model, task, surface)
        count = series.outcomes.get(outcome)
        if count is None:
            count = self._families.requests.child(self._label(model), task, surface, outcome)
            series.outcomes[outcome] = count
        count.value += 1
        if result is None:
            series.seconds.observe(seconds)
        else:
            series.items.value += len(result.tokens)
            series.tokens.value += sum(result.tokens)
            series.truncated.value += result.truncated
            facts = result.facts
            observe_all(
                (
                    (series.seconds, seconds),
                    (series.prepare, facts.prepare_ms * 0.001),
                    (series.queue, facts.queue_ms * 0.001),
                    (series.infer, facts.infer_ms * 0.001),
                )
            )

    def refused(self, reason: str, surface: str = "") -> None:
        """Count a request rejected before it was accepted; `reason` is the error's kind."""
        self._families.refused.child(reason, surface).value += 1

    def record_lag(self, seconds: float) -> None:
        self._lag.observe(seconds)

    def collect(self, names: Collection[str] = ()) -> Iterator[Metric]:
        """Yield all metrics except those of the process; the Prometheus registry calls it on every scrape. Of its
        counters and histograms, yield only those of `names`, if there are any."""
        yield from self._families.collect(names)
        yield self._collect_cancelled()
        yield gauge(
            "shoal_requests_in_flight", "Requests accepted and not yet finished.", ("model", "task"), self._count_open()
        )
        models = list(self._models())
        yield gauge(
            "shoal_model_state",
            "1 for the current state of a model.",
            ("model", "state"),
            (((name, state), float(state == now)) for name, now in models for state in STATES),
        )
        queues = list(self._queues())
        yield gauge(
            "shoal_queue_items", "Items that wait for a slot.", ("model",), (((m,), float(n)) for m, n, _ in queues)
        )
        yield gauge(
            "shoal_queue_tokens", "Tokens that wait for a slot.", ("model",), (((m,), float(n)) for m, _, n in queues)
        )
        yield from _collect_caches(self._caches())
        yield from _collect_replicas(self._replicas())
        if self._backends:
            yield from upstream.collect_families(self._backends)

    def render(self, names: Collection[str] = ()) -> bytes:
        """Return the text format (CONTENT_TYPE), of all metrics or of those named, which costs less. It reads /proc:
        call it in a thread, not on the event loop."""
        return generate_latest(_Selected(self, names)) if names else generate_latest(self._registry)

    def _collect_cancelled(self) -> Metric:
        family = CounterMetricFamily(
            "shoal_cancelled_total", "Requests whose client disconnected.", labels=("model", "task", "surface")
        )
        for (*labels, outcome), count in self._families.requests.series():
            if outcome == "cancelled":
                family.add_metric(labels, count.value)
        return family

    def _count_open(self) -> Iterator[tuple[tuple[str, str], float]]:
        balance: dict[tuple[str, str], float] = {}
        for (model, task, *_), count in self._families.received.series():
            balance[model, task] = balance.get((model, task), 0) + count.value
        for (model, task, *_), count in self._families.requests.series():
            balance[model, task] = balance.get((model, task), 0) - count.value
        yield from balance.items()

    def _label(self, model: str) -> str:
        """Return the name if the model is or was served, else UNKNOWN."""
        if model in self._names:
            return model
        if len(self._names) < MAX_MODELS and any(name == model for name, _ in self._models()):
            self._names.add(model)
            return model
        return UNKNOWN

    def _add_requests(self, model: str, task: str, surface: str) -> _Requests:
        key = (self._label(model), task, surface)
        if key not in self._requests:
            self._requests[key] = _Requests(self._families, *key)
        return self._requests[key]

    def _add_batches(self, model: str, replica: str) -> _Batches:
        key = (self._label(model), replica)
        if key not in self._batches:
            self._batches[key] = _Batches(self._families, *key)
        return self._batches[key]


class _Selected(CollectorRegistry):
    """The named metrics of an observer. Prometheus names a counter without its `_total`."""

    def __init__(self, observer: PrometheusObserver, names: Collection[str]) -> None:
        super().__init__()
        self._observer, self._names = observer, names

    def collect(self) -> Iterator[Metric]:
        for metric in self._observer.collect(self._names):
            if metric.name in self._names or f"{metric.name}_total" in self._names:
                yield metric


def _collect_caches(caches: Mapping[str, CacheCounts]) -> Iterator[Metric]:
    """Yield the metrics of models that have a cache. The counts of an unloaded model restart at zero."""
    for name, text, field in (
        ("shoal_cache_hits_total", "Items answered from the cache.", "hits"),
        ("shoal_cache_misses_total", "Items not found in the cache.", "misses"),
        ("shoal_cache_evicted_total", "Rows evicted from memory.", "evicted"),
    ):
        family = CounterMetricFamily(name, text, labels=("model",))
        for model, counts in caches.items():
            family.add_metric((model,), getattr(counts, field))
        yield family
    yield gauge(
        "shoal_cache_bytes",
        "Size of a cache in bytes, by place: memory, disk.",
        ("model", "place"),
        (
            ((model, place), float(size))
            for model, counts in caches.items()
            for place, size in (("memory", counts.memory_bytes), ("disk", counts.disk_bytes))
        ),
    )


def _collect_replicas(replicas: Iterable[tuple[str, ReplicaStatus]]) -> Iterator[Metric]:
    """Yield the metrics of each replica. Lanes of a model may share a replica, identified by name."""
    states: dict[tuple[str, str], float] = {}
    ejections: dict[tuple[str, str], int] = {}
    for model, status in replicas:
        key = (model, status.name)
        states[key] = max(states.get(key, 0.0), float(status.state == "ejected"))
        ejections[key] = ejections.get(key, 0) + status.ejections
    labels = ("model", "replica")
    yield gauge("shoal_replica_ejected", "1 for a replica that is currently ejected.", labels, iter(states.items()))
    family = CounterMetricFamily(
        "shoal_replica_ejections_total", "Number of times a replica was ejected.", labels=labels
    )
    for key, count in ejections.items():
        family.add_metric(key, count)
    yield family
