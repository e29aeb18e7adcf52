"""`shoal chat`: in this process with the fake model, and with a small server."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.cli._talking import ModelDescription, RemoteChat, open_local_chat
from shoal.errors import ConfigError, EngineFailed, SetupError, TransportFailed
from shoal.types import Chunk, Context, Generate, Guide, Message, Sampling
from tests.unit.cli.servers import Quiet, serve_in_thread

runner = CliRunner()
ASKED = [Message(role="user", content="a?")]


def ignore_note(line: str) -> None:
    """Ignore a progress note."""


class Upstream(ThreadingHTTPServer):
    """Streams `events` unchanged, and records the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Reply)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.shown: dict[str, Any] = {}
        self.models: list[dict[str, Any]] = [{"id": "vectors", "tasks": ["embed"]}, {"id": "talker"}]
        self.events = [
            b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n: ping\n\n',
            b'data: {"choices":[{"delta":{"reasoning_content":"Hm."}}]}\n\n',
            b'data: {"choices":[{"delta":{"content":"S\xc3\xad, "}}],"usage":null}\n\n',
            b'data: {"choices":[{"delta":{"content":"claro."}}]}\n\n',
            b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n',
            b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}\n\n',
            b"data: [DONE]\n\n",
        ]
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Reply(Quiet):
    protocol_version = "HTTP/1.1"
    server: Upstream

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["authorization"])
        self.whole(200 if self.path == "/v1/models" else 404, json.dumps({"data": self.server.models}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append(body)
        self.server.keys.append(self.headers["authorization"])
        if self.path == "/api/show":
            self.whole(200 if self.server.shown else 404, json.dumps(self.server.shown).encode())
            return
        if body["model"] == "nobody":
            self.whole(404, b'{"error":{"message":"no model nobody; known: talker"}}')
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in self.server.events:
            self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def whole(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    with serve_in_thread(server):
        yield server


class TestHere:
    def test_only_the_answer_is_on_standard_output(self) -> None:
        """The fake model repeats the question; statistics go to standard error."""
        result = runner.invoke(app, ["chat", "fake:", "what is this", "--stats"])
        assert result.exit_code == 0, result.output
        assert result.stdout == "what is this\n"
        assert "tokens" in result.stderr

    def test_a_question_that_is_piped_in(self) -> None:
        """Standard input is used alone or for -, without its last line end."""
        assert runner.invoke(app, ["chat", "fake:"], input="from a pipe\n").stdout == "from a pipe\n"
        assert runner.invoke(app, ["chat", "fake:", "and", "-"], input="a pipe\n").stdout == "and a pipe\n"

    def test_a_truncated_answer_is_reported(self) -> None:
        """A truncated answer is reported beside the answer."""
        result = runner.invoke(app, ["chat", "--model", "fake:", "one two three", "--max-tokens", "2"])
        assert result.stdout == "one two\n"
        assert "--max-tokens" in result.stderr

    def test_an_error_of_the_model_is_one_line(self) -> None:
        """Exit code 1."""
        result = runner.invoke(app, ["chat", "fake:", "reject-item"])
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.splitlines()[-1].startswith("error: ")

    def test_a_model_that_cannot_load(self, tmp_path: Path) -> None:
        """The model's error is printed."""
        result = runner.invoke(app, ["chat", f"file:{tmp_path}/nowhere", "a"])
        assert result.exit_code == 1
        assert result.stderr.splitlines()[-1].startswith("error: nowhere: ")

    def test_a_wrong_address(self) -> None:
        """The address parser's error is printed, with exit code 2."""
        result = runner.invoke(app, ["chat", "hff:a/b", "a"])
        assert result.exit_code == 2
        assert "did you mean hf:?" in result.stderr


class TestArguments:
    def test_a_model_is_required(self) -> None:
        """The default model only embeds, so a model must be named."""
        result = runner.invoke(app, ["chat"], input="a")
        assert result.exit_code == 2
        assert "name a model: shoal chat MODEL" in result.stderr

    def test_an_empty_question(self) -> None:
        """The error comes before anything is loaded."""
        for arguments, text in ((["chat", "fake:"], ""), (["chat", "fake:", " "], None)):
            result = runner.invoke(app, arguments, input=text)
            assert result.exit_code == 1
            assert "the question is empty" in result.stderr

    def test_arguments_that_are_not_utf_8_are_refused(self) -> None:
        """Arguments that are not UTF-8 reach Python as surrogates."""
        assert "not UTF-8 (byte 1)" in runner.invoke(app, ["chat", "fake:"], input=b"\xfc").stderr
        assert "not UTF-8" in runner.invoke(app, ["chat", "fake:", "\udcfc"]).stderr

    def test_a_conversation_needs_a_terminal_on_both_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Answers of several questions in one file could not be told apart."""
        from shoal.cli.chat import _read_question

        class Tty(io.StringIO):
            def isatty(self) -> bool:
                return True

        monkeypatch.setattr("sys.stdin", Tty())
        with pytest.raises(ConfigError, match="pipe it in"):
            _read_question([])
        monkeypatch.setattr("sys.stdout", Tty())
        assert _read_question([]) is None


class TestThere:
    def test_a_server_answers(self, upstream: Upstream) -> None:
        """The first generative model and the configured key are used; only the answer is printed."""
        arguments = ["chat", "--url", upstream.url, "ready?", "--system", "be brief", "--temperature", "0.5", "--stats"]
        result = runner.invoke(app, arguments, env={"SHOAL_API_KEY": "k1 bulk"})
        assert result.exit_code == 0, result.output
        assert result.stdout == "Sí, claro.\n"
        assert result.stderr.startswith("5 tokens")
        (body,) = upstream.requests
        assert body["model"] == "talker"
        assert body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ready?"}]
        assert (body["temperature"], body["stream"]) == (0.5, True)
        assert "max_tokens" not in body
        assert upstream.keys == ["Bearer k1"] * 2

    def test_a_model_and_the_key_of_an_upstream(self, upstream: Upstream) -> None:
        """/v1 at the end of the URL is optional."""
        arguments = ["chat", "--url", f"{upstream.url}/v1/", "--model", "m", "--max-tokens", "7", "a?"]
        result = runner.invoke(app, [*arguments, "--upstream-api-key", "other"], env={"SHOAL_API_KEY": "k1"})
        assert result.exit_code == 0, result.output
        assert (upstream.requests[0]["model"], upstream.requests[0]["max_tokens"]) == ("m", 7)
        assert upstream.keys == ["Bearer other"]

    def test_what_is_set_is_sent(self, upstream: Upstream) -> None:
        """Every parameter, the format of answers and the switch of reasoning; nothing that is not set."""
        sampling = Sampling(top_p=0.5, top_k=3, min_p=0.1, seed=7, stop=["."], repetition_penalty=1.5)
        guides = [Guide(kind="json_object"), Guide(kind="json_schema", value='{"type": "array"}')]
        for guide, think in zip([None, *guides], [None, False, True], strict=True):
            list(RemoteChat(upstream.url, "m").ask(ASKED, msgspec.structs.replace(sampling, guide=guide), think))
        first, second, third = upstream.requests
        assert {name: first[name] for name in ("top_p", "top_k", "min_p", "seed", "stop", "repetition_penalty")} == {
            **{"top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7},
            **{"stop": ["."], "repetition_penalty": 1.5},
        }
        assert not {"response_format", "chat_template_kwargs", "presence_penalty"} & first.keys()
        assert second["response_format"] == {"type": "json_object"}
        assert second["chat_template_kwargs"] == {"enable_thinking": False}
        assert third["response_format"]["json_schema"]["schema"] == {"type": "array"}
        assert third["chat_template_kwargs"] == {"enable_thinking": True}

    def test_what_a_server_says_of_its_model(self, upstream: Upstream) -> None:
        with pytest.raises(SetupError, match="does not describe its models"):
            RemoteChat(upstream.url, "m").describe()
        upstream.shown = {
            "license": "MIT",
            "template": "{{ x }}",
            "modelfile": "FROM m",
            "details": {"parameter_size": "1.5B", "quantization_level": "INT4", "family": "llama"},
            "model_info": {"general.architecture": "llama", "llama.context_length": 2048},
        }
        assert RemoteChat(upstream.url, "m").describe() == ModelDescription(
            {"architecture": "llama", "parameters": "1.5B", "context length": "2048", "precision": "INT4"},
            license="MIT",
            modelfile="FROM m",
            template="{{ x }}",
        )

    def test_reasoning_and_usage_are_chunks(self, upstream: Upstream) -> None:
        """The terminal dims reasoning, and /stats counts usage."""
        chunks = list(RemoteChat(upstream.url, "m").ask(ASKED, Sampling()))
        assert "".join(chunk.reasoning for chunk in chunks) == "Hm."
        usage = [chunk.usage for chunk in chunks if chunk.usage is not None]
        assert [(one.prompt_tokens, one.completion_tokens) for one in usage] == [(3, 5)]

    def test_a_server_without_models_that_chat(self, upstream: Upstream) -> None:
        """The error is one line that names the flag."""
        del upstream.models[1]
        result = runner.invoke(app, ["chat", "--url", upstream.url, "a"])
        assert result.exit_code == 1
        assert "has no model that can generate: name one with --model" in result.stderr

    def test_a_refusal_shows_the_server_s_reason(self, upstream: Upstream) -> None:
        """The error has status and message."""
        result = runner.invoke(app, ["chat", "--url", upstream.url, "--model", "nobody", "a"])
        assert (result.exit_code, result.stdout) == (1, "")
        assert "answered 404: no model nobody; known: talker" in result.stderr

    @pytest.mark.parametrize(
        ("event", "kind", "message"),
        [
            (b'data: {"error":{"message":"out of memory","type":"x"}}\n\n', EngineFailed, "^out of memory$"),
            (b'data: {"error":"out of memory"}\n\n', EngineFailed, "^out of memory$"),
            (b"data: nonsense\n\n", EngineFailed, "an invalid chat chunk"),
            (
                b'data: {"choices":[{"delta":{"content":"half"}}]}\n\n',
                TransportFailed,
                "ended its answer early: try again",
            ),
        ],
    )
    def test_errors_in_mid_stream(self, upstream: Upstream, event: bytes, kind: type[Exception], message: str) -> None:
        """Error events, invalid data and truncated streams are errors."""
        upstream.events[1:] = [event]
        with pytest.raises(kind, match=message):
            list(RemoteChat(upstream.url, "m").ask(ASKED, Sampling()))

    def test_a_stream_that_ends_without_done(self, upstream: Upstream) -> None:
        """A finish reason is enough."""
        del upstream.events[-1]
        assert list(RemoteChat(upstream.url, "m").ask(ASKED, Sampling()))[-1].usage is not None

    def test_text_before_an_error_is_printed(self, upstream: Upstream) -> None:
        """A line end follows it, so the error has its own line."""
        upstream.events[3:] = [b'data: {"error":{"message":"out of memory"}}\n\n']
        result = runner.invoke(app, ["chat", "--url", upstream.url, "--model", "m", "a"])
        assert (result.exit_code, result.stdout) == (1, "Sí, \n")
        assert "error: out of memory" in result.stderr

    def test_a_refused_connection_is_an_error(self) -> None:
        """The error names the next step."""
        result = runner.invoke(app, ["chat", "--url", "http://127.0.0.1:1", "a"])
        assert result.exit_code == 1
        assert "is a server running there?" in result.stderr

    def test_a_bad_url(self) -> None:
        """A usage error."""
        result = runner.invoke(app, ["chat", "--url", "localhost:8080", "a"])
        assert result.exit_code == 2
        assert "write http://host:port" in result.stderr


class ScriptedApp:
    """Replaces App: one model that says a word and then waits forever."""

    def __init__(self, *, tasks: tuple[str, ...] = ("generate",), state: str = "ready") -> None:
        details = {"parameters": 1234567, "chat_template": "{{ x }}"}
        facts = SimpleNamespace(tasks=tasks, source="hf:org/m", context_tokens=99, precision="", details=details)
        self.card = SimpleNamespace(name="m", state=state, error="no such file", facts=facts, note="")
        self.pending_sources: dict[str, str] = {}
        self.gateway = self
        self.loaded = asyncio.Event()
        self.loaded.set()
        self.stopped = threading.Event()
        self.closed = False
        self.sticks = False

    @asynccontextmanager
    async def opening(self) -> AsyncIterator[Any]:
        yield self
        self.closed = True
        if self.sticks:
            raise OSError("it does not close")

    async def wait_until_loaded(self) -> None:
        await self.loaded.wait()

    def models(self) -> list[Any]:
        return [self.card]

    def model(self, name: str) -> Any:
        return self.card

    def resolve(self, name: str) -> tuple[str, str]:
        return "m", "lora"

    async def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        assert (task.model, task.adapter, task.stream, ctx.remaining() > 60) == ("m", "lora", True, True)
        try:
            yield Chunk(text="a")
            await asyncio.Event().wait()
        finally:
            self.stopped.set()


class TestOpened:
    def test_closing_an_answer_stops_the_model(self) -> None:
        """The model's loop keeps running in its own thread until the context ends."""
        app = ScriptedApp()
        with open_local_chat(app.opening(), ignore_note) as here:
            chunks = here.ask(ASKED, Sampling())
            assert next(chunks).text == "a"
            chunks.close()
            assert app.stopped.wait(10)
            assert next(here.ask(ASKED, Sampling())).text == "a"
        assert app.closed
        assert "shoal-chat" not in {thread.name for thread in threading.enumerate()}

    def test_what_is_known_of_the_model(self) -> None:
        with open_local_chat(ScriptedApp().opening(), ignore_note) as here:
            assert here.describe() == ModelDescription(
                {"parameters": "1,234,567", "context length": "99"}, modelfile="FROM hf:org/m", template="{{ x }}"
            )

    @pytest.mark.parametrize(
        ("app", "message"),
        [
            (ScriptedApp(tasks=("embed",)), "m does not generate text: name a language model"),
            (ScriptedApp(state="failed"), "m: no such file"),
        ],
    )
    def test_a_model_that_cannot_chat(self, app: ScriptedApp, message: str) -> None:
        """The error comes at once, and everything is closed."""
        with pytest.raises(SetupError, match=message), open_local_chat(app.opening(), ignore_note):
            pytest.fail("it was opened")
        assert "shoal-chat" not in {thread.name for thread in threading.enumerate()}

    def test_ctrl_c_while_loading_cancels_the_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C during a long load cancels it and closes what was opened."""
        app = ScriptedApp()
        app.loaded.clear()

        def raise_interrupt(self: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr("shoal.cli._talking.Future.result", raise_interrupt)
        with pytest.raises(KeyboardInterrupt), open_local_chat(app.opening(), ignore_note):
            pytest.fail("it was opened")
        assert "shoal-chat" not in {thread.name for thread in threading.enumerate()}

    def test_each_reason_of_a_wait_is_printed_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Waiting for a server must not look like a hang."""
        monkeypatch.setattr("shoal.cli._talking.POLL_INTERVAL_S", 0.001)
        app = ScriptedApp()
        app.loaded.clear()
        app.card.note = "waiting for triton://h:1: it does not answer"
        app.pending_sources = {"triton://other:1": "nobody is there"}
        lines: list[str] = []

        def record_note(line: str) -> None:
            lines.append(line)
            if len(lines) == 2:
                app.loaded.set()

        with open_local_chat(app.opening(), record_note):
            pass
        assert lines == [
            "m is not ready yet: waiting for triton://h:1: it does not answer",
            "triton://other:1 is not ready yet: nobody is there",
        ]

    def test_a_failure_to_close_is_reported(self) -> None:
        """The failure is reported even after all answers."""
        app = ScriptedApp()
        app.sticks = True
        with pytest.raises(OSError, match="does not close"), open_local_chat(app.opening(), ignore_note):
            pass
