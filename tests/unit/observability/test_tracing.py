"""Spans of recorded tasks and batches, and the variables that turn traces on."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import MappingProxyType

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import StatusCode

from shoal.app.request_log import is_tracing, open_log
from shoal.config.settings import Settings
from shoal.core.recording import (
    RECORD,
    BatchRecord,
    RequestLog,
    RequestRecord,
    TaskRecord,
    outgoing_trace,
    record_attempt,
)
from shoal.observability import tracing
from shoal.observability.tracing import OtelTracer, build_provider, close_provider
from shoal.types import Embed, Generate, Message, Sampling

EMBED = Embed(model="m", inputs=["a-secret-prompt"])
CHAT = Generate(model="m", messages=[Message(role="user", content="a-secret-prompt")], sampling=Sampling(max_tokens=5))


class Traces:
    """A tracer, and the spans that it has sent by name."""

    def __init__(self, **options: object) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(**options)  # type: ignore[arg-type]
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = OtelTracer(provider)
        self.log = RequestLog(10, self.tracer)

    def begin(
        self, request_id: str, task: Embed | Generate = EMBED, headers: Mapping[bytes, bytes] = MappingProxyType({})
    ) -> TaskRecord:
        """Begin a request and its task."""
        request = self.tracer.begin_request("POST", "/v1/embeddings", headers, time.monotonic())
        record = TaskRecord(request_id, "m", task.kind, 1, time.monotonic(), request.trace)
        return self.log.begin(record, task)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


def batch(error: str = "") -> BatchRecord:
    return BatchRecord(7, 2, 2, "full", "m-0", 0.01, time.monotonic() - 0.02, 16, error)


def test_a_batch_belongs_to_one_task_and_is_linked_to_all() -> None:
    traces = Traces()
    one, two = traces.begin("1"), traces.begin("2")
    span = traces.tracer.begin_batch("m", [one.trace, two.trace, one.trace, ""])
    span.end(batch(), time.monotonic())
    found = traces.spans["batch m"]
    assert found.parent is not None and found.context is not None
    assert f"{found.parent.span_id:016x}" in one.trace
    assert [f"{link.context.span_id:016x}" in task.trace for link, task in zip(found.links, (one, two), strict=True)]
    assert f"{found.context.span_id:016x}" in span.trace
    assert dict(found.attributes or {})["shoal.batch.tokens"] == 16


def test_a_failed_batch_is_an_error() -> None:
    traces = Traces()
    traces.tracer.begin_batch("m", [traces.begin("1").trace]).end(batch("transport"), time.monotonic())
    for name in ("batch m", "infer"):
        assert traces.spans[name].status.status_code is StatusCode.ERROR
        assert dict(traces.spans[name].attributes or {})["error.type"] == "transport"


def test_a_batch_of_sampled_and_other_tasks_belongs_to_a_sampled_one() -> None:
    traces = Traces()
    silent = traces.begin("1", headers={b"traceparent": b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-00"})
    loud = traces.begin("2")
    traces.tracer.begin_batch("m", [silent.trace, loud.trace]).end(batch(), 0.0)
    assert traces.spans["batch m"].parent is not None
    assert f"{traces.spans['batch m'].context.trace_id:032x}" in loud.trace


def test_a_generation() -> None:
    """Its calls are spans of their own, the failed one an error; nothing of the conversation is in an attribute."""
    traces = Traces()
    record = traces.begin("1", CHAT)
    now = time.monotonic()
    record_attempt("a", now, now + 0.1, "transport")
    record_attempt("b", now + 0.1, now + 0.2)
    record.input_tokens, record.output_tokens, record.first_seconds = 3, 5, 0.15
    traces.log.end(record, "ok", 0.25)
    attributes = dict(traces.spans["chat m"].attributes or {})
    assert attributes["gen_ai.usage.input_tokens"] == 3
    assert attributes["gen_ai.usage.output_tokens"] == 5
    assert attributes["gen_ai.request.max_tokens"] == 5
    assert attributes["shoal.retries"] == 1
    calls = [span for span in traces.exporter.get_finished_spans() if span.name == "infer"]
    assert [span.status.status_code for span in calls] == [StatusCode.ERROR, StatusCode.UNSET]
    assert "a-secret-prompt" not in "".join(span.to_json() for span in traces.exporter.get_finished_spans())


@pytest.mark.parametrize(
    ("status", "code"), [(200, StatusCode.UNSET), (400, StatusCode.UNSET), (503, StatusCode.ERROR)]
)
def test_only_failures_of_the_server_are_errors(status: int, code: StatusCode) -> None:
    """As the conventions for HTTP servers have it: a client's mistake leaves the status unset."""
    traces = Traces()
    span = traces.tracer.begin_request("POST", "/v1/embeddings", {}, time.monotonic())
    span.end(RequestRecord("1", "openai", "POST", "/v1/embeddings", status, 0.0, 0.0, 0.1, "c", "m", "kind"))
    assert traces.spans["POST /v1/embeddings"].status.status_code is code


def test_unsampled_requests_send_nothing_and_say_so_upstream() -> None:
    traces = Traces(sampler=ALWAYS_OFF)
    record = traces.begin("1")
    flags = dict(outgoing_trace())["traceparent"].rpartition("-")[2]
    assert not int(flags, 16) & 1
    traces.log.end(record, "ok", 0.1)
    assert traces.exporter.get_finished_spans() == ()


def test_the_caller_s_state_goes_on() -> None:
    parent = b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"
    Traces().begin("1", headers={b"traceparent": parent, b"tracestate": b"vendor=some"})
    assert dict(outgoing_trace())["tracestate"] == "vendor=some"


@pytest.mark.parametrize("parent", [b"", b"nonsense", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"\xff"])
def test_an_invalid_context_begins_a_new_trace(parent: bytes) -> None:
    record = Traces().begin("1", headers={b"traceparent": parent})
    assert record.trace.startswith("00-") and "0" * 32 not in record.trace


@pytest.mark.parametrize("is_trusted", [True, False])
def test_the_flag_of_a_stranger_decides_nothing(is_trusted: bool) -> None:
    """A sampled trace of a trusted caller is continued and recorded; a stranger's is only linked to one of its own."""
    headers = {b"traceparent": f"00-{'1' * 32}-{'2' * 16}-01".encode()}
    quiet, all_of_them = Traces(sampler=ParentBased(ALWAYS_OFF)), Traces()
    for traces in (quiet, all_of_them):
        span = traces.tracer.begin_request("POST", "/x", headers, time.monotonic(), trusted=is_trusted)
        span.end(RequestRecord("r", "openai", "POST", "/x", 200, 1.0, 1.0, 0.1, "c", "m", ""))
    assert len(quiet.spans) == int(is_trusted)
    found = all_of_them.spans["POST /x"]
    assert found.context is not None
    assert (f"{found.context.trace_id:x}" == "1" * 32) is is_trusted
    assert [f"{link.context.trace_id:x}" for link in found.links] == ([] if is_trusted else ["1" * 32])


async def test_what_is_left_running_is_no_part_of_the_request() -> None:
    """A background task inherits the record; once the request is over, its calls carry no context and are not noted."""
    traces = Traces()
    record = traces.begin("1")
    over = asyncio.Event()

    async def work() -> tuple[tuple[str, str], ...]:
        await over.wait()
        record_attempt("late", 0.0, 1.0)
        return outgoing_trace()

    background = asyncio.create_task(work())
    traces.log.end(record, "ok", 0.1)
    over.set()
    assert await background == ()
    assert record.attempts == []
    RECORD.set(None)


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "console"}, False),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, False),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, True),
    ],
)
def test_which_variables_turn_traces_on(variables: dict[str, str], on: bool) -> None:
    assert is_tracing(variables) is on


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_collector_that_is_away_does_not_hold_the_shutdown(
    protocol: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK would wait 30 s for a closed port."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tracing, "FLUSH_S", 0.05)
    with socket.socket() as closed:  # bound, so that nobody else listens there
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        exporter = tracing.build_exporter({"OTEL_EXPORTER_OTLP_PROTOCOL": protocol})
        provider = build_provider({}, exporter)
        for _ in range(2000):
            provider.get_tracer("t").start_span("s").end()
        started = time.monotonic()
        close_provider(provider)
        seconds = time.monotonic() - started
        exporter.shutdown()  # its retries end here, and with them the thread
    assert seconds < 2.0
    assert "they are lost" in caplog.text


def test_the_last_spans_are_sent() -> None:
    exporter = InMemorySpanExporter()
    provider = build_provider({}, exporter)
    provider.get_tracer("t").start_span("s").end()
    close_provider(provider)
    assert len(exporter.get_finished_spans()) == 1


async def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The server starts without traces, and says how to install them."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "shoal.observability.tracing", None)
    async with AsyncExitStack() as stack:
        log = await open_log(stack, Settings())
    assert log is not None and log.tracer is None
    assert ".[otel]" in caplog.text


@pytest.mark.parametrize(
    ("kept", "variables", "expected"), [(0, {}, None), (5, {}, False), (0, {"OTEL_TRACES_EXPORTER": "otlp"}, True)]
)
async def test_what_is_recorded(
    kept: int, variables: dict[str, str], expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing at all if neither is wanted; traces also without records."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    async with AsyncExitStack() as stack:
        log = await open_log(stack, Settings(explain_requests=kept))
    assert (log and log.tracer is not None) is expected


@pytest.mark.parametrize(
    ("variables", "module"),
    [
        ({}, ".http."),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ".grpc."),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, ".http."),
    ],
)
def test_the_protocol_is_that_of_the_variables(
    variables: dict[str, str], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[SpanExporter] = []

    def process(exporter: SpanExporter) -> SimpleSpanProcessor:
        chosen.append(exporter)
        return SimpleSpanProcessor(exporter)

    monkeypatch.setattr(tracing, "BatchSpanProcessor", process)
    build_provider(variables).shutdown()
    assert module in type(chosen[0]).__module__


def test_the_service_is_called_shoal_unless_it_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)
    assert build_provider({}, InMemorySpanExporter()).resource.attributes["service.name"] == "shoal"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    assert build_provider({}, InMemorySpanExporter()).resource.attributes["service.name"] == "mine"
