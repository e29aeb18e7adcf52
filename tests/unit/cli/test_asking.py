"""How commands that call a server handle its answers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.cli._asking import ServerClient, first_key
from shoal.errors import ConfigError, SetupError, TransportFailed
from tests.unit.cli.servers import Quiet, serve_in_thread


class FakeServer(HTTPServer):
    """Answers every request with the given JSON and status."""

    def __init__(self, answer: Any, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Reply)
        self.answer = answer
        self.status = status
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Reply(Quiet):
    server: FakeServer

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers["content-length"] or 0))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(json.dumps(self.server.answer).encode())

    do_POST = do_GET


@contextmanager
def raw_server(words: bytes) -> Iterator[str]:
    """Yield a URL at which one connection is answered with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(words)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("command", [["embed", "a"], ["chat", "a"], ["ps"]])
def test_proxies_are_not_used_for_this_machine(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy's loopback address is another machine's, so local URLs bypass it."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    server = FakeServer({"data": []})
    with serve_in_thread(server):
        words = [*command, "--url", server.url]
        result = CliRunner().invoke(app, words, env={"http_proxy": "http://127.0.0.1:1"})
    assert "no response from" not in result.stderr
    assert command == ["ps"] or "has no model" in result.stderr


@pytest.mark.parametrize("command", [["embed", "a"], ["chat", "a"], ["ps"], ["load", "m"]])
def test_a_server_that_asks_for_a_key(command: list[str]) -> None:
    """The server's error names headers; the command says where it takes the key from."""
    server = FakeServer({"error": {"message": "No API key was sent."}}, 401)
    with serve_in_thread(server):
        result = CliRunner().invoke(app, [*command, "--url", server.url])
    assert result.exit_code == 1
    assert "answered 401: No API key was sent. (the key comes from SHOAL_API_KEY" in result.stderr


@pytest.mark.parametrize("answer", [["a list"], {"data": [{}]}, {"data": None}, {}])
def test_vectors_of_another_shape(answer: Any) -> None:
    """An answer that is no list of vectors is a one-line error."""
    server = FakeServer(answer)
    with serve_in_thread(server):
        result = CliRunner().invoke(app, ["embed", "--url", server.url, "--model", "m", "a"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and "is it a Shoal server?" in result.stderr


@pytest.mark.parametrize("words", [b"SSH-2.0-OpenSSH_9.6\r\n", b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"])
def test_servers_that_do_not_speak_http(words: bytes) -> None:
    """Nor to the end of its answer."""
    with raw_server(words) as url, pytest.raises(TransportFailed, match="no response from"):
        ServerClient(url).ask("/v1/models")


@pytest.mark.parametrize(
    ("listed", "first"),
    [
        ([{"id": "talker", "tasks": ["generate"]}, {"id": "vectors", "tasks": ["embed"]}], "vectors"),
        ([{"id": "unsaid"}, {"id": "vectors", "tasks": ["embed"]}], "unsaid"),
        ([{"id": "talker", "tasks": ["generate"]}], None),
        ([None], None),
        (None, None),
    ],
)
def test_the_first_model_that_can(listed: Any, first: str | None) -> None:
    """A model without known tasks counts as able."""
    server = FakeServer({"data": listed})
    with serve_in_thread(server):
        if first is not None:
            assert ServerClient(server.url).first_model("embed") == first
            return
        with pytest.raises(SetupError, match="has no model that can embed"):
            ServerClient(server.url).first_model("embed")


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://box", "http://", "http://[::1"])
def test_invalid_urls(url: str) -> None:
    """The error names the flag."""
    with pytest.raises(ConfigError, match="write http://host:port"):
        ServerClient(url)


@pytest.mark.parametrize(
    ("url", "key"), [("http://127.0.0.1:1/ü", None), ("http://a..b:1", None), ("http://127.0.0.1:1", "a\nb")]
)
def test_characters_that_http_cannot_carry(url: str, key: str | None) -> None:
    """One line, and no traceback."""
    with pytest.raises(ConfigError, match="cannot be reached: check --url and the key"):
        ServerClient(url, key).ask("/models")


def test_the_first_key_without_its_class() -> None:
    assert (first_key("one bulk", "two"), first_key()) == ("one", None)
