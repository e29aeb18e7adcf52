"""A receiver of OTLP over HTTP, with the messages of the package opentelemetry-proto, and of OTLP's JSON."""

from __future__ import annotations

import base64
import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

HEX_FIELDS = {"traceId", "spanId", "parentSpanId"}
"""OTLP's JSON has these in hexadecimal; that of protobuf would have base64."""


@dataclass(frozen=True, slots=True)
class SpanSeen:
    """A received span; `process` is the attribute of its resource that identifies who sent it."""

    service: str
    process: Any
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent: str
    start_ns: int
    end_ns: int
    failed: bool
    links: tuple[str, ...]
    attributes: dict[str, Any]


@dataclass(slots=True)
class Collector:
    """The spans that were received at `endpoint`, which is that of OTEL_EXPORTER_OTLP_ENDPOINT."""

    endpoint: str
    spans: list[SpanSeen] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def wait_for(self, found: Callable[[SpanSeen], bool], times: int = 1, patience_s: float = 60.0) -> list[SpanSeen]:
        """Return the matching spans once there are so many."""
        end = time.monotonic() + patience_s
        while len(matching := [span for span in list(self.spans) if found(span)]) < times:
            assert time.monotonic() < end, (
                f"only these spans came: {[(each.service, each.name) for each in self.spans]}"
            )
            time.sleep(0.05)
        return matching

    def trace(self, trace_id: str) -> dict[str, SpanSeen]:
        """Return the spans of a trace by name; of several with one name the last one."""
        return {span.name: span for span in self.spans if span.trace_id == trace_id}


@contextmanager
def collector() -> Iterator[Collector]:
    """Run a receiver on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Receiver)
    server.seen = seen = Collector(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, name="collector")
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Receiver(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        seen: Collector = self.server.seen  # type: ignore[attr-defined]
        seen.bodies.append(body)
        is_json = "json" in self.headers.get("content-type", "")
        seen.spans += _read_spans(_parse_json(body) if is_json else ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def _parse_json(body: bytes) -> ExportTraceServiceRequest:
    def convert(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {
            name: base64.b64encode(bytes.fromhex(value)).decode() if name in HEX_FIELDS else value
            for name, value in pairs
        }

    request = ExportTraceServiceRequest()
    json_format.ParseDict(json.loads(body, object_pairs_hook=convert), request, ignore_unknown_fields=True)
    return request


def _read_spans(request: ExportTraceServiceRequest) -> Iterator[SpanSeen]:
    for group in request.resource_spans:
        resource = _attributes(group.resource)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield SpanSeen(
                    resource.get("service.name", ""),
                    resource.get("service.instance.id") or resource.get("process.pid"),
                    span.name,
                    span.kind,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.code == span.status.STATUS_CODE_ERROR,
                    tuple(link.span_id.hex() for link in span.links),
                    _attributes(span),
                )


def _attributes(holder: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in holder.attributes}
