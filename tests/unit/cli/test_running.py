"""`shoal ps`, `load`, `unload` and `rm --url` with a small server that answers as Shoal does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import HTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shoal.cli import _running, app
from shoal.cli._running import RunningServer
from shoal.config.settings import Settings
from shoal.errors import ConfigError, SetupError, TransportFailed
from shoal.models.progress import Progress
from tests.unit.cli.servers import Quiet, serve_in_thread

Shoal = Callable[..., Result]
Looks = list[dict[str, Any]]

READY = {
    "id": "org/tiny",
    "backend": "openvino",
    "source": "hf:org/tiny",
    "size": 91_000_000,
    "status": {"value": "loaded"},
}
BROKEN = {"id": "broken", "status": {"value": "unloaded", "failed": True, "error": "no such folder"}}
WAITING = {"id": "far", "backend": "triton", "status": {"value": "loading", "note": "waiting for Triton"}}
ADAPTER = {**READY, "id": "org/tiny:sql", "parent": "org/tiny"}
ON_DISK = {"id": "org/other", "backend": "local", "status": {"value": "unloaded"}}


class Stub(HTTPServer):
    """Answers `replies` by "METHOD PATH" as (status, JSON); a list is the answers of successive polls."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Reply)
        self.replies: dict[str, tuple[int, Any]] = {}
        self.requests: list[tuple[str, Any]] = []
        self.keys: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def job(self, request: str, looks: Looks) -> None:
        """`asked` starts a job, and `looks` are the states that later polls find."""
        whole = [{"job": "job_1", "action": "load", "model": "m", "created": 1, **look} for look in looks]
        self.replies[request] = (202, whole[0])
        self.replies["GET /jobs/job_1"] = (200, whole[1:])


class _Reply(Quiet):
    server: Stub

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"] or 0))
        request = f"{self.command} {self.path}"
        self.server.requests.append((request, json.loads(body) if body else None))
        self.server.keys.add(self.headers["authorization"])
        status, reply = self.server.replies.get(request, (404, {"error": {"message": f"no route {request}"}}))
        if isinstance(reply, list):
            reply = reply.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(reply if isinstance(reply, bytes) else json.dumps(reply).encode())

    do_GET = do_POST = do_DELETE = _answer


class RecordingProgress(Progress):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def report_fetch(self, what: str, done: int, total: int | None) -> None:
        self.calls.append((what, done, total))

    def report_work(self, stage: str, fraction: float) -> None:
        self.calls.append((stage, fraction))

    def report_note(self, line: str) -> None:
        self.calls.append((line,))


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(_running, "POLL_S", 0.0)
    server = Stub()
    with serve_in_thread(server):
        yield server


@pytest.fixture
def shoal(stub: Stub) -> Shoal:
    """Run the command line with the stub's port as the setting."""

    def run(*arguments: str, **environ: str) -> Result:
        environment = {"SHOAL_PORT": str(stub.server_port), "NO_COLOR": "1", **environ}
        return CliRunner().invoke(app, [*arguments], env=environment, catch_exceptions=False)

    return run


class TestPs:
    def test_models_in_a_table(self, shoal: Shoal, stub: Stub) -> None:
        """Name, backend, status, size, last use and notes; entries only on disk, and parts of a model, are omitted."""
        stub.replies["GET /models"] = (200, {"data": [READY, ADAPTER, BROKEN, WAITING, ON_DISK]})
        stats = [{"name": "org/tiny", "last_inference": "1700000000000"}, {"name": "far"}]
        stub.replies["GET /metrics"] = (200, {"model_stats": stats})
        result = shoal("ps")
        assert result.exit_code == 0, result.output
        lines = [line.split() for line in result.stdout.splitlines()]
        assert lines[0] == ["NAME", "BACKEND", "STATUS", "SIZE", "LAST", "USED", "NOTE"]
        assert lines[1][:5] == ["org/tiny", "openvino", "loaded", "91", "MB"]
        assert lines[1][-1] == "ago"
        assert lines[2] == ["broken", "-", "failed", "-", "-", "no", "such", "folder"]
        assert lines[3] == ["far", "triton", "loading", "-", "-", "waiting", "for", "Triton"]
        assert len(lines) == 4

    def test_all_as_json(self, shoal: Shoal, stub: Stub) -> None:
        """JSON has seconds and bytes; --all adds loadable models; a server without metrics works too."""
        stub.replies["GET /models"] = (200, {"data": [READY, ON_DISK]})
        first, second = json.loads(shoal("ps", "--all", "--json").stdout)
        assert first == {
            "name": "org/tiny",
            "backend": "openvino",
            "status": "loaded",
            "size": 91_000_000,
            "last_used": None,
            "source": "hf:org/tiny",
            "note": "",
        }
        assert (second["name"], second["status"], second["size"]) == ("org/other", "unloaded", None)

    def test_metrics_of_another_form_only_cost_the_last_use(self, shoal: Shoal, stub: Stub) -> None:
        """The models are listed all the same."""
        stub.replies["GET /models"] = (200, {"data": [READY]})
        stub.replies["GET /metrics"] = (200, b"# HELP shoal_requests_total")
        assert json.loads(shoal("ps", "--json").stdout)[0]["last_used"] is None

    def test_the_latest_version_counts(self, stub: Stub) -> None:
        """Of a model's versions the latest counts, under its name in Triton."""
        stats = [{"name": "org~m", "last_inference": str(each)} for each in (2000, 9000, 5000)]
        stub.replies["GET /metrics"] = (200, {"model_stats": stats})
        assert RunningServer(stub.url).get_last_used() == {"org/m": 9.0}


class TestLoad:
    def test_a_model_is_loaded(self, shoal: Shoal, stub: Stub) -> None:
        """The body has the given options and nothing else."""
        path = "POST /v1/models/org/tiny/load?wait=false"
        stub.job(path, [{"state": "running", "stage": "converting"}, {"state": "done", "changed": True}])
        result = shoal("load", "org/tiny", "--backend", "triton", "--text-in")
        assert (result.exit_code, result.stdout) == (0, "org/tiny is loaded\n"), result.output
        assert result.stderr == "converting\n"
        assert stub.requests[0] == (path, {"backend": "triton", "text_in": True})

    def test_a_model_that_is_already_loaded(self, shoal: Shoal, stub: Stub) -> None:
        """It is reported and no error; addresses stay readable in the path."""
        stub.job("POST /v1/models/hf:org/tiny@v1/load?wait=false", [{"state": "done", "changed": False}])
        result = shoal("load", "hf:org/tiny@v1")
        assert (result.exit_code, result.stdout) == (0, "hf:org/tiny@v1 is already loaded\n"), result.output
        assert stub.requests[0][1] == {}

    @pytest.mark.parametrize(
        ("end", "expected"),
        [
            ({"state": "failed", "error": "the hub has no such model"}, "error: the hub has no such model"),
            ({"state": "cancelled"}, "error: load of m was cancelled"),
        ],
    )
    def test_a_failure_is_the_server_s_reason(
        self, shoal: Shoal, stub: Stub, end: dict[str, Any], expected: str
    ) -> None:
        """The error is one line, with exit code 1."""
        stub.job("POST /v1/models/m/load?wait=false", [{"state": "running"}, end])
        result = shoal("load", "m")
        assert (result.exit_code, result.stderr) == (1, expected + "\n")

    def test_progress_is_drawn_as_it_comes(self, stub: Stub) -> None:
        """Bytes and fractions are drawn, and a stage without numbers is printed once."""
        looks: Looks = [
            {"state": "running", "stage": "model.onnx", "done": 5.0, "total": 10.0, "progress": 0.5},
            {"state": "running", "stage": "more", "done": 1.0},
            {"state": "running", "stage": "convert", "progress": 0.25},
            {"state": "running", "stage": "warming up"},
            {"state": "running", "stage": "warming up"},
            {"state": "done"},
        ]
        stub.job("POST /v1/models/m/load?wait=false", looks)
        progress_log = RecordingProgress()
        assert RunningServer(stub.url).load("m", {}, progress_log)
        assert progress_log.calls == [("model.onnx", 5, 10), ("more", 1, None), ("convert", 0.25), ("warming up",)]

    def test_an_interrupt_says_that_the_server_continues(self, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C stops the watching, not the job."""

        def raise_interrupt(seconds: float) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("time.sleep", raise_interrupt)
        stub.job("POST /v1/models/m/load?wait=false", [{"state": "running"}])
        progress_log = RecordingProgress()
        with pytest.raises(KeyboardInterrupt):
            RunningServer(stub.url).load("m", {}, progress_log)
        assert progress_log.calls == [("the server continues the job: `shoal ps` shows its progress",)]

    @pytest.mark.parametrize("name", ["", "/", "/etc/passwd", "//"])
    @pytest.mark.parametrize("verb", [("load",), ("unload",), ("rm", "--url", "http://localhost:1")])
    def test_empty_names_are_not_sent(self, shoal: Shoal, stub: Stub, verb: list[str], name: str) -> None:
        """An empty name would be another path of the server."""
        result = shoal(*verb, name)
        assert result.exit_code == 1
        assert f"{name!r} is not a model" in result.stderr
        assert stub.requests == []

    @pytest.mark.parametrize("name", ["..", "a/../../b", "a b", "a?b#c", "x%2e"])
    def test_strange_names_reach_the_server_as_they_are(self, stub: Stub, name: str) -> None:
        """The server refuses them; they must not become another path."""
        with pytest.raises(SetupError, match="answered 404"):
            RunningServer(stub.url).load(name, {}, RecordingProgress())
        ((request, _),) = stub.requests
        quoted = name.replace("%", "%25").replace(" ", "%20").replace("?", "%3F").replace("#", "%23")
        assert request == f"POST /v1/models/{quoted}/load?wait=false"


class TestUnload:
    @pytest.mark.parametrize(
        ("changed", "message"), [(True, "org/tiny is unloaded\n"), (False, "org/tiny is not loaded\n")]
    )
    def test_a_model_is_unloaded(self, shoal: Shoal, stub: Stub, changed: bool, message: str) -> None:
        """One that is not loaded is no failure."""
        stub.job("POST /v1/models/org/tiny/unload?wait=false", [{"state": "done", "changed": changed}])
        result = shoal("unload", "org/tiny")
        assert (result.exit_code, result.stdout) == (0, message), result.output

    def test_rm_by_a_server(self, shoal: Shoal, stub: Stub) -> None:
        """The server unloads the model and deletes its files; an unknown model is an error."""
        stub.job("DELETE /v1/models/org/tiny?wait=false", [{"state": "done"}])
        result = shoal("rm", "org/tiny", "--url", stub.url)
        assert (result.exit_code, result.stdout) == (0, "removed org/tiny\n"), result.output
        stub.job("DELETE /v1/models/org/tiny?wait=false", [{"state": "done", "changed": False}])
        result = shoal("rm", "org/tiny", "--url", stub.url)
        assert result.exit_code == 1
        assert f"org/tiny is unknown at {stub.url}" in result.stderr


class TestServer:
    def test_a_refused_connection_is_an_error(self, shoal: Shoal) -> None:
        """The error names the next step."""
        result = shoal("ps", "--url", "http://127.0.0.1:1")
        assert result.exit_code == 1
        assert "no response from http://127.0.0.1:1" in result.stderr
        assert "`shoal serve` starts one" in result.stderr

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            ({"error": {"message": "no key"}}, "no key"),
            ({"error": "plain"}, "plain"),
            ({"detail": "of FastAPI"}, "of FastAPI"),
            ([1], "[1]"),
            (b"", "no reason given"),
            (b"<html>", "<html>"),
        ],
    )
    def test_refusals_of_any_dialect_are_read(self, stub: Stub, body: Any, reason: str) -> None:
        """The error has status and reason."""
        stub.replies["GET /models"] = (403, [body])
        with pytest.raises(SetupError) as caught:
            RunningServer(stub.url).models()
        assert caught.value.message == f"{stub.url}/models answered 403: {reason}"

    @pytest.mark.parametrize("body", [b"hello", [[1]], {"data": 3}, {}])
    def test_another_program_on_that_port(self, stub: Stub, body: Any) -> None:
        """It is not mistaken for a server without models."""
        stub.replies["GET /models"] = (200, body)
        with pytest.raises(TransportFailed, match=r"is it a Shoal server\?"):
            RunningServer(stub.url).models()

    def test_a_server_without_jobs(self, stub: Stub) -> None:
        """An older server has loaded the model by then, or cannot."""
        stub.replies["POST /v1/models/m/load?wait=false"] = (200, {"status": "success"})
        with pytest.raises(TransportFailed, match="did not start a job"):
            RunningServer(stub.url).load("m", {}, RecordingProgress())

    @pytest.mark.parametrize(
        ("environ", "key"),
        [
            ({}, None),
            ({"SHOAL_API_KEY": "user bulk"}, "Bearer user"),
            ({"SHOAL_API_KEY": "user", "SHOAL_ADMIN_KEY": "boss"}, "Bearer boss"),
        ],
    )
    def test_the_key_of_the_settings_is_sent(
        self, shoal: Shoal, stub: Stub, environ: dict[str, str], key: str | None
    ) -> None:
        """The admin key is preferred; the class of a key is not sent."""
        stub.replies["GET /models"] = (200, {"data": []})
        assert shoal("ps", **environ).exit_code == 0
        assert stub.keys == {key}

    def test_proxies_are_not_used_for_this_machine(
        self, shoal: Shoal, stub: Stub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A proxy's loopback address is another machine's."""
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        stub.replies["GET /models"] = (200, {"data": []})
        assert shoal("ps", http_proxy="http://127.0.0.1:1").exit_code == 0

    def test_the_server_url(self) -> None:
        """The settings' port or the preset's is used; port 0 needs --url; URLs need http or https."""
        assert RunningServer.from_settings(Settings(port=9000), "").url == "http://127.0.0.1:9000"
        assert RunningServer.from_settings(Settings(host="0.0.0.0"), "").url == "http://localhost:8080"
        assert RunningServer.from_settings(Settings(), "https://box.example/").url == "https://box.example"
        with pytest.raises(ConfigError, match="server: use --url"):
            RunningServer.from_settings(Settings(port=0), "")
        for wrong in ("box:80", "ftp://box", "http://"):
            with pytest.raises(ConfigError, match="write http://host:port"):
                RunningServer.from_settings(Settings(), wrong)
        result = CliRunner().invoke(app, ["ps", "--as", "inference-server", "--host", "::1"])
        assert "no response from http://[::1]:8686" in result.stderr


EXPLAINED: dict[str, Any] = {
    "id": "req_1",
    "surface": "openai",
    "method": "POST",
    "path": "/v1/embeddings",
    "status": 502,
    "error": "backend",
    "time": 1_700_000_000.0,
    "ms": 1520.0,
    "client": "key:0123456789ab",
    "model": "m",
    "tasks": [
        {
            **{"model": "m", "task": "embed", "outcome": "backend", "items": 2, "input_tokens": 0, "output_tokens": 0},
            **{"cached": 1, "start_ms": 0.5, "ms": 1519.0, "prepare_ms": 0.2, "queue_ms": 3.0, "infer_ms": 1500.0},
            **{"first_token_ms": None, "retries": 1},
            "attempts": [
                {
                    **{"replica": "m-0", "start_ms": 3.5, "ms": 1500.0, "batch": 7, "items": 4, "tokens": 64},
                    **{"requests": 3, "flush": "full", "error": "backend", "step": "fail"},
                }
            ],
        }
    ],
}


def test_explain_shows_a_request(shoal: Shoal, stub: Stub) -> None:
    stub.replies["GET /v1/requests/req%2F1"] = (200, EXPLAINED)
    result = shoal("explain", "req/1", "--url", stub.url)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "status 502 backend after 1.52 s" in lines
    assert "embed m: backend after 1.52 s" in lines
    assert "size 2 items, 1 of them from the cache, 0 tokens in" in lines
    assert "stages prepare 0.2 ms, queue 3.0 ms, infer 1.50 s" in lines
    assert "+3.5 ms 1.50 s m-0 7: 4 items, 3 requests, 64 tokens (full) backend -> fail" in lines


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_ends_run(shoal: Shoal, stub: Stub, status: int) -> None:
    """The server at the port is Shoal, perhaps: its refusal is shown, and no model is fetched to run beside it."""
    stub.replies["GET /models"] = (status, {"error": {"message": "no valid key"}})
    result = shoal("run", "fake:", "hello", SHOAL_PORT=str(stub.server_port))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no valid key" in result.stderr


def test_run_beside_a_server_of_another_kind(shoal: Shoal, stub: Stub) -> None:
    result = shoal("run", "fake:", "hello", SHOAL_PORT=str(stub.server_port))
    assert (result.exit_code, result.stdout) == (0, "hello\n"), result.stderr


def test_explain_of_what_is_left_of_a_record(shoal: Shoal, stub: Stub) -> None:
    """Either half of a record may be displaced by those of newer requests."""
    gone = {"surface": "", "method": "", "path": "", "status": 0, "error": "", "time": 0.0, "ms": 0.0, "client": ""}
    stub.replies["GET /v1/requests/one"] = (200, {**EXPLAINED, **gone})
    assert "not answered yet, or is displaced" in " ".join(shoal("explain", "one", "--url", stub.url).stdout.split())
    stub.replies["GET /v1/requests/two"] = (200, {**EXPLAINED, "status": 200, "error": "", "tasks": []})
    assert "m; newer requests displaced" in shoal("explain", "two", "--url", stub.url).stdout


def test_explain_as_json(shoal: Shoal, stub: Stub) -> None:
    stub.replies["GET /v1/requests/req_1"] = (200, EXPLAINED)
    assert json.loads(shoal("explain", "req_1", "--json", "--url", stub.url).stdout) == EXPLAINED


def test_explain_says_why_there_is_none(shoal: Shoal, stub: Stub) -> None:
    stub.replies["GET /v1/requests/old"] = (404, {"error": {"message": "The request 'old' is not among the last 5."}})
    result = shoal("explain", "old", "--url", stub.url)
    assert result.exit_code == 1
    assert "not among the last 5" in result.stderr
