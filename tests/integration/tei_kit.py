"""The fake text-embeddings-inference server in its own process, and its record of requests."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.integration.llm_kit import free_port
from tests.integration.server_kit import PATIENCE_S, environment

ROOT = Path(__file__).resolve().parents[2]


class FakeProcess:
    """The server; flags are the fields of its Script. `grpc_port`: the port of the gRPC build, besides the one for the
    record of requests; 0 for the HTTP build."""

    def __init__(self, port: int, flags: tuple[str, ...], grpc_port: int = 0) -> None:
        self.port = port
        self.flags = flags
        self.grpc_port = grpc_port
        self.process: subprocess.Popen[str] | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.grpc_port or self.port}"

    @property
    def address(self) -> str:
        return f"tei+{'grpc' if self.grpc_port else 'http'}://{self.target}"

    def start(self) -> None:
        """Start on the previous port; return once it listens."""
        module = ["tests.fakes.tei_grpc", "--grpc-port", str(self.grpc_port)] if self.grpc_port else ["tests.fakes.tei"]
        command = [sys.executable, "-m", *module, "--port", str(self.port), *self.flags]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment())
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == str(self.port)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def report(self) -> dict[str, Any]:
        """Return the requests so far."""
        record: dict[str, Any] = json.loads(self._request("GET"))
        return record

    def runs(self, calls: int) -> bool:
        """Return whether this many calls are in flight."""
        return bool(self.report()["in_flight"] == calls)

    def change(self, **changes: Any) -> None:
        self._request("POST", changes)

    def _request(self, method: str, body: Any = None) -> bytes:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, "/control", data, {"content-type": "application/json"})
            reply = connection.getresponse()
            assert reply.status == 200
            return reply.read()
        finally:
            connection.close()


@contextmanager
def fake_process(*flags: str, grpc: bool = False) -> Iterator[FakeProcess]:
    server = FakeProcess(free_port(), flags, free_port() if grpc else 0)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def eventually(true: Callable[[], bool], condition: str) -> None:
    """Poll until `true()`; `condition` names it in the failure."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, f"timed out after {PATIENCE_S:g} s waiting for {condition}"
        time.sleep(0.02)
