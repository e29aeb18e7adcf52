"""Shoal in front of a real Triton: servers for a module, a local hub, and clients that send continuously."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from shoal.types import Array
from tests.integration.server_kit import LISTENING, Server, environment, wait_until
from tests.integration.triton_kit import Triton
from tests.integration.triton_models import MODELS
from tests.unit.models.checkpoints import checkpoint, write_json

COMMIT = "7a5e" * 10
TINY, OTHER = "org/tiny", "org/other"
"""Random models of the local hub; both have 16 dimensions, `other` is of another kind and has other vectors."""

PROMPTS = {"query": "to fish: ", "document": "fish: "}
SLOW_MACHINE_S = 60.0

Reply: TypeAlias = tuple[int, dict[str, str], Any]


def ask(server: Server, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
    """Return (status, headers in lower case, JSON or text). Raises OSError if the server is gone."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=SLOW_MACHINE_S)
    try:
        sent = {} if body is None else {"content-type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), sent | dict(headers or {}))
        reply = connection.getresponse()
        content = reply.read()
        reply_headers = {name.lower(): value for name, value in reply.getheaders()}
        isjson = reply_headers.get("content-type", "").startswith("application/json")
        return reply.status, reply_headers, json.loads(content) if isjson else content.decode()
    finally:
        connection.close()


def embeddings(server: Server, model: str, texts: Any, **more: Any) -> Reply:
    """POST /v1/embeddings. Names in `more` with a dash are headers, the others fields of the body."""
    headers = {name: str(more.pop(name)) for name in list(more) if "-" in name}
    return ask(server, "POST", "/v1/embeddings", {"model": model, "input": texts, **more}, headers)


def vectors(server: Server, model: str, texts: Any, **more: Any) -> Array:
    """Return the rows [n, dimension] of a successful answer."""
    status, _, answer = embeddings(server, model, texts, **more)
    assert status == 200, answer
    return np.array([each["embedding"] for each in answer["data"]], np.float32)


def cosines(one: Array, other: Array) -> Array:
    """Return the cosine of each pair of rows."""
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return np.asarray(np.einsum("ij,ij->i", one, other) / norms)


def status_of(server: Server, name: str) -> str:
    """Return a model's status in GET /models; "" if it is not listed."""
    _, _, answer = ask(server, "GET", "/models")
    return next((str(each["status"]["value"]) for each in answer["data"] if each["id"] == name), "")


def until(true: Callable[[], object], patience_s: float = SLOW_MACHINE_S, *, what: str = "it") -> None:
    end = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.02)


def logged(server: Server) -> str:
    return server.log.read_text()


def command(server: Server, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `shoal ARGUMENTS` in its own process."""
    env = environment(environ)
    line = [sys.executable, "-m", "shoal", *arguments]
    return subprocess.run(line, env=env, capture_output=True, text=True, cwd=server.log.parent, check=False)


@contextlib.contextmanager
def serving(
    folder: Path,
    addresses: Sequence[str],
    *flags: str,
    env: Mapping[str, str] | None = None,
    config: str = "",
    ready: bool = True,
) -> Iterator[Server]:
    """Start `shoal serve` with `config` as its shoal.toml; wait until it is ready, or only listens."""
    folder.mkdir(parents=True, exist_ok=True)
    if config:
        (folder / "shoal.toml").write_text(config)
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal", "serve", *addresses, "--port", "0", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            env=environment(env),
            cwd=folder,
        )
    try:
        wait_until(lambda: bool(LISTENING.search(log.read_text())), process, log)
        match = LISTENING.search(log.read_text())
        assert match
        server = Server(process, int(match[1]), log)
        if ready:
            _wait_until_ready(server, addresses)
        assert process.poll() is None, log.read_text()
        yield server
    finally:
        process.terminate()
        try:
            process.wait(SLOW_MACHINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def _wait_until_ready(server: Server, addresses: Sequence[str]) -> None:
    """Raises AssertionError with the state of each model and the log after a minute."""
    try:
        until(lambda: server.ready() or server.process.poll() is not None, what=f"readiness of {addresses}")
    except AssertionError as error:
        states = {each["id"]: each["status"] for each in ask(server, "GET", "/models")[2]["data"]}
        raise AssertionError(f"{error}: {states}\n{logged(server)}") from None


def add_model(triton: Triton, name: str, like: str, changes: Mapping[str, str] | None = None) -> None:
    """Copy a test model into the repository, with changes to its configuration text."""
    folder = triton.repository / name
    if folder.exists():
        return
    shutil.copytree(triton.repository / like / "1", folder / "1", ignore=shutil.ignore_patterns("__pycache__"))
    text = MODELS[like].config(name, triton.notes)
    for old, new in (changes or {}).items():
        assert old in text
        text = text.replace(old, new)
    (folder / "config.pbtxt").write_text(text)


class Traffic:
    """Clients that send until the block ends, each on its own connection, and pause for 20 ms after each reply: without
    pauses, they would take the processor time that the server needs.

    `answers` counts the good ones; `failures` has a line for each other answer, and for each that differs from the
    first.
    """

    def __init__(self, server: Server, model: str, *, clients: int = 4, text: str = "the same text") -> None:
        self._server = server
        self._body = {"model": model, "input": text}
        self._expected = vectors(server, model, text)[0]
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]
        self.answers = 0
        self.failures: list[str] = []
        self.longest_s = 0.0

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(SLOW_MACHINE_S)
            assert not thread.is_alive(), "a request hangs"

    def more(self, count: int = 20) -> None:
        """Wait until that many more requests are answered."""
        target = self.answers + count
        until(lambda: self.answers >= target, what="traffic")

    def _run(self) -> None:
        connection = HTTPConnection("127.0.0.1", self._server.port, timeout=SLOW_MACHINE_S)
        while not self._stop.wait(0.02):
            start = time.monotonic()
            try:
                self._ask(connection)
            except (OSError, HTTPException) as error:
                self.failures.append(repr(error))
                connection.close()
            self.longest_s = max(self.longest_s, time.monotonic() - start)
        connection.close()

    def _ask(self, connection: HTTPConnection) -> None:
        connection.request("POST", "/v1/embeddings", json.dumps(self._body), {"content-type": "application/json"})
        reply = connection.getresponse()
        content = reply.read()
        if reply.status != 200:
            self.failures.append(f"{reply.status} {content.decode()[:300]}")
            return
        vector = np.array(json.loads(content)["data"][0]["embedding"], np.float32)
        if cosines(vector[None], self._expected[None])[0] < 0.9999:
            self.failures.append("another vector")
            return
        self.answers += 1


def tiny_files(folder: Path, kind: str) -> dict[str, bytes]:
    model = checkpoint(folder, kind)
    write_json(model / "config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": None})
    return {str(path.relative_to(model)): path.read_bytes() for path in model.rglob("*") if path.is_file()}


@contextlib.contextmanager
def hub_of(folder: Path) -> Iterator[str]:
    """Return the address of a hub with TINY and OTHER, for HF_ENDPOINT."""
    with hub_with(
        {TINY: tiny_files(folder / "tiny", "bert"), OTHER: tiny_files(folder / "other", "distilbert")}
    ) as url:
        yield url


@contextlib.contextmanager
def hub_with(models: Mapping[str, Mapping[str, bytes]]) -> Iterator[str]:
    """Return the address of a hub with these models, each with its files by name."""

    class Routes(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, *, body: bool) -> None:
            content = _route(models, self.path.partition("?")[0])
            self.send_response(404 if content is None else 200)
            if content is None and self.path.startswith("/api/models/"):
                self.send_header("x-error-code", "RepoNotFound")
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content or b"")))
            self.send_header("etag", f'"{hashlib.sha1(content or b"").hexdigest()}"')
            self.send_header("x-repo-commit", COMMIT)
            self.end_headers()
            if body:
                self.wfile.write(content or b"")

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Routes) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _route(models: Mapping[str, Mapping[str, bytes]], path: str) -> bytes | None:
    for name, files in models.items():
        if path.startswith(f"/api/models/{name}"):
            listing = {"id": name, "modelId": name, "sha": COMMIT, "siblings": _siblings(files)}
            return json.dumps(listing).encode()
        if path.startswith(f"/{name}/resolve/{COMMIT}/"):
            return files.get(path.removeprefix(f"/{name}/resolve/{COMMIT}/"))
    return None


def _siblings(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Return files as a hub lists them: weights with their hash."""
    listed: list[dict[str, Any]] = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
    for each in listed:
        if each["rfilename"].endswith(".safetensors"):
            content = files[each["rfilename"]]
            each["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return listed
