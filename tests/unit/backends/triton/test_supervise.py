"""Servers that outlive the command: starting, finding and stopping them, with a program that imitates tritonserver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest

from shoal.backends.triton import supervise
from shoal.backends.triton.run_state import RunFolder, State, find_process, process_start
from shoal.backends.triton.server import TritonOptions
from shoal.errors import SetupError
from tests.unit.backends.triton import fake_server
from tests.unit.backends.triton.fake_server import FakeServer

Up: TypeAlias = Callable[..., tuple[RunFolder, State, bool]]


def options(folder: Path, **changes: Any) -> TritonOptions:
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    return TritonOptions(**{"home": folder / "home", "owner": "up", **ports, **changes})


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Up]:
    """`up(behaviour, **options)`: calls `supervise.start` with that program on PATH; its servers end with the test."""

    def start(behaviour: str = "", **changes: Any) -> tuple[RunFolder, State, bool]:
        if not (tmp_path / "server").exists():
            server = FakeServer(tmp_path / "server", behaviour)
            monkeypatch.setenv("PATH", f"{server.folder}{os.pathsep}{os.environ['PATH']}")
        return supervise.start(options(tmp_path, **changes))

    yield start
    for folder, state, _ in supervise.list_servers(options(tmp_path).run):
        supervise.stop(folder, state, options(tmp_path))


def test_options_reach_the_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unchanged, with absolute paths."""
    expected = options(tmp_path, repository=tmp_path / "été", load=("a", "b"), stable_s=1.5)
    assert supervise._decode(supervise._encode(expected)) == expected
    monkeypatch.chdir(tmp_path)
    found = supervise._decode(supervise._encode(TritonOptions(home=Path("home"), repository=Path("models"))))
    assert found == TritonOptions(home=tmp_path / "home", repository=tmp_path / "models")
    assert supervise._decode(supervise._encode(options(tmp_path))).folder == options(tmp_path).folder


def test_started_found_and_stopped(up: Up, tmp_path: Path) -> None:
    """It runs under its own supervisor, is found by port, and `stop` ends both."""
    folder, state, started = up()
    assert started
    assert state.phase == "ready"
    assert state.supervisor.pid != os.getpid()
    assert state.supervisor.is_alive()
    [(found, same, supervised)] = supervise.list_servers(options(tmp_path).run)
    assert (found.path, same, supervised) == (folder.path, state, True)
    assert supervise.stop(folder, state, options(tmp_path))
    assert state.server is not None
    assert process_start(state.server.pid) is None
    assert supervise.list_servers(options(tmp_path).run) == []


def test_one_that_runs_is_left_alone(up: Up, tmp_path: Path) -> None:
    """The same port and repository are the same server; another repository or a failed server is an error."""
    folder, state, _ = up()
    again = up(grpc_port=state.grpc_port)
    assert again[1:] == (state, False)
    with pytest.raises(SetupError, match=r"already runs a Triton on port \d+"):
        up(grpc_port=state.grpc_port, repository=tmp_path / "other")
    with pytest.raises(SetupError, match="without open ports: run `shoal triton down` first"):
        up(grpc_port=state.grpc_port, open_ports=True)
    folder.write(msgspec.structs.replace(state, phase="failed"))
    with pytest.raises(SetupError, match="is failed"):
        up(grpc_port=state.grpc_port)


def test_one_that_cannot_start(up: Up, tmp_path: Path) -> None:
    """The command reports its supervisor's error, which is also logged."""
    with pytest.raises(SetupError, match="it cannot be"):
        up(fake_server.DIES)
    assert "it cannot be" in (options(tmp_path).run / "supervisor.log").read_text()
    assert supervise.list_servers(options(tmp_path).run) == []


def test_a_supervisor_that_dies_at_once(up: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names its log."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SetupError, match=r"exited immediately; see .*supervisor\.log"):
        up()


def test_an_interrupt_while_it_starts_ends_it(up: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not keep running in the background."""
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)
            assert self.stdout is not None
            self.stdout.close()

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(ValueError, match="closed file"):
        up()
    assert started[0].returncode is not None


def test_a_server_that_is_given_up_ends_its_supervisor(up: Up) -> None:
    """With the reason; its folder is released."""
    folder, state, _ = up(fake_server.DIES_LATER, restarts=0)
    assert state.server is not None
    assert state.server.signal(signal.SIGKILL)
    while folder.is_supervised():
        time.sleep(0.001)
    assert folder.read() is None
    assert "1 times in a row" in (folder.path.parent / "supervisor.log").read_text()


def written(folder: Path, **changes: object) -> tuple[RunFolder, State]:
    made = RunFolder(folder / "run" / "2")
    made.path.mkdir(parents=True)
    state = State(
        owner="up",
        supervisor=find_process(os.getpid()),
        http_port=1,
        grpc_port=2,
        metrics_port=3,
        repository="/models",
        binary="/bin/tritonserver",
        since=0.0,
    )
    made.write(msgspec.structs.replace(state, **changes))
    return made, state


def test_a_stale_state_is_cleared_and_ends_nobody(tmp_path: Path) -> None:
    """Even if the supervisor's id now belongs to another process."""
    folder, state = written(tmp_path)
    [(_, _, supervised)] = supervise.list_servers(tmp_path / "run")
    assert not supervised
    assert not supervise.stop(folder, state, options(tmp_path))
    assert supervise.list_servers(tmp_path / "run") == []


def test_the_server_of_shoal_serve_is_not_ended(tmp_path: Path) -> None:
    """The error names its owner."""
    folder, _ = written(tmp_path, owner="serve")
    folder.claim()
    found = folder.read()
    assert found is not None
    with pytest.raises(SetupError, match=rf"shoal serve --triton` \(pid {os.getpid()}\)"):
        supervise.stop(RunFolder(folder.path), found, options(tmp_path))
    folder.release(keep_log=False)
