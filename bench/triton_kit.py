"""What the Triton benchmarks stand on: a repository with a model that costs nothing, and who talks to its server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import HERE, home
from peers.processes import tree_cpu_s

from shoal.backends.triton.server import TritonOptions, TritonServer

CONFIG = """
name: "near_free"
backend: "python"
max_batch_size: 256
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "embedding" data_type: TYPE_FP32 dims: [ 1024 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""


@contextmanager
def model_repository() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        entry = Path(folder) / "near_free"
        (entry / "1").mkdir(parents=True)
        shutil.copyfile(HERE / "near_free.py", entry / "1" / "model.py")
        (entry / "config.pbtxt").write_text(CONFIG)
        yield Path(folder)


def open_options(repository: Path, load: Sequence[str]) -> TritonOptions:
    """Options of a server on free ports, which clients of these benchmarks and peers reach."""
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    return TritonOptions(home=home(), repository=repository, load=tuple(load), open_ports=True, **ports)


class Triton:
    """What the benchmark asks of the server behind all contenders."""

    def __init__(self, server: TritonServer) -> None:
        self.url = server.url
        self.version = server.version
        self.platforms = server.platforms
        self._http = f"http://{server.http_url}/v2"
        assert server.pid is not None, "it has just started"
        self._pid = server.pid

    def cpu_s(self) -> float:
        """Of tritonserver and the processes of its models."""
        return tree_cpu_s(self._pid)

    def counts(self, model: str) -> tuple[int, int, float]:
        """Texts, executions, and seconds of computing so far.

        By `batch_stats`, whose times are those of executions: `inference_stats` counts an execution once for every
        call that Triton merged into it.
        """
        with urllib.request.urlopen(f"{self._http}/models/{model}/stats", timeout=10) as reply:
            stats = json.load(reply)["model_stats"][0]
        ns = sum(
            size[part]["ns"]
            for size in stats["batch_stats"]
            for part in ("compute_input", "compute_infer", "compute_output")
        )
        return stats["inference_count"], stats["execution_count"], ns / 1e9


class Direct:
    """The `grpc.aio` client, a process that is told what to do by lines of JSON."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "direct_grpc.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, **job: object) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the grpc.aio client ended; see its messages above")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self.process.stdin.close() if self.process.stdin else None
        self.process.wait(30)
