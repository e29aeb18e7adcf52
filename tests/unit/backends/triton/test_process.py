"""A server's command line, its ports, and its end."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import parent_process
from shoal.backends.base.child_process import ChildProcess
from shoal.backends.triton import process
from shoal.backends.triton.distribution import Distribution
from shoal.backends.triton.process import Command, Ports, describe_exit, end_process, new_shm_prefix, spawn, wait_ready
from shoal.errors import SetupError
from tests.fakes.triton import FakeTriton


def distribution(folder: Path, *backends: str) -> Distribution:
    for name in backends:
        (folder / "backends" / name).mkdir(parents=True)
        (folder / "backends" / name / f"libtriton_{name}.so").touch()
    return Distribution(Path("/bin/tritonserver"), folder / "backends", folder / "caches")


def test_free_ports_are_three_different_ones() -> None:
    """Zeros are replaced, configured ports stay."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    ports = Ports(0, port, 0).choose_free()
    assert ports.grpc == port
    assert 0 not in (ports.http, ports.metrics)
    assert len({ports.http, ports.grpc, ports.metrics}) == 3


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port", "--metrics-port"])
def test_a_port_in_use_is_named_with_its_flag(flag: str) -> None:
    """The error also has the next step."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        numbers = {"--http-port": (port, 0, 0), "--grpc-port": (0, port, 0), "--metrics-port": (0, 0, port)}[flag]
        with pytest.raises(SetupError, match=rf"port {port} on 127\.0\.0\.1 .*{flag}"):
            Ports(*numbers).choose_free()


def test_a_number_is_no_port_in_use() -> None:
    """It may equal a used port; 0 becomes a free one."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert Ports(8000, port, 8002).only_number() == Ports(0, port, 0)
    found = Ports(0, 0, 0).only_number()
    assert found.grpc
    assert found == Ports(0, found.grpc, 0)


def test_without_open_ports_it_listens_on_its_socket_alone(tmp_path: Path) -> None:
    """No HTTP, no metrics, and no network address."""
    there = distribution(tmp_path)
    command = Command(there, None, Path("/models"), Ports(0, 8001, 0), 5.0, (), "/run/8001/grpc:8001").arguments(
        "mine_"
    )
    assert [argument for argument in command if "http" in argument or "grpc" in argument or "metrics" in argument] == [
        "--allow-http=false",
        "--allow-metrics=false",
        "--grpc-address=unix:/run/8001/grpc",
        "--grpc-port=8001",
    ]
    assert "127.0.0.1" not in " ".join(command)


def test_the_command_line(tmp_path: Path) -> None:
    """Explicit model control, its own shared memory prefix, a short exit timeout; open ports only on the loopback."""
    there = distribution(tmp_path, "python")
    command = Command(there, None, Path("/models"), Ports(1, 2, 3), 5.0, ("one", "two")).arguments("mine_")
    assert command == [
        "/bin/tritonserver",
        "--model-repository=/models",
        "--model-control-mode=explicit",
        f"--backend-directory={tmp_path}/backends",
        f"--cache-directory={tmp_path}/caches",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        "--metrics-address=127.0.0.1",
        "--http-port=1",
        "--grpc-port=2",
        "--metrics-port=3",
        "--exit-timeout-secs=5",
        "--backend-config=python,shm-region-prefix-name=mine_",
        "--backend-config=python,shm-default-byte-size=4194304",
        "--load-model=one",
        "--load-model=two",
    ]


def test_without_the_python_backend_it_gets_no_options(tmp_path: Path) -> None:
    """A timeout below a second is rounded up: 0 would not wait at all."""
    there = distribution(tmp_path, "onnxruntime")
    command = Command(there, None, Path("/models"), Ports(1, 2, 3), 0.1).arguments("mine_")
    assert not [argument for argument in command if argument.startswith("--backend-config")]
    assert "--exit-timeout-secs=1" in command


def test_shared_memory_prefixes_differ() -> None:
    """Also between two starts of one server."""
    assert new_shm_prefix(8001) != new_shm_prefix(8001)


@pytest.mark.parametrize(("code", "words"), [(1, "ended with exit code 1"), (-9, "was ended by SIGKILL")])
def test_how_it_ended(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_a_program_whose_parent_is_gone_already_does_not_run() -> None:
    """It is not started for nobody."""
    command = [sys.executable, "-I", "-S", parent_process.__file__, "1", "/bin/echo", "it ran"]
    late = subprocess.run(command, capture_output=True, check=False)
    assert late.returncode == 1
    assert late.stdout == b""


def sleeping(seconds: float) -> ChildProcess:
    return spawn(["/bin/sleep", str(seconds)], None, os.open(os.devnull, os.O_WRONLY))


async def test_it_waits_through_what_is_not_ready_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """First unreachable, then not ready, then ready with its version."""
    monkeypatch.setattr(process, "_POLL_S", 0.001)
    fake = FakeTriton(ready=False)
    async with fake:  # chooses its port
        pass
    running = sleeping(60)
    waiting = asyncio.create_task(wait_ready(running, fake.target))
    await asyncio.sleep(0)
    async with fake:
        await fake.wait_for_calls("ServerReady", 2)
        assert not waiting.done()
        fake.ready = True
        assert await waiting == "2.51.0"
        await end_process(running, 5)
        assert running.returncode == -15
        assert await wait_ready(running, fake.target) is None, "what has ended is never ready"


async def test_it_waits_for_ports_that_are_opened_later() -> None:
    """gRPC responds before HTTP and metrics listen."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    running = sleeping(60)
    async with FakeTriton() as fake:
        waiting = asyncio.create_task(wait_ready(running, fake.target, (port,)))
        await fake.wait_for_calls("ServerMetadata", 2)
        assert not waiting.done()
        with socket.create_server(("127.0.0.1", port)):
            assert await waiting == "2.51.0"
    await end_process(running, 5)


STUBBORN = """\
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["/bin/sleep", "60"])
print(child.pid, flush=True)
child.wait()
"""


async def test_what_does_not_stop_is_killed() -> None:
    """With its child processes: the pipe that both write to is closed."""
    read, write = os.pipe()
    running = spawn([sys.executable, "-IS", "-c", STUBBORN], None, write)
    os.close(write)
    assert int(await asyncio.to_thread(os.read, read, 100)) > 0
    await end_process(running, 0.01)
    assert running.returncode == -9
    assert await asyncio.to_thread(os.read, read, 1) == b""
    os.close(read)


async def test_a_program_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the system's message and the program's name."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(SetupError, match="/bin/tritonserver cannot be started: No such file"):
        spawn(["/bin/tritonserver"], None, 1)
