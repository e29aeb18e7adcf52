"""Real Tritons for tests, started by Shoal's own code; downloaded once per machine, to the user's folder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from shoal.backends.triton.run_state import process_start
from shoal.backends.triton.server import TritonOptions, TritonServer, run_triton
from tests.integration.triton_models import write_models

PATIENCE_S = 600.0
"""The first start on a machine downloads 55 MB and creates a virtual environment."""

NOTICED_S = 3.0
"""After this time every Shoal has looked at its models again, which it does every two seconds."""

_LOG_LINES = 40
_CRASHED, _NOTE = "Signal (", "shoal: tritonserver "
"""What the server logs before it dies, and the supervisor after."""

# Read now: tests themselves run without Shoal's settings.
_STABLE = Path(os.environ.get("SHOAL_HOME") or "~/.cache/shoal").expanduser() / "triton"


@dataclass(slots=True)
class Triton:
    """A running Triton with the models of `triton_models` in its repository, none of them loaded.

    `notes`: the file that its models write to. `loaded`: what tests have loaded, in order. `restarts`: how many
    `recover` has seen. Methods block: in an async test use `asyncio.to_thread`.
    """

    server: TritonServer
    home: Path
    notes: Path
    loaded: dict[str, None] = field(default_factory=dict)
    restarts: int = 0

    @property
    def url(self) -> str:
        """host:port of its gRPC endpoint."""
        return self.server.url

    @property
    def repository(self) -> Path:
        return self.server.repository

    @property
    def pid(self) -> int:
        assert self.server.pid is not None, "it is between two processes"
        return self.server.pid

    def http(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return (status, JSON or None) of its HTTP endpoint, which shares no code with Shoal's client."""
        host, _, port = self.server.http_url.partition(":")
        connection = HTTPConnection(host, int(port), timeout=60)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            reply = connection.getresponse()
            content = reply.read()
            return reply.status, json.loads(content) if content else None
        finally:
            connection.close()

    def load(self, *names: str) -> None:
        """Load models; those already loaded cost nothing."""
        for name in names:
            status, answer = self.http("POST", f"/v2/repository/models/{name}/load")
            assert status == 200, answer
            self.loaded[name] = None

    def unload(self, *names: str) -> None:
        """Unload models and wait until Triton confirms it."""
        for name in names:
            self.loaded.pop(name, None)
            assert self.http("POST", f"/v2/repository/models/{name}/unload")[0] == 200
            while self.state(name) not in ("", "UNAVAILABLE"):
                time.sleep(0.01)

    def state(self, name: str) -> str:
        """Return a model's state in the repository index; "" if it was never loaded or is absent."""
        _, index = self.http("POST", "/v2/repository/index")
        return next((entry.get("state", "") for entry in index if entry["name"] == name), "")

    def infer(self, name: str, *texts: str) -> tuple[int, Any]:
        """Return (status, answer) for texts, one per row."""
        tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts), 1], "data": texts}
        return self.http("POST", f"/v2/models/{name}/infer", {"inputs": [tensor]})

    def recover(self) -> None:
        """If the server has died, print the end of its log, wait for its successor and load the same models there."""
        server = self.server
        pid, logged = server.pid, server.log.read_text()
        if pid is not None and process_start(pid) is not None and server.restarts == self.restarts:
            if _CRASHED not in logged.rpartition(_NOTE)[2]:
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # its signal handler, which allocates memory, may wait forever
        end = time.monotonic() + PATIENCE_S
        while server.phase != "failed" and (server.phase != "ready" or server.restarts == self.restarts):
            assert time.monotonic() < end, f"Triton did not come back: see {server.log}"
            time.sleep(0.05)
        self.restarts = server.restarts
        before, note, after = server.log.read_text().rpartition(_NOTE)
        lines = [*before.splitlines()[-_LOG_LINES:], note + after.partition("\n")[0]]
        sys.stdout.write("\n".join(["WARNING: Triton died in this test. The end of its log:", *lines, ""]))
        assert server.phase == "ready", "Triton died too often"
        self.load(*self.loaded)
        time.sleep(NOTICED_S)

    def noted(self) -> list[str]:
        """Return the lines that models have written so far."""
        return self.notes.read_text().splitlines() if self.notes.exists() else []


OwnTriton: TypeAlias = Callable[..., Triton]


def triton_home(folder: Path) -> Path:
    """Return a home for Shoal in `folder` with its own servers and repository, and the machine's tritonserver."""
    root = folder / "triton"
    root.mkdir(parents=True)
    for name in ("distributions", "environments"):
        (_STABLE / name).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(_STABLE / name)
    return folder


@contextlib.contextmanager
def running_triton(folder: Path, **options: Any) -> Iterator[Triton]:
    """Start a Triton on free ports, supervised by an event loop in its own thread; stop it at the end. Its ports are
    open, for `Triton.http`; users get `open_ports=False`."""
    home = triton_home(folder)
    repository, notes = folder / "models", folder / "notes"
    write_models(repository, notes)
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    settings = TritonOptions(**{"home": home, "repository": repository, "open_ports": True, **ports, **options})
    ready, stop = threading.Event(), threading.Event()
    outcomes: list[TritonServer | BaseException] = []

    async def run() -> None:
        async with run_triton(settings) as server:
            outcomes.append(server)
            ready.set()
            await asyncio.to_thread(stop.wait)

    def work() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # passed to the test, which runs in another thread
            outcomes.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=work, name="triton")
    thread.start()
    try:
        assert ready.wait(PATIENCE_S), "Triton did not come up"
        if isinstance(outcomes[0], BaseException):
            raise outcomes[0]
        yield Triton(outcomes[0], home, notes)
    finally:
        stop.set()
        thread.join(PATIENCE_S)
    if len(outcomes) > 1 and isinstance(outcomes[1], BaseException):
        raise outcomes[1]


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """One Triton for all tests: load the models that you need, and leave them loaded or not. Never kill this one;
    `triton_recovers` is for its own crashes."""
    with running_triton(tmp_path_factory.mktemp("triton")) as started:
        yield started


@pytest.fixture
def own_triton(tmp_path: Path) -> Iterator[OwnTriton]:
    """`own_triton(**options)` starts a Triton for this test only, which may kill or break it."""
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> Triton:
            folder = tmp_path / f"triton-{len(list(tmp_path.iterdir()))}"
            return stack.enter_context(running_triton(folder, **options))

        yield start
