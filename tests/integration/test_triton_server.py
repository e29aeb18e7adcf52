"""A real tritonserver, run by Shoal: the command line, and process crashes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
import uvloop

from shoal.backends.triton.run_state import process_start
from shoal.backends.triton.server import TritonOptions, run_triton
from shoal.errors import SetupError
from tests.integration.server_kit import environment
from tests.integration.triton_kit import PATIENCE_S, OwnTriton, Triton, triton_home
from tests.integration.triton_models import MODELS, write_models

pytestmark = pytest.mark.timeout(PATIENCE_S)

FREE = ("--grpc-port", "0")
OPEN = (*FREE, "--open-ports", "--http-port", "0", "--metrics-port", "0")


class Command:
    """`shoal triton` as a user runs it, with its own home."""

    def __init__(self, folder: Path) -> None:
        self.home = triton_home(folder / "home")
        self.repository = folder / "models"
        write_models(self.repository, folder / "notes")
        self.env = environment({"SHOAL_HOME": str(self.home)})

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "shoal", "triton", *arguments]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, cwd=self.home, check=False)

    def up(self, *arguments: str) -> dict[str, Any]:
        """Start one on free ports; return what `status` prints."""
        before = {facts["grpc"] for facts in self.status()}
        result = self("up", "--repository", str(self.repository), *(arguments or FREE))
        assert result.returncode == 0, result.stderr
        [new] = [facts for facts in self.status() if facts["grpc"] not in before]
        assert f"triton://{new['grpc'].removeprefix('unix:')}" in result.stdout
        return new

    def status(self) -> list[dict[str, Any]]:
        return list(json.loads(self("status", "--json").stdout))


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path)
    yield command
    for facts in command.status():
        command("down", "--grpc-port", str(facts["number"]))


def until(true: Callable[[], bool], condition: str, patience_s: float = 30.0) -> None:
    """Poll until `true()`; `condition` names it in the failure."""
    end = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < end, f"timed out after {patience_s:g} s waiting for {condition}"
        time.sleep(0.02)


def left_in_shared_memory(port: int | str) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"shoal_triton_{port}_*")]


def test_every_test_model_answers(triton: Triton) -> None:
    """The session's Triton is ready, knows its backends, and loads each model of the kit."""
    assert "python" in triton.server.platforms
    assert triton.server.phase == "ready"
    assert triton.server.version == "2.51.0" or triton.server.python is None
    triton.load(*MODELS)
    status, answer = triton.infer("near_free", "a", "b")
    assert status == 200
    assert answer["outputs"][0]["shape"] == [2, 1024]
    assert triton.infer("failing", "poison")[0] == 500
    assert triton.infer("slow", "1")[0] == 200
    assert "slow finished" in triton.noted()
    triton.unload("big")
    assert triton.state("big") == "UNAVAILABLE"


def test_up_status_logs_down(command: Command) -> None:
    """The four commands in a row: the server outlives `up`, appears in `status`, shows its log, and is gone after
    `down`."""
    facts = command.up()
    port = facts["number"]
    assert facts["phase"] == "ready"
    assert facts["owner"] == "shoal triton up"
    assert facts["repository"] == str(command.repository)
    assert process_start(facts["pid"]) is not None
    assert "ready" in command("status").stdout
    assert "Started GRPCInferenceService" in command("logs", "-n", "200").stdout
    result = command("down")
    assert result.returncode == 0
    assert result.stdout == f"Triton on port {port} is stopped\n"
    assert process_start(facts["pid"]) is None
    # The supervisor exits after it has released the folder.
    until(lambda: process_start(facts["supervisor"]) is None, "the end of the supervisor")
    assert left_in_shared_memory(port) == []
    after = command("status")
    assert after.returncode == 1
    assert "no Triton started by Shoal is running" in after.stdout
    assert "no Triton" in command("down").stderr


def test_up_twice_is_up_once(command: Command) -> None:
    """With the same ports and repository, it reports the running one; another repository is an error."""
    first = command.up()
    port = f"--grpc-port={first['number']}"
    again = command("up", f"--repository={command.repository}", port)
    assert again.returncode == 0
    assert "is already running" in again.stdout
    assert [facts["pid"] for facts in command.status()] == [first["pid"]]
    other = command("up", f"--repository={command.home / 'other'}", port)
    assert other.returncode == 1
    assert "shoal triton down" in other.stderr


def test_two_side_by_side(command: Command) -> None:
    """Each on its own ports; `down` and `logs` ask which one is meant, and stopping one leaves the other."""
    first, second = command.up(), command.up()
    assert {facts["phase"] for facts in command.status()} == {"ready"}
    result = command("down")
    assert result.returncode == 1
    assert "--grpc-port" in result.stderr
    command("down", "--grpc-port", str(first["number"]))
    assert [facts["pid"] for facts in command.status()] == [second["pid"]]


def test_a_port_in_use_is_named(command: Command) -> None:
    """The error names the flag that chooses another; exit code 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = command("up", "--open-ports", "--http-port", "0", "--grpc-port", "0", "--metrics-port", str(port))
    assert result.returncode == 1
    assert f"port {port} on 127.0.0.1 cannot be used" in result.stderr
    assert "--metrics-port" in result.stderr
    assert command.status() == []


def test_a_killed_supervisor_takes_its_server_along(command: Command) -> None:
    """No process is left; `status` reports the stale state, and `down` clears it."""
    facts = command.up()
    os.kill(facts["supervisor"], signal.SIGKILL)
    until(lambda: process_start(facts["pid"]) is None, "the end of Triton")
    [stale] = command.status()
    assert stale["phase"] == "stale"
    assert stale["pid"] is None
    assert "had already ended" in command("down").stdout
    assert command.status() == []


def test_a_recycled_process_id_is_left_alone(command: Command) -> None:
    """If another program now has the supervisor's process id, `down` stops nothing."""
    facts = command.up()
    os.kill(facts["supervisor"], signal.SIGKILL)
    until(lambda: process_start(facts["pid"]) is None, "the end of Triton")
    file = command.home / "triton" / "run" / str(facts["number"]) / "state.json"
    state = json.loads(file.read_text())
    with subprocess.Popen(["sleep", "60"]) as bystander:
        state["supervisor"]["pid"] = state["server"]["pid"] = bystander.pid
        file.write_text(json.dumps(state))
        command("down")
        assert bystander.poll() is None
        bystander.kill()


def test_foreground_ends_with_ctrl_c(command: Command) -> None:
    """`up --foreground` prints its address, and one SIGINT stops both it and the server."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal", "triton", "up", "--foreground", f"--repository={command.repository}", *FREE],
        env=command.env,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert f"is ready at triton://{command.home}" in process.stdout.readline()
    [facts] = command.status()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    process.stdout.close()
    assert process_start(facts["pid"]) is None
    assert command.status() == []


def test_logs_follow(command: Command) -> None:
    """`logs -f` shows lines written after it started."""
    facts = command.up()
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal", "triton", "logs", "-f", "-n", "0"],
        env=command.env,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda out: lines.extend(iter(out.readline, "")), args=(process.stdout,))
    reader.start()

    def follows() -> bool:
        with Path(facts["log"]).open("a") as file:
            file.write("a new line\n")
        return "a new line\n" in lines

    until(follows, "the new line in the followed log")
    process.kill()
    process.wait()
    reader.join()
    process.stdout.close()


def test_a_killed_server_is_started_again(own_triton: OwnTriton) -> None:
    """kill -9 during a request: a new process listens at the same address, the log has the reason, and nothing of the
    old one is left: neither the process of a model, though it is busy, nor shared memory."""
    triton = own_triton(backoff_s=0.1)
    triton.load("slow")
    before, port = triton.pid, triton.url.partition(":")[2]
    old = left_in_shared_memory(port)
    stubs = children(before)
    assert old
    assert stubs
    with ThreadPoolExecutor(1) as caller:
        request = caller.submit(triton.infer, "slow", "60000")
        until(lambda: "slow began" in triton.noted(), "the start of the slow call")
        os.kill(before, signal.SIGKILL)
        with pytest.raises((OSError, HTTPException)):
            request.result(30)
    until(lambda: triton.server.restarts == 1 and triton.server.phase == "ready", "the restart of Triton")
    assert triton.pid != before
    until(lambda: not any(process_start(stub) for stub in stubs), "the end of the stub processes")
    assert not set(old) & set(left_in_shared_memory(port))
    triton.load("near_free")
    assert triton.infer("near_free", "again")[0] == 200
    assert "was ended by SIGKILL; restarting in" in triton.server.log.read_text()


def test_a_server_that_keeps_dying_is_given_up(own_triton: OwnTriton) -> None:
    """After the maximum number of consecutive crashes the phase is "failed"; closing it is still clean."""
    triton = own_triton(backoff_s=0.05, restarts=1)
    os.kill(triton.pid, signal.SIGKILL)
    until(lambda: triton.server.restarts == 1 and triton.server.phase == "ready", "the restart of Triton")
    os.kill(triton.pid, signal.SIGKILL)
    until(lambda: triton.server.phase == "failed", "the failure of Triton")
    assert triton.server.pid is None


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_server_that_cannot_start_shows_its_log(own_triton: OwnTriton) -> None:
    """A model to load at the start is missing: the error contains the end of the log."""
    with pytest.raises(SetupError, match="before it was ready") as caught:
        own_triton(load=("no-such-model",))
    assert "no-such-model" in caught.value.message


async def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    """Cancelling the start ends the process and releases the port's folder."""
    home = triton_home(tmp_path / "home")
    options = TritonOptions(home=home, http_port=0, grpc_port=0, metrics_port=0)

    async def start() -> None:
        async with run_triton(options):
            pytest.fail("it was cancelled before it was ready")

    task = asyncio.create_task(start())
    states = home / "triton" / "run"
    await asyncio.to_thread(until, lambda: bool(list(states.glob("*/log"))), "the log of Triton")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(states.glob("*/state.json")) == []


def test_on_the_event_loop_of_a_server(tmp_path: Path) -> None:
    """On uvloop, as `shoal serve --triton` runs it: started, called and stopped without blocking the loop."""
    options = TritonOptions(home=triton_home(tmp_path / "home"), http_port=0, grpc_port=0, metrics_port=0)

    async def run() -> int | None:
        async with run_triton(options) as server:
            assert "Started GRPCInferenceService" in await server.log_tail(100)
            assert server.repository == tmp_path / "home" / "triton" / "repository"
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            await asyncio.to_thread(until, lambda: server.restarts == 1 and server.phase == "ready", "the restart")
            return server.pid

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pid = runner.run(run())
    assert pid is not None
    assert process_start(pid) is None


def test_a_tritonserver_on_path_is_taken(
    triton: Triton, tmp_path: Path, own_triton: OwnTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the backends beside it, and without Shoal's Python: it is the machine's own."""
    binary = Path(json.loads(state_of(triton))["binary"])
    monkeypatch.setenv("PATH", f"{binary.parent}{os.pathsep}{os.environ['PATH']}")
    found = own_triton()
    assert found.server.python is None
    assert "python" in found.server.platforms
    assert found.http("GET", "/v2")[1]["name"] == "triton"


def state_of(triton: Triton) -> str:
    return (triton.server.log.parent / "state.json").read_text()
