"""The Prometheus observer: its metrics, that the counts balance, and that clients cannot add series without limit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

import numpy as np
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from shoal.core.protocols import BatchReport, GenerationReport
from shoal.observability.loop_lag import measure_loop_lag
from shoal.observability.metrics import MAX_MODELS, UNKNOWN, PrometheusObserver
from shoal.types import BatchFacts, Embedded

Key = tuple[str, frozenset[tuple[str, str]]]


def parse_metrics(observer: PrometheusObserver) -> dict[Key, float]:
    families: Iterable[Metric] = text_string_to_metric_families(observer.render().decode())
    samples = (sample for family in families for sample in family.samples)
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def value(samples: dict[Key, float], name: str, **labels: str) -> float:
    """Return the sum of the series with these labels, as a query that names no others does. Raises if there is none."""
    found = [number for (each, of), number in samples.items() if each == name and labels.items() <= set(of)]
    assert found, (name, labels)
    return sum(found)


def total(samples: dict[Key, float], name: str) -> float:
    return sum(number for (found, _), number in samples.items() if found == name)


def answer(*tokens: int, truncated: int = 0) -> Embedded:
    vectors = np.zeros((len(tokens), 4), np.float32)
    return Embedded(vectors=vectors, tokens=list(tokens), truncated=truncated)


@pytest.fixture
def observer() -> PrometheusObserver:
    return PrometheusObserver(lambda: [("m", "ready"), ("n", "loading")], lambda: [("m", 3, 70)])


def test_one_request_is_counted_in_every_metric(observer: PrometheusObserver) -> None:
    """An answered request appears in received, outcome, items, tokens, truncation and duration."""
    observer.accepted("m", "embed", 2, "interactive")
    observer.finished("m", "embed", "ok", 0.0042, answer(16, 100, truncated=1))
    samples = parse_metrics(observer)
    assert (
        value(samples, "shoal_requests_received_total", **{"model": "m", "task": "embed", "class": "interactive"}) == 1
    )
    assert value(samples, "shoal_requests_total", model="m", task="embed", outcome="ok") == 1
    assert value(samples, "shoal_items_total", model="m", task="embed") == 2
    assert value(samples, "shoal_tokens_total", model="m", task="embed") == 116
    assert value(samples, "shoal_truncated_total", model="m") == 1
    assert value(samples, "shoal_request_seconds_bucket", model="m", task="embed", le="0.003") == 0
    assert value(samples, "shoal_request_seconds_bucket", model="m", task="embed", le="0.005") == 1
    assert value(samples, "shoal_request_seconds_sum", model="m", task="embed") == pytest.approx(0.0042)
    assert value(samples, "shoal_requests_in_flight", model="m", task="embed") == 0


def test_surfaces_are_counted_apart(observer: PrometheusObserver) -> None:
    """Requests, their outcomes and times are told apart by surface; the sum over them is that of all requests."""
    for surface, outcome in (("openai", "ok"), ("openai", "cancelled"), ("tei", "ok")):
        observer.accepted("m", "embed", 1, "interactive", surface)
        observer.finished("m", "embed", outcome, 0.1, answer(5) if outcome == "ok" else None, surface)
    observer.accepted("m", "embed", 1, "interactive", "tei")
    observer.refused("malformed", "tei")
    samples = parse_metrics(observer)
    assert value(samples, "shoal_requests_received_total", surface="tei", model="m") == 2
    assert value(samples, "shoal_requests_total", surface="openai", model="m", outcome="ok") == 1
    assert value(samples, "shoal_request_seconds_count", surface="openai", model="m") == 2
    assert value(samples, "shoal_cancelled_total", surface="openai", model="m") == 1
    assert value(samples, "shoal_refused_total", surface="tei", reason="malformed") == 1
    assert value(samples, "shoal_requests_total", model="m", outcome="ok") == 2
    assert value(samples, "shoal_items_total", model="m") == 2
    assert value(samples, "shoal_requests_in_flight", model="m") == 1


def test_stages_come_from_the_answer_s_facts(observer: PrometheusObserver) -> None:
    """Tokenizing, waiting and engine times come from the result, finishing from the batch."""
    facts = BatchFacts(prepare_ms=0.04, queue_ms=3.0, infer_ms=20.0)
    observer.accepted("m", "embed", 1, "interactive")
    observer.finished("m", "embed", "ok", 0.024, Embedded(vectors=np.zeros((1, 4)), tokens=[5], facts=facts))
    observer.batched(BatchReport("m", "r", 1, 5, 5, "idle", 0.02, finish_seconds=0.001))
    samples = parse_metrics(observer)
    for stage, seconds in (("prepare", 0.00004), ("queue", 0.003), ("infer", 0.02), ("finish", 0.001)):
        assert value(samples, "shoal_stage_seconds_sum", model="m", stage=stage) == pytest.approx(seconds)
        assert value(samples, "shoal_stage_seconds_count", model="m", stage=stage) == 1


def test_received_balances_finished_and_in_flight(observer: PrometheusObserver) -> None:
    """At any time received = ok + failed + cancelled + in flight, over many random histories."""
    draw = random.Random(7)
    open_requests: list[str] = []
    for _ in range(2000):
        if open_requests and draw.random() < 0.5:
            model = open_requests.pop(draw.randrange(len(open_requests)))
            outcome = draw.choice(["ok", "cancelled", "deadline", "backend"])
            observer.finished(model, "embed", outcome, draw.random(), answer(5) if outcome == "ok" else None)
        else:
            open_requests.append(draw.choice(["m", "n"]))
            observer.accepted(open_requests[-1], "embed", 1, draw.choice(["interactive", "bulk"]))
    samples = parse_metrics(observer)
    assert len(open_requests) > 0
    assert total(samples, "shoal_requests_in_flight") == len(open_requests)
    assert total(samples, "shoal_requests_received_total") == total(samples, "shoal_requests_total") + len(
        open_requests
    )
    cancelled = sum(
        number
        for (name, labels), number in samples.items()
        if name == "shoal_requests_total" and ("outcome", "cancelled") in labels
    )
    assert total(samples, "shoal_cancelled_total") == cancelled > 0


def test_batches_show_size_padding_and_flush(observer: PrometheusObserver) -> None:
    """A batch counts by replica and flush; real and computed tokens give the padding; errors count by kind."""
    observer.batched(
        BatchReport(model="m", replica="a", items=16, tokens=200, padded_tokens=256, flush="full", seconds=0.01)
    )
    observer.batched(
        BatchReport(
            model="m", replica="a", items=1, tokens=10, padded_tokens=16, flush="idle", seconds=0.002, error="backend"
        )
    )
    samples = parse_metrics(observer)
    assert value(samples, "shoal_batches_total", model="m", replica="a", flush="full") == 1
    assert value(samples, "shoal_batch_size_bucket", model="m", le="8.0") == 1
    assert value(samples, "shoal_batch_size_bucket", model="m", le="16.0") == 2
    assert value(samples, "shoal_batch_tokens_sum", model="m") == 210
    assert value(samples, "shoal_batch_padded_tokens_total", model="m") == 272
    assert value(samples, "shoal_batch_seconds_count", model="m", replica="a") == 2
    assert value(samples, "shoal_batch_errors_total", kind="backend") == 1


def test_gauges_are_read_when_scraped(observer: PrometheusObserver) -> None:
    """Queue and model state come from callbacks during the scrape."""
    samples = parse_metrics(observer)
    assert value(samples, "shoal_queue_items", model="m") == 3
    assert value(samples, "shoal_queue_tokens", model="m") == 70
    assert value(samples, "shoal_model_state", model="m", state="ready") == 1
    assert value(samples, "shoal_model_state", model="n", state="ready") == 0
    assert value(samples, "shoal_model_state", model="n", state="loading") == 1


def test_invented_names_share_one_series(observer: PrometheusObserver) -> None:
    """Ten thousand unknown models add as many series as one."""
    observer.finished("invented", "embed", "model_not_found", 0.0, None)
    before = len(parse_metrics(observer))
    for number in range(10_000):
        observer.finished(f"invented-{number}", "embed", "model_not_found", 0.0, None)
    samples = parse_metrics(observer)
    assert len(samples) == before
    assert value(samples, "shoal_requests_total", model=UNKNOWN, task="embed", outcome="model_not_found") == 10_001


def test_models_loaded_over_time_are_bounded() -> None:
    """After MAX_MODELS names the server adds no labels."""
    current = [("none", "ready")]
    observer = PrometheusObserver(lambda: current)
    for number in range(MAX_MODELS + 50):
        current[0] = (f"m{number}", "ready")
        observer.batched(BatchReport(f"m{number}", "r", 1, 5, 5, "idle", 0.02, finish_seconds=0.001))
    samples = parse_metrics(observer)
    assert value(samples, "shoal_stage_seconds_count", model=UNKNOWN, stage="finish") == 50


def test_a_model_that_is_loaded_later_gets_its_own_series() -> None:
    """A name counts as unknown until it is served."""
    served: list[tuple[str, str]] = []
    observer = PrometheusObserver(lambda: served)
    observer.accepted("late", "embed", 1, "bulk")
    served.append(("late", "ready"))
    observer.accepted("late", "embed", 1, "bulk")
    samples = parse_metrics(observer)
    for model in (UNKNOWN, "late"):
        labels = {"model": model, "task": "embed", "class": "bulk"}
        assert value(samples, "shoal_requests_received_total", **labels) == 1


def test_refusals_count_by_reason_and_leave_the_balance_alone(observer: PrometheusObserver) -> None:
    """A refused request counts as refused and not as received."""
    observer.refused("overloaded")
    samples = parse_metrics(observer)
    assert value(samples, "shoal_refused_total", reason="overloaded") == 1
    assert total(samples, "shoal_requests_received_total") == 0


def test_two_observers_share_nothing(observer: PrometheusObserver) -> None:
    """Each has its own registry, so servers in one process stay separate."""
    observer.refused("overloaded")
    assert total(parse_metrics(PrometheusObserver()), "shoal_refused_total") == 0


def test_process_metrics_are_included(observer: PrometheusObserver) -> None:
    """Memory and CPU time of the process are part of a scrape."""
    samples = parse_metrics(observer)
    assert value(samples, "process_resident_memory_bytes") > 1e6
    assert value(samples, "process_cpu_seconds_total") > 0


async def test_loop_lag_is_the_timer_delay(observer: PrometheusObserver) -> None:
    """A timer of 100 ms that fires after 130 ms has a lag of 30 ms; an early one has none."""
    moments = iter([0.0, 0.13, 1.0, 1.0999])
    lags: list[float] = []
    done = asyncio.Event()

    def record(seconds: float) -> None:
        lags.append(seconds)
        observer.record_lag(seconds)
        if len(lags) == 2:
            done.set()

    async def sleep(seconds: float) -> None:
        assert seconds == 0.1
        await asyncio.sleep(0)

    def clock() -> float:
        return next(moments, 2.0)

    async with measure_loop_lag(record, sleep=sleep, clock=clock):
        await done.wait()
    assert lags[:2] == pytest.approx([0.03, 0.0])


async def test_loop_lag_stops_with_its_block() -> None:
    """Leaving the block ends the sampling task."""
    async with measure_loop_lag(lambda _: None):
        await asyncio.sleep(0)
        assert [task for task in asyncio.all_tasks() if task.get_name() == "loop-lag"]
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "loop-lag"]


def test_generations_show_tokens_and_their_times(observer: PrometheusObserver) -> None:
    """Once per request: its tokens, the time to the first, and the mean of the others; a refused one has no times."""
    observer.generated(GenerationReport("m", 7, 5, 0.2, 1.0))
    observer.generated(GenerationReport("m", 3, 1, 0.2, 0.3))
    observer.generated(GenerationReport("m", 0, 0, None, 0.1))
    observer.generated(GenerationReport("invented", 1, 1, None, 0.1))
    observer.generated(GenerationReport("invented too", 1, 1, None, 0.1))
    samples = parse_metrics(observer)
    assert value(samples, "shoal_prompt_tokens_total", model="m") == 10
    assert value(samples, "shoal_generated_tokens_total", model="m") == 6
    assert value(samples, "shoal_first_token_seconds_count", model="m") == 2
    assert value(samples, "shoal_token_seconds_count", model="m") == 1
    assert value(samples, "shoal_token_seconds_sum", model="m") == pytest.approx(0.2)
    assert value(samples, "shoal_generated_tokens_total", model=UNKNOWN) == 2
    assert total(samples, "shoal_generated_tokens_total") == 8


def test_only_the_named_metrics() -> None:
    """A page that reads every few seconds names what it shows; a histogram comes with all of its samples."""
    observer = PrometheusObserver(models=lambda: [("m", "ready")])
    observer.accepted("m", "embed", 1, "interactive")
    text = observer.render({"shoal_requests_total", "shoal_request_seconds", "shoal_model_state"}).decode()
    named = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert named == {"shoal_requests_total", "shoal_request_seconds", "shoal_model_state"}
    assert 'shoal_request_seconds_bucket{le="+Inf",' in text
    assert len(text) < len(observer.render()) / 3
