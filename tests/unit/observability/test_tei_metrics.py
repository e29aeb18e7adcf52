"""The metrics of text-embeddings-inference: names, labels, buckets and form."""

from __future__ import annotations

import re

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal.core.protocols import BatchReport, GenerationReport, Observer
from shoal.observability.foreign_metrics import DURATIONS, ERRORS, ProxyMetrics, TeiMetrics
from shoal.observability.metrics import PrometheusObserver
from shoal.types import BatchFacts, Embedded, Result, Scored, TaskKind

FACTS = BatchFacts(size=2, prepare_ms=2.0, queue_ms=20.0, infer_ms=200.0)


def embed_result(*tokens: int) -> Embedded:
    return Embedded(vectors=np.zeros((len(tokens), 1), np.float32), tokens=list(tokens), facts=FACTS)


def run_request(metrics: Observer, result: Result, task: TaskKind = "embed", seconds: float = 0.25) -> None:
    metrics.accepted("m", task, len(result.tokens), "interactive")
    metrics.finished("m", task, "ok", seconds, result)


def samples(metrics: TeiMetrics) -> dict[str, float]:
    """Each line's series and its value."""
    lines = [line for line in metrics.render().decode().splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_a_series_appears_with_its_first_use() -> None:
    """Only the gauge is always present."""
    assert TeiMetrics().render() == b"# TYPE te_queue_size gauge\nte_queue_size 0\n\n"


def test_requests_and_items() -> None:
    """Requests count by whether they hold one input; embed and predict count inputs."""
    metrics = TeiMetrics()
    run_request(metrics, embed_result(5))
    run_request(metrics, embed_result(5, 7, 9))
    run_request(metrics, Scored(scores=np.zeros((2, 1), np.float32), tokens=[3, 4], facts=FACTS), "rerank")
    run_request(metrics, Scored(scores=np.zeros((1, 3), np.float32), tokens=[3], facts=FACTS), "classify")
    values = samples(metrics)
    assert values['te_request_count{method="single"}'] == values['te_request_success{method="single"}'] == 2
    assert values['te_request_count{method="batch"}'] == values['te_request_success{method="batch"}'] == 2
    assert values["te_embed_count"] == values["te_embed_success"] == values["te_embed_duration_count"] == 4
    assert values["te_predict_count"] == values["te_predict_success"] == values["te_predict_duration_count"] == 3
    assert values["te_request_duration_count"] == 4
    assert values["te_request_duration_sum"] == 1.0
    assert values["te_request_tokenization_duration_sum"] == pytest.approx(0.008)
    assert values["te_embed_queue_duration_sum"] == pytest.approx(0.08)
    assert values["te_predict_inference_duration_sum"] == pytest.approx(0.6)
    assert values["te_request_input_length_sum"] == 36
    assert values['te_request_input_length_bucket{le="4"}'] == 3


def test_generation_is_not_counted() -> None:
    """The original does not generate."""
    metrics = TeiMetrics()
    metrics.accepted("m", "generate", 1, "interactive")
    metrics.finished("m", "generate", "ok", 1.0, None)
    assert set(samples(metrics)) == {"te_queue_size"}


@pytest.mark.parametrize(
    ("kind", "err"),
    [
        ("empty", "validation"),
        ("too_many", "batch_size"),
        ("unsupported", "model_type"),
        ("too_long", "tokenization"),
        ("backend", "inference"),
        ("overloaded", "overloaded"),
        ("cancelled", "dropped"),
    ],
)
def test_failures(kind: str, err: str) -> None:
    """Labeled with the original's names, for counted requests on batched routes."""
    metrics = TeiMetrics()
    metrics.refused(kind)
    metrics.accepted("m", "embed", 2, "interactive")
    metrics.finished("m", "embed", kind, 0.1, None)
    values = samples(metrics)
    assert values[f'te_request_failure{{err="{err}"}}'] == values['te_request_count{method="batch"}'] == 1
    assert 'te_request_success{method="batch"}' not in values


def test_failures_that_the_original_does_not_have() -> None:
    """A wrong key, an unknown path and refusals by a route have no series."""
    metrics = TeiMetrics()
    for kind in ("unauthorized", "route_not_found", "malformed"):
        assert kind not in ERRORS
        metrics.refused(kind)
    metrics.refused("model_not_found")  # on any route, for a model's card and for a chat
    assert set(samples(metrics)) == {"te_queue_size"}


def test_batches_and_the_queue() -> None:
    """Sizes in items and in padded tokens; the queue is that of all models."""
    metrics = TeiMetrics(queues=lambda: [("a", 3, 30), ("b", 4, 40)])
    metrics.batched(BatchReport("m", "r", 5, 40, 64, "idle", 0.01))
    values = samples(metrics)
    assert values["te_queue_size"] == 7
    assert (values["te_batch_next_size_sum"], values["te_batch_next_tokens_sum"]) == (5, 64)
    assert values['te_batch_next_size_bucket{le="4"}'] == 0
    assert values['te_batch_next_size_bucket{le="8"}'] == 1
    assert values['te_batch_next_tokens_bucket{le="1048576"}'] == 1


def test_buckets() -> None:
    """Thirty-five bounds, each 1.5 times the one before, from 15 microseconds to 14.6 seconds."""
    assert len(DURATIONS) == 35
    assert DURATIONS[0] == 0.00001 * 1.5
    assert DURATIONS[-1] == pytest.approx(14.56, rel=1e-3)
    metrics = TeiMetrics()
    run_request(metrics, embed_result(1), seconds=1e-9)
    text = metrics.render().decode()
    assert 'te_request_duration_bucket{le="0.000015000000000000002"} 1' in text
    assert "te_request_duration_sum 0.000000001\n" in text
    bounds = re.findall(r'te_batch_next_size_bucket\{le="(.*?)"', text)
    assert bounds == []  # without a batch
    assert len(re.findall("te_request_input_length_bucket", text)) == 21
    assert not re.search(r"\d[eE][-+]?\d", text)


def test_the_form() -> None:
    """Types without help, no suffix on counters, and text that Prometheus parses beside Shoal's own."""
    inner = PrometheusObserver(lambda: [("m", "ready")])
    metrics = TeiMetrics(inner)
    run_request(metrics, embed_result(5))
    text = (inner.render() + metrics.render()).decode()
    assert "# TYPE te_request_count counter\n" in text
    assert '\nte_request_count{method="single"} 1\n' in text
    assert "# HELP te_" not in text
    assert "te_embed_count_total" not in text
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {"te_embed_duration", "te_request_input_length", "te_queue_size", "shoal_requests"} <= names


class RecordingObserver(Observer):
    """Records the names of its called methods."""

    def __init__(self) -> None:
        self.called: set[str] = set()

    def __getattribute__(self, name: str) -> object:
        if name != "heard" and name in vars(Observer) and not name.startswith("_"):
            self.called.add(name)
        return super().__getattribute__(name)


def test_every_call_is_forwarded() -> None:
    """For every method."""
    hearing = RecordingObserver()
    metrics = TeiMetrics(hearing)
    metrics.refused("empty")
    run_request(metrics, embed_result(1))
    metrics.batched(BatchReport("m", "r", 1, 1, 1, "idle", 0.01))
    metrics.generated(GenerationReport("m", 1, 1, None, 0.1))
    assert hearing.called == {name for name in vars(Observer) if not name.startswith("_")}


def test_the_proxys_own_names() -> None:
    """The names of triton-grpc-proxy, with each request as a batch; nothing else is counted."""
    metrics = ProxyMetrics()
    result = Embedded(vectors=np.zeros((2, 4), np.float32), tokens=[3, 3], facts=FACTS)
    metrics.finished("m", "embed", "ok", 0.5, result)
    metrics.finished("m", "embed", "backend", 0.5, None)
    text = metrics.render().decode()
    assert 'tgp_request_count{method="batch"} 1\n' in text
    for name in ("tgp_batch_size", "tgp_serialization_duration", "tgp_inference_duration"):
        assert f"# TYPE {name} histogram\n" in text
        assert f"{name}_count 1\n" in text
    assert "tgp_batch_size_sum 2\n" in text
