"""The metrics of other servers, for existing dashboards and alerts: text-embeddings-inference's `te_*` and
triton-grpc-proxy's `tgp_*`.

Names, labels and buckets are those of router/src/prometheus.rs and core/src/{infer,queue}.rs of
https://github.com/huggingface/text-embeddings-inference. The format is that of its exporter: counters without the
suffix `_total`, no HELP, and a series only after its first use. There is no model label: all models count together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import accumulate
from typing import TypeAlias

from shoal.core.observers import ForwardingObserver
from shoal.core.protocols import BatchReport, Observer
from shoal.observability.instruments import Count, Histogram
from shoal.types import Result, TaskKind, TrafficClass

DURATIONS = tuple(accumulate([1.5] * 34, lambda bound, factor: bound * factor, initial=0.00001 * 1.5))
"""Buckets in seconds, a geometric sequence."""
LENGTHS = tuple(float(2**n) for n in range(20))
SIZES = tuple(float(2**n) for n in range(13))
TOKENS = tuple(float(2**n) for n in range(21))

ERRORS = {
    "empty": "validation",
    "invalid": "validation",
    "too_many": "batch_size",
    "unsupported": "model_type",
    "model_not_found": "model_type",
    "too_long": "tokenization",
    "invalid_value": "tokenization",
    "overloaded": "overloaded",
    "cancelled": "dropped",
    "backend": "inference",
    "input_rejected": "inference",
    "not_finite": "inference",
    "out_of_memory": "inference",
    "transport": "inference",
    "upstream": "inference",
    "upstream_failed": "inference",
    "crashed": "inference",
    "deadline": "inference",
    "unavailable": "inference",
    "internal": "inference",
}
"""The original's names of error kinds. Other kinds, which it does not have, are not counted."""

_TASKS: dict[TaskKind, str] = {"embed": "te_embed", "rerank": "te_predict", "classify": "te_predict"}

_Labels: TypeAlias = tuple[tuple[str, str], ...]


class ForeignMetrics(ForwardingObserver):
    """Counts and histograms under another server's names.

    `queues` returns the current (model, items, tokens) of each queue.
    """

    def __init__(
        self, inner: Observer | None = None, queues: Callable[[], Iterable[tuple[str, int, int]]] = tuple
    ) -> None:
        super().__init__(inner)
        self._queues = queues
        self._counts: dict[tuple[str, _Labels], Count] = {}
        self._histograms: dict[str, Histogram] = {}

    def render(self) -> bytes:
        """Return the text format, to append to other metrics. Any thread may call it."""
        return "".join(self._lines()).encode()

    def _add(self, name: str, labels: _Labels, count: int = 1) -> None:
        found = self._counts.get((name, labels))
        if found is None:
            found = self._counts[name, labels] = Count()
        found.value += count

    def _observe(self, name: str, bounds: Sequence[float], value: float, times: int = 1) -> None:
        found = self._histograms.get(name)
        if found is None:
            found = self._histograms[name] = Histogram(bounds)
        found.observe(value, times)

    def _lines(self) -> Iterator[str]:
        counts = list(self._counts.items())
        for name in dict.fromkeys(name for (name, _), _ in counts):
            yield f"# TYPE {name} counter\n"
            for (other, labels), count in counts:
                if other == name:
                    yield f"{name}{_braces(labels)} {_decimal(count.value)}\n"
            yield "\n"
        yield from self._gauges()
        for name, histogram in list(self._histograms.items()):
            yield f"# TYPE {name} histogram\n"
            counted = list(accumulate(histogram.counts))
            for bound, below in zip((*map(_decimal, histogram.bounds), "+Inf"), counted, strict=True):
                yield f'{name}_bucket{{le="{bound}"}} {below}\n'
            yield f"{name}_sum {_decimal(histogram.total)}\n{name}_count {counted[-1]}\n\n"

    def _gauges(self) -> Iterator[str]:
        yield from ()


class ProxyMetrics(ForeignMetrics):
    """The metrics of triton-grpc-proxy, `tgp_*`, by src/services of https://github.com/kozistr/triton-grpc-proxy-rs.

    Every request counts as a batch there. The time of turning texts into tensors is reported as its serialization.
    """

    def finished(
        self, model: str, task: TaskKind, outcome: str, seconds: float, result: Result | None, surface: str = ""
    ) -> None:
        self._inner.finished(model, task, outcome, seconds, result, surface)
        if task != "embed" or result is None:
            return
        self._add("tgp_request_count", (("method", "batch"),))
        self._observe("tgp_batch_size", SIZES, len(result.tokens))
        self._observe("tgp_serialization_duration", DURATIONS, result.facts.prepare_ms / 1000)
        self._observe("tgp_inference_duration", DURATIONS, result.facts.infer_ms / 1000)


class TeiMetrics(ForeignMetrics):
    """The metrics of text-embeddings-inference, `te_*`.

    A failure counts once per request, in the original once per input, and only for requests in `te_request_count`:
    requests rejected before they reach a model appear only in Shoal's own metrics.
    """

    def accepted(self, model: str, task: TaskKind, items: int, traffic: TrafficClass, surface: str = "") -> None:
        self._inner.accepted(model, task, items, traffic, surface)
        name = _TASKS.get(task)
        if name is not None:
            self._add("te_request_count", (("method", _method(items)),))
            self._add(f"{name}_count", (), items)

    def batched(self, report: BatchReport) -> None:
        self._inner.batched(report)
        self._observe("te_batch_next_size", SIZES, report.items)
        self._observe("te_batch_next_tokens", TOKENS, report.padded_tokens)

    def finished(
        self, model: str, task: TaskKind, outcome: str, seconds: float, result: Result | None, surface: str = ""
    ) -> None:
        self._inner.finished(model, task, outcome, seconds, result, surface)
        name = _TASKS.get(task)
        if name is None:
            return
        if result is None:
            self._fail(outcome)
            return
        items = len(result.tokens)
        self._add("te_request_success", (("method", _method(items)),))
        self._add(f"{name}_success", (), items)
        facts = result.facts
        for stage, took in (
            ("duration", seconds),
            ("tokenization_duration", facts.prepare_ms / 1000),
            ("queue_duration", facts.queue_ms / 1000),
            ("inference_duration", facts.infer_ms / 1000),
        ):
            self._observe(f"te_request_{stage}", DURATIONS, took)
            self._observe(f"{name}_{stage}", DURATIONS, took, items)
        for tokens in result.tokens:
            self._observe("te_request_input_length", LENGTHS, tokens)

    def _fail(self, kind: str) -> None:
        if kind in ERRORS:
            self._add("te_request_failure", (("err", ERRORS[kind]),))

    def _gauges(self) -> Iterator[str]:
        yield f"# TYPE te_queue_size gauge\nte_queue_size {sum(items for _, items, _ in self._queues())}\n\n"


def _method(items: int) -> str:
    return "single" if items == 1 else "batch"


def _braces(labels: _Labels) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""


def _decimal(value: float) -> str:
    """Format a number as Rust does: no exponent, and no decimal point for whole numbers."""
    return str(int(value)) if value == int(value) else format(Decimal(repr(value)), "f")
