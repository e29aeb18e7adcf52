"""`shoal bench` from its arguments to its output, against a small server in a thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from shoal.cli._errors import report_errors
from shoal.cli.bench import bench

app = typer.Typer()
app.command()(report_errors(bench))


class Stub(BaseHTTPRequestHandler):
    """Lists two models; answers 19 tokens a text for the first of them, 401 for any key but `open`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.headers.get("authorization") == "Bearer hidden":
            self.answer(401, {"error": "no such key"})
            return
        self.answer(200, {"object": "list", "data": [{"id": "org/first"}, {"id": "org/second"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        allowed = self.headers.get("authorization", "Bearer open") == "Bearer open"
        texts = len(body["input"]) if isinstance(body["input"], list) else 1
        if not allowed:
            self.answer(401, {"error": "no such key"})
        elif body["model"] != "org/first":
            self.answer(404, {"error": f"no model {body['model']}"})
        else:
            self.answer(200, {"usage": {"prompt_tokens": 19 * texts}})

    def answer(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("x-shoal-batch-size", "3")
        self.send_header("x-shoal-queue-ms", "0.2")
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


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*arguments, "--duration", "0.2", "--warmup", "0", "--clients", "2"])
    return result.exit_code, result.output


def test_json_holds_the_plan_the_figures_and_the_machine(url: str) -> None:
    """A closed loop of two clients with two texts a request."""
    code, output = run(url, "--json", "--texts-per-request", "2")
    report = json.loads(output)
    assert code == 0
    assert report["plan"]["texts"] == 2
    assert report["tokens_each"] == 19
    assert report["result"]["texts"] == 2 * report["result"]["requests"] > 0
    assert report["result"]["batch_size"] == 3
    assert report["client_machine"]["versions"]["shoal"]


def test_text_output_shows_the_figures(url: str) -> None:
    """An open loop prints throughput, percentiles, batches and errors."""
    code, output = run(url, "--rate", "100")
    assert code == 0
    for word in ("100 requests/s", "texts/s", "p99.9", "mean size 3", "errors      none"):
        assert word in output


def test_a_missing_key_names_the_flag(url: str) -> None:
    """The error names the flag; a model's name would not help."""
    code, output = run(url, "--api-key", "hidden")
    assert code == 1
    assert "requires a key (401): pass it with --api-key" in output


def test_a_refused_first_request_shows_the_server_s_message(url: str) -> None:
    """A wrong key shows the server's message, on standard error."""
    code, output = run(url, "--api-key", "closed")
    assert code == 1
    assert "401" in output
    assert "no such key" in output
    assert "closed" not in output


def test_the_named_model_is_used(url: str) -> None:
    """Without a name the server's first model is used."""
    code, output = run(url, "--model", "org/other")
    assert code == 1
    assert "no model org/other" in output


def test_the_error_without_a_server_says_how_to_start_one() -> None:
    """A refused connection ends with the next step."""
    code, output = run("http://127.0.0.1:9")
    assert code == 1
    assert "shoal serve" in output


def test_a_bad_url_is_refused() -> None:
    """The error says that https is not supported."""
    code, output = run("https://localhost")
    assert code == 1
    assert "http://host:port" in output


def test_an_interrupt_before_the_measurement(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with 130, and no measurement was made that nobody awaits."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.cli.progress.Waiting.__enter__", interrupt)
    monkeypatch.setattr("shoal.bench.run.measure", pytest.fail)
    assert run(url) == (130, "")
