"""`shoal bench chat` from its arguments to its output, over HTTP and over gRPC."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from shoal.bench.chat import ChatPlan
from shoal.cli import app
from shoal.cli.bench_chat import measure_grpc
from shoal.errors import Unsupported
from shoal.kserve import protocol_pb2 as pb
from tests.fakes import triton_codec
from tests.fakes.triton import FakeModel, FakeTriton, Refused, reply


class Stub(BaseHTTPRequestHandler):
    """Streams two words; counts tokens unless the model is named `silent`; refuses `nobody`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200, b'{"data":[{"id":"m"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["model"] == "nobody":
            self.answer(404, b'{"error":{"message":"no model nobody"}}')
            return
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"content": word}}]} for word in ("a", "b")]
        if body["model"] != "silent":
            events.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}})
        self.answer(200, b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events))

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "chat", *arguments])


class TestHttp:
    def test_the_table_matches_genai_perf(self, url: str) -> None:
        """Rows and columns have its names, with one table per concurrency."""
        result = run(url, "--concurrency", "1,2", "--requests", "4")
        assert result.exit_code == 0, result.output
        tables = result.stdout.split("\n\n")
        assert len(tables) == 2
        assert "2 streams, 4 answers" in tables[1]
        assert tables[0].splitlines()[1].split() == ["avg", "min", "max", "p99", "p90", "p75"]
        for row in (
            "Request Latency (ms)", "Time To First Token (ms)", "Inter Token Latency (ms)",
            "Output Sequence Length (tokens)", "Input Sequence Length (tokens)", "Output Token Throughput (per s)",
            "Request Throughput (per s)", "errors: none",
        ):  # fmt: skip
            assert f"\n{row}" in tables[0]
        assert "does not count" not in result.stdout

    def test_json_holds_the_plan_the_rows_and_the_machine(self, url: str) -> None:
        """The data for comparison by other programs."""
        result = run(url, "--requests", "2", "--json", "--api-key", "secret")
        output = json.loads(result.stdout)
        assert output["server"] == url
        assert output["plan"]["requests"] == 2
        assert output["results"][0]["rows"]["Output Sequence Length (tokens)"]["avg"] == 2
        assert output["client_machine"]["versions"]["shoal"]
        assert "secret" not in result.output

    def test_a_server_without_token_counts_is_reported(self, url: str) -> None:
        """Chunks are counted instead."""
        result = run(url, "--requests", "2", "--model", "silent")
        assert "the server does not count tokens" in result.stdout

    def test_a_refusal_is_one_line(self, url: str) -> None:
        """The line has the server's message; exit code 1."""
        result = run(url, "--model", "nobody")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "no model nobody" in result.stderr

    def test_the_error_without_a_server_says_how_to_start_one(self) -> None:
        """A refused connection ends with the next step."""
        result = run("http://127.0.0.1:9")
        assert result.exit_code == 1
        assert "start one with `shoal serve`" in result.stderr

    @pytest.mark.parametrize("value", ["", "one", "0", "1,,2", "5000"])
    def test_an_invalid_concurrency_is_a_usage_error(self, value: str) -> None:
        """A usage error that shows the correct form."""
        result = run("http://127.0.0.1:9", "--concurrency", value)
        assert result.exit_code == 2
        assert "such as 1,8,64" in result.stderr


class TestEmbeddings:
    def test_embeddings_are_the_default(self) -> None:
        """`shoal bench URL`, `shoal bench --option` and `shoal bench embed` are the same."""
        for arguments in (["https://x"], ["--clients", "2", "https://x"], ["embed", "https://x"]):
            result = CliRunner().invoke(app, ["bench", *arguments])
            assert result.exit_code == 1
            assert "the URL must look like http://host:port" in result.output

    def test_help_names_both(self) -> None:
        """Each has its own help."""
        output = CliRunner().invoke(app, ["bench", "--help"]).output
        assert "embed" in output
        assert "chat" in output
        assert "--surface" in CliRunner().invoke(app, ["bench", "embed", "--help"], env={"COLUMNS": "200"}).output


def fake_llm(
    name: str, inputs: Mapping[str, pb.DataType], requests: list[dict[str, Any]], *, batch: int = 0
) -> FakeModel:
    """A decoupled text model that answers two words and records its requests; `broken` answers an error."""
    config = pb.ModelConfig(name=name, backend="python", max_batch_size=batch)
    config.model_transaction_policy.decoupled = True
    for each, kind in {"text_input": pb.TYPE_STRING, **inputs}.items():
        config.input.add(name=each, data_type=kind, dims=[1])
    config.output.add(name="text_output", data_type=pb.TYPE_STRING, dims=[1])
    for each in inputs:
        if each.startswith("return_"):
            config.output.add(name=each.removeprefix("return_"), data_type=pb.TYPE_UINT32, dims=[1])

    async def answer(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelInferResponse]:
        tensors = triton_codec.read_inputs(request)
        requests.append({each: (array.shape, array.flat[0]) for each, array in tensors.items()})
        if name == "broken":
            raise Refused("the model is out of order")
        counting = {"num_output_tokens", "num_input_tokens"} & {output.name for output in request.outputs}
        counts: dict[str, Any] = {each: np.array([3], np.uint32) for each in counting}
        for word in (b"a", b"", b"b"):
            yield reply(request, text_output=np.array([word], dtype=object), **counts)
        yield reply(request, final=True)

    return FakeModel(name, config=config, answer=answer)


class TestGrpc:
    async def test_a_vllm_model(self) -> None:
        """Inputs by name, one per request; empty pieces are not tokens."""
        requests: list[dict[str, Any]] = []
        kinds = {"stream": pb.TYPE_BOOL, "sampling_parameters": pb.TYPE_STRING}
        async with FakeTriton() as triton:
            triton.add(fake_llm("m", kinds, requests))
            plan = ChatPlan(model="m", requests=3, concurrency=(2,), input_tokens=4, output_tokens=6, exact=True)
            (found,) = await measure_grpc(triton.target, plan)
        assert (found.requests, found.errors, found.tokens_by) == (3, {}, "chunks")
        assert found.rows["Output Sequence Length (tokens)"].avg == 2
        assert requests[0]["stream"] == ((1,), True)
        assert json.loads(requests[0]["sampling_parameters"][1]) == {
            "max_tokens": 6,
            "ignore_eos": True,
            "min_tokens": 6,
        }
        assert len({one["text_input"][1] for one in requests}) == 4

    async def test_a_model_that_counts_its_tokens(self) -> None:
        """Pieces may hold several tokens; their counts are added."""
        requests: list[dict[str, Any]] = []
        flags = {"return_num_input_tokens": pb.TYPE_BOOL, "return_num_output_tokens": pb.TYPE_BOOL}
        async with FakeTriton() as triton:
            triton.add(fake_llm("m", {"sampling_parameters": pb.TYPE_STRING, **flags}, requests))
            (found,) = await measure_grpc(triton.target, ChatPlan(model="m", requests=2))
        assert found.tokens_by == "server"
        assert found.rows["Output Sequence Length (tokens)"].avg == 9
        assert found.rows["Input Sequence Length (tokens)"].avg == 3
        assert requests[0]["return_num_output_tokens"] == ((1,), True)

    async def test_a_tensorrt_llm_model(self) -> None:
        """It has a batch dimension and its own name for the length."""
        requests: list[dict[str, Any]] = []
        async with FakeTriton() as triton:
            triton.add(fake_llm("m", {"max_tokens": pb.TYPE_INT32, "stream": pb.TYPE_BOOL}, requests, batch=8))
            await measure_grpc(triton.target, ChatPlan(model="m", requests=1, output_tokens=6))
        assert requests[0]["max_tokens"] == ((1, 1), 6)
        assert requests[0]["text_input"][0] == (1, 1)

    async def test_a_model_that_fails(self) -> None:
        """The error has the model's message."""
        async with FakeTriton() as triton:
            triton.add(fake_llm("broken", {}, []))
            with pytest.raises(RuntimeError, match="out of order"):
                await measure_grpc(triton.target, ChatPlan(model="broken"))

    async def test_a_model_of_another_kind(self) -> None:
        """The error comes before any request."""
        async with FakeTriton() as triton:
            triton.add(FakeModel("emb"))
            with pytest.raises(Unsupported, match="emb has no text_input"):
                await measure_grpc(triton.target, ChatPlan(model="emb"))

    def test_a_model_is_required(self) -> None:
        """A Triton lists other models than language models too."""
        result = run("--triton", "127.0.0.1:9")
        assert result.exit_code == 2
        assert "name the model with --model" in result.stderr
