"""Traces of a real `shoal serve`, as an OTLP receiver gets them: in several processes, and before a real Triton."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import pytest

from shoal.backends.triton.process import Command
from shoal.kserve import SERVICE
from shoal.kserve import protocol_pb2 as pb
from tests.fakes.otlp import Collector, SpanSeen, collector
from tests.integration.llm_kit import running, upstream_of
from tests.integration.server_kit import Server, environment
from tests.integration.triton_kit import PATIENCE_S, running_triton

pytestmark = pytest.mark.timeout(PATIENCE_S)

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "a-secret-prompt"
SERVER, INTERNAL, CLIENT = 2, 1, 3
"""Kinds of spans in OTLP."""


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector to which servers started in the test send their spans within 0.1 s."""
    with collector() as seen:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", seen.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield seen


def post(server: Server, path: str, body: Any, trace: str = TRACE, flags: str = "01") -> dict[str, str]:
    """Send a request as a part of a trace; return the headers of the answer, in lower case, once it is read."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {
        "content-type": "application/json",
        "traceparent": f"00-{trace}-{CALLER}-{flags}",
        "tracestate": "vendor=some",
        "authorization": f"Bearer {SECRET}",
    }
    connection.request("POST", path, json.dumps(body), headers)
    reply = connection.getresponse()
    text = reply.read()
    connection.close()
    assert reply.status == 200, text
    return {name.lower(): value for name, value in reply.getheaders()}


def explain(server: Server, request_id: str) -> Any:
    """Return what `shoal explain` prints as JSON."""
    command = [sys.executable, "-m", "shoal", "explain", request_id, "--json", "--url", server.base_url]
    return json.loads(subprocess.run(command, capture_output=True, check=True, env=environment()).stdout)


def of(trace: str, name: str) -> Any:
    """Return a predicate for spans of that trace whose name begins like this."""
    return lambda span: span.trace_id == trace and span.name.startswith(name)


def assert_within(inner: SpanSeen, outer: SpanSeen) -> None:
    """The clocks of spans that are made afterwards agree to a few milliseconds."""
    slack = 20_000_000
    assert outer.start_ns - slack <= inner.start_ns <= inner.end_ns <= outer.end_ns + slack, (inner, outer)


def test_one_request_from_http_to_triton(tmp_path: Path, receiver: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's trace goes through Shoal's request, task and batch into the spans that Triton itself sends."""
    arguments = Command.arguments

    def with_traces(self: Command, prefix: str) -> list[str]:
        settings = (
            "mode=opentelemetry",
            "rate=1",
            "level=TIMESTAMPS",
            f"opentelemetry,url={receiver.endpoint}/v1/traces",
            "opentelemetry,bsp_schedule_delay=100",
        )
        return [*arguments(self, prefix), *(f"--trace-config={each}" for each in settings)]

    monkeypatch.setattr(Command, "arguments", with_traces)
    with running_triton(tmp_path / "triton") as triton:
        triton.load("near_free")
        with running(tmp_path / "shoal", f"m=triton://{triton.url}#near_free") as server:
            post(server, "/v1/embeddings", {"model": "m", "input": [SECRET, "other"]})
            (of_triton,) = receiver.wait_for(lambda span: span.trace_id == TRACE and span.name == "InferRequest")
            (request,) = receiver.wait_for(of(TRACE, "POST /v1/embeddings"))
    spans = receiver.trace(TRACE)
    task, queue, batch, call = (spans[name] for name in ("embeddings m", "queue", "batch m", "infer"))
    assert (request.parent, request.kind, request.service) == (CALLER, SERVER, "shoal")
    assert (task.parent, queue.parent, batch.parent) == (request.span_id, task.span_id, task.span_id)
    assert (call.parent, call.kind, batch.links) == (batch.span_id, CLIENT, (task.span_id,))
    assert of_triton.parent == batch.span_id and of_triton.service != "shoal"
    for inner, outer in ((task, request), (queue, task), (batch, task), (call, batch), (of_triton, batch)):
        assert_within(inner, outer)
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["http.route"] == "/v1/embeddings"
    assert task.attributes["gen_ai.operation.name"] == "embeddings"
    assert task.attributes["gen_ai.usage.input_tokens"] > 0
    assert batch.attributes["shoal.batch.items"] == 2
    assert not any(SECRET.encode() in body for body in receiver.bodies)


def test_a_stream_through_processes_and_servers(tmp_path: Path, receiver: Collector) -> None:
    """Each process sends its own spans, another server continues the trace, and a stream ends its span at its end."""
    with (
        running(tmp_path / "upstream", "m=fake:token_ms=20") as upstream,
        running(
            tmp_path / "front", f"far={upstream_of(upstream, 'm')}", "near=fake:", flags=("--workers", "2")
        ) as server,
    ):
        chat = {"messages": [{"role": "user", "content": f"{SECRET} two three four"}], "stream": True, "max_tokens": 4}
        answer = post(
            server, "/v1/chat/completions", {"model": "far", **chat, "stream_options": {"include_usage": True}}
        )
        assert "x-request-id" in answer
        receiver.wait_for(of(TRACE, "POST /v1/chat/completions"), times=2)
        first, second = sorted(
            (span for span in receiver.spans if of(TRACE, "POST /v1/chat")(span)), key=lambda span: span.start_ns
        )
        tasks = receiver.wait_for(of(TRACE, "chat "), times=2)
        near = "5" * 32
        headers = post(server, "/v1/embeddings", {"model": "near", "input": SECRET}, trace=near)
        receiver.wait_for(of(near, "POST /v1/embeddings"))
        receiver.wait_for(of(near, "batch near"))
        of_near = explain(server, headers["x-request-id"])
        of_far = explain(server, answer["x-request-id"])
        unsampled = "6" * 32
        post(server, "/v1/embeddings", {"model": "near", "input": SECRET}, trace=unsampled, flags="00")
    of_front, of_upstream = (next(task for task in tasks if task.name.endswith(name)) for name in ("far", " m"))
    assert of_front.parent == first.span_id and first.parent == CALLER
    assert second.parent == of_front.span_id and of_upstream.parent == second.span_id
    assert of_upstream.attributes["gen_ai.usage.output_tokens"] == 4
    assert of_front.attributes["gen_ai.request.max_tokens"] == 4
    assert first.end_ns - first.start_ns >= 60_000_000, "four tokens, 20 ms apart"
    assert_within(of_upstream, of_front)
    spans = receiver.trace(near)
    assert spans["embeddings near"].parent == spans["POST /v1/embeddings"].span_id
    assert spans["batch near"].parent == spans["embeddings near"].span_id
    assert not [span for span in receiver.spans if span.trace_id == unsampled]
    # One front has the request and the generation; the model process has the batch.
    for found, task in ((of_near, "embed"), (of_far, "generate")):
        assert (found["status"], [(each["task"], len(each["attempts"])) for each in found["tasks"]]) == (
            200,
            [(task, 1)],
        )
    assert not any(SECRET.encode() in body for body in receiver.bodies)


def test_a_grpc_call_is_a_part_of_its_caller_s_trace(tmp_path: Path, receiver: Collector) -> None:
    socket = tmp_path / "grpc.sock"
    with running(tmp_path / "shoal", "m=fake:", flags=("--grpc-socket", str(socket))) as server:
        assert server.ready()
        request = pb.ModelInferRequest(model_name="m")
        tensor = request.inputs.add(name="text", datatype="BYTES", shape=[1, 1])
        tensor.contents.bytes_contents.append(SECRET.encode())
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            call = channel.unary_unary(
                SERVICE + "ModelInfer", pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
            )
            assert call(request, timeout=30, metadata=(("traceparent", f"00-{TRACE}-{CALLER}-01"),)).outputs
        (span,) = receiver.wait_for(lambda span: span.name == (SERVICE + "ModelInfer").strip("/"))
    assert (span.trace_id, span.parent) == (TRACE, CALLER)
    assert span.attributes["rpc.method"] == "ModelInfer"
