"""Traces by OpenTelemetry, the extra `otel`: spans of requests, of their tasks, and of the batches that carry them.

A span is live only where its context goes to another process or server: a request, a task, a batch. Preparation, the
queue and calls of engines become spans from the records when those end.

Sources: https://opentelemetry.io/docs/specs/semconv/http/http-spans/ and .../gen-ai/gen-ai-spans/. Prompts, answers and
keys are in no attribute.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.context import Context as OtelContext
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shoal._version import __version__
from shoal.core.recording import BatchRecord, RequestRecord, TaskRecord, count_retries
from shoal.errors import MissingExtra
from shoal.types import Generate, Task, TaskKind

OPERATIONS: Mapping[TaskKind, str] = {"embed": "embeddings", "rerank": "rerank", "classify": "classify"}
"""Names of the tasks in `gen_ai.operation.name`; that of a generation depends on its input."""

MAX_LINKS = 128
"""Links of a batch; the SDK keeps so many by default, too."""

FLUSH_S = 2.0
"""Seconds that a stopping server waits for the collector. The SDK waits 30 s, longer than a supervisor does."""

logger = logging.getLogger("shoal")

_W3C = TraceContextTextMapPropagator()


def build_provider(environment: Mapping[str, str], exporter: SpanExporter | None = None) -> TracerProvider:
    """Build what samples spans and sends them. The SDK and its exporter read OpenTelemetry's own variables: endpoint,
    headers, sampler, resource, batching. Raises MissingExtra without the exporter."""
    resource = Resource.create()
    if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "shoal", "service.version": __version__}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter or build_exporter(environment)))
    return provider


def close_provider(provider: TracerProvider) -> None:
    """Send the spans that are left, for FLUSH_S at most: the SDK's own limits do not bound it, because an exporter
    retries while its collector is away. Its thread ends with the process."""
    sending = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
    sending.start()
    sending.join(FLUSH_S)
    if sending.is_alive():
        logger.warning("the collector did not take the last spans within %g s: they are lost", FLUSH_S)


def build_exporter(environment: Mapping[str, str]) -> SpanExporter:
    """Build the exporter of the protocol that the variables name. Raises MissingExtra if it is not installed."""
    general = environment.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", general)
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            return GrpcExporter()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter()
    except ImportError:
        raise MissingExtra("Sending traces", "otel") from None


class OtelTracer:
    """The Tracer of core.recording."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("shoal", __version__)
        self._tasks: dict[int, Span] = {}

    def begin_request(
        self,
        method: str,
        route: str,
        headers: Mapping[bytes, bytes],
        started: float,
        *,
        grpc: bool = False,
        trusted: bool = True,
    ) -> _RequestSpan:
        names = ("traceparent", "tracestate")
        given = {name: headers[name.encode()].decode("latin-1") for name in names if name.encode() in headers}
        caller = _W3C.extract(given, OtelContext())
        found = get_current_span(caller).get_span_context()
        span = self._tracer.start_span(
            route.strip("/") if grpc else f"{method} {route}".rstrip(),
            caller if trusted else OtelContext(),
            SpanKind.SERVER,
            _name_rpc(route) if grpc else {"http.request.method": method, "http.route": route, "url.scheme": "http"},
            links=() if trusted or not found.is_valid else (Link(found),),
            start_time=_to_unix_ns(started),
        )
        return _RequestSpan(span, grpc)

    def begin_task(self, record: TaskRecord, task: Task) -> None:
        operation = OPERATIONS.get(task.kind) or ("chat" if isinstance(task, Generate) and task.messages else "")
        operation = operation or "text_completion"
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "shoal",
            "gen_ai.request.model": record.model,
            "shoal.items": record.items,
        }
        if isinstance(task, Generate):
            attributes |= {
                f"gen_ai.request.{name}": value
                for name in ("max_tokens", "temperature", "top_p")
                if (value := getattr(task.sampling, name)) is not None
            }
        start = _to_unix_ns(record.started)
        name = f"{operation} {record.model}"
        span = self._tracer.start_span(name, _to_context(record.trace), attributes=attributes, start_time=start)
        record.trace = _to_trace(span)
        self._tasks[id(record)] = span

    def end_task(self, record: TaskRecord) -> None:
        span = self._tasks.pop(id(record))
        if span.is_recording():
            self._add_stages(span, record)
            span.set_attributes(_describe_task(record))
            _set_error(span, "" if record.outcome == "ok" else record.outcome)
        span.end(_to_unix_ns(record.started + record.seconds))

    def begin_batch(self, model: str, traces: Sequence[str]) -> _BatchSpan:
        """Begin the span of a batch in the trace of its first task, with links to the others."""
        parents = [_to_context(trace) for trace in dict.fromkeys(filter(None, traces))]
        sampled = [each for each in parents if get_current_span(each).get_span_context().trace_flags.sampled]
        parent, *others = sampled or parents or [OtelContext()]
        contexts = [get_current_span(each).get_span_context() for each in (parent, *others)[:MAX_LINKS]]
        links = [Link(each) for each in contexts if each.is_valid]
        span = self._tracer.start_span(f"batch {model}", parent, links=links)
        return _BatchSpan(self, span)

    def add_span(self, parent: Span, name: str, started: float, ended: float, **attributes: Any) -> None:
        """Add a span that is over, from times of the monotonic clock."""
        kind = SpanKind.CLIENT if name == "infer" else SpanKind.INTERNAL
        error = attributes.pop("error", "")
        span = self._tracer.start_span(
            name,
            set_span_in_context(parent, OtelContext()),
            kind,
            {f"shoal.{key}": value for key, value in attributes.items()},
            start_time=_to_unix_ns(started),
        )
        _set_error(span, error)
        span.end(_to_unix_ns(ended))

    def _add_stages(self, span: Span, record: TaskRecord) -> None:
        prepared = record.started + (record.facts.prepare_ms / 1000 if record.facts is not None else 0.0)
        if prepared > record.started:
            self.add_span(span, "prepare", record.started, prepared)
        if not record.attempts:
            return
        self.add_span(span, "queue", prepared, max(prepared, min(one.started for one in record.attempts)))
        for one in record.attempts:
            if not one.id:  # a batch has spans of its own
                self.add_span(
                    span, "infer", one.started, one.started + one.seconds, replica=one.replica, error=one.error
                )


class _RequestSpan:
    def __init__(self, span: Span, grpc: bool) -> None:
        self._span = span
        self._grpc = grpc
        self.trace = _to_trace(span)

    def end(self, record: RequestRecord) -> None:
        span = self._span
        if not self._grpc:
            span.set_attributes({"http.response.status_code": record.status, "url.path": record.path})
        span.set_attributes(
            {"shoal.request.id": record.id, "shoal.surface": record.surface, "shoal.model": record.model}
        )
        if record.status >= 500:
            _set_error(span, record.error or str(record.status))
        elif record.error:
            span.set_attribute("error.type", record.error)
        span.end()


class _BatchSpan:
    def __init__(self, tracer: OtelTracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self.trace = _to_trace(span)

    def end(self, record: BatchRecord, called: float) -> None:
        span = self._span
        if span.is_recording():
            if called:
                ended = record.started + record.seconds
                self._tracer.add_span(span, "infer", called, ended, replica=record.replica, error=record.error)
            facts: dict[str, int | str] = {
                "id": record.id,
                "items": record.size,
                "tokens": record.tokens,
                "requests": record.requests,
                "flush": record.flush,
                "replica": record.replica,
            }
            span.set_attributes({f"shoal.batch.{name}": value for name, value in facts.items()})
            _set_error(span, record.error)
        span.end()


def _describe_task(record: TaskRecord) -> dict[str, Any]:
    described: dict[str, Any] = {
        "gen_ai.response.model": record.model,
        "gen_ai.usage.input_tokens": record.input_tokens,
    }
    if record.task == "generate":
        described["gen_ai.usage.output_tokens"] = record.output_tokens
    if record.first_seconds is not None:
        described["gen_ai.response.time_to_first_chunk"] = record.first_seconds
    if record.facts is not None:
        described |= {"shoal.batches": record.facts.batches, "shoal.cached": record.facts.cached}
    return described | {"shoal.retries": count_retries(record.attempts), "shoal.outcome": record.outcome}


def _name_rpc(route: str) -> dict[str, str]:
    package, _, method = route.strip("/").rpartition("/")
    return {"rpc.system": "grpc", "rpc.service": package, "rpc.method": method}


def _set_error(span: Span, error: str) -> None:
    if error:
        span.set_attribute("error.type", error)
        span.set_status(Status(StatusCode.ERROR))


def _to_trace(span: Span) -> str:
    headers: dict[str, str] = {}
    _W3C.inject(headers, set_span_in_context(span, OtelContext()))
    return f"{headers['traceparent']} {headers.get('tracestate', '')}".rstrip() if headers else ""


def _to_context(trace: str) -> OtelContext:
    parent, _, state = trace.partition(" ")
    return _W3C.extract({"traceparent": parent, "tracestate": state}, OtelContext()) if trace else OtelContext()


def _to_unix_ns(monotonic: float) -> int:
    return time.time_ns() + int((monotonic - time.monotonic()) * 1e9)
