"""The output of `shoal triton`; tests/integration runs a real server."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from shoal.backends.triton import supervise
from shoal.backends.triton.run_state import Process, RunFolder, State, find_process
from shoal.backends.triton.server import TritonOptions
from shoal.cli import app
from shoal.cli import triton as commands
from shoal.errors import SourceError

runner = CliRunner()

_GONE = 1 << 30
"""A number that no process has: Linux ends at 1 << 22."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def server(home: Path, port: int = 8001, **changes: Any) -> RunFolder:
    """Create a server's folder as if one ran; `claim` makes it a running one."""
    folder = RunFolder(home / "triton" / "run" / str(port))
    folder.path.mkdir(parents=True)
    state = State(
        owner="up",
        supervisor=find_process(os.getpid()),
        server=Process(_GONE, 1),
        phase="ready",
        http_port=port - 1,
        grpc_port=port,
        metrics_port=port + 1,
        repository="/models",
        binary="/bin/tritonserver",
        version="2.51.0",
        since=time.time() - 7200,
    )
    folder.write(msgspec.structs.replace(state, **changes))
    return folder


@pytest.mark.parametrize("name", ["up", "down", "status", "logs"])
def test_every_command_has_help(name: str) -> None:
    """Each help starts with the purpose, and its usage names the group."""
    result = runner.invoke(app, ["triton", name, "--help"])
    assert result.exit_code == 0
    assert f"triton {name} [OPTIONS]" in result.output


def test_without_a_command_help_is_shown() -> None:
    """The help lists the four commands."""
    output = runner.invoke(app, ["triton"]).output
    assert all(f"\n  {name} " in output for name in ("up", "down", "status", "logs"))


def test_status_of_none(home: Path) -> None:
    """The output says how to start one; exit code 1."""
    result = runner.invoke(app, ["triton", "status"])
    assert result.exit_code == 1
    assert "`shoal triton up`" in result.stdout
    assert json.loads(runner.invoke(app, ["triton", "status", "--json"]).stdout) == []


def test_status_of_one(home: Path) -> None:
    """Addresses, version, process and age, as text and as JSON."""
    folder = server(home)
    assert folder.claim()
    result = runner.invoke(app, ["triton", "status"])
    assert result.exit_code == 0
    rows = dict(line.split(None, 1) for line in result.stdout.splitlines())
    assert rows["phase"] == "ready"
    assert rows["grpc"] == "127.0.0.1:8001"
    assert rows["since"] == "2 hours ago"
    assert "error" not in rows
    [facts] = json.loads(runner.invoke(app, ["triton", "status", "--json"]).stdout)
    assert facts["pid"] == _GONE
    assert facts["supervisor"] == os.getpid()
    assert (facts["number"], facts["http"]) == (8001, "127.0.0.1:8000")
    assert facts["owner"] == "shoal triton up"
    folder.release(keep_log=False)


def test_status_of_one_without_open_ports(home: Path) -> None:
    """Only its socket is shown, in the form of gRPC clients."""
    folder = server(home, socket="/run/8001/grpc:8001")
    assert folder.claim()
    [facts] = json.loads(runner.invoke(app, ["triton", "status", "--json"]).stdout)
    assert (facts["grpc"], facts["http"], facts["metrics"]) == ("unix:/run/8001/grpc:8001", "", "")
    assert "http" not in runner.invoke(app, ["triton", "status"]).stdout
    folder.release(keep_log=False)


def test_status_of_a_stale_one(home: Path) -> None:
    """A server without a supervisor is not running, whatever its state file says."""
    server(home)
    result = runner.invoke(app, ["triton", "status", "--json"])
    assert result.exit_code == 1
    [facts] = json.loads(result.stdout)
    assert (facts["phase"], facts["pid"], facts["supervisor"]) == ("stale", None, None)


def test_down_of_none_and_of_several(home: Path) -> None:
    """It must be clear which is meant."""
    assert "no Triton started by Shoal is running" in runner.invoke(app, ["triton", "down"]).stderr
    living = [server(home, port) for port in (8001, 9001)]
    server(home, 9501)
    for folder in living:
        assert folder.claim()
    result = runner.invoke(app, ["triton", "down"])
    assert result.exit_code == 1
    assert "several Tritons are running: choose one with --grpc-port (8001, 9001)" in result.stderr
    for folder in living:
        folder.release(keep_log=False)


def test_down_removes_leftovers(home: Path) -> None:
    """Servers that died are removed without being named, one or all."""
    for port in (8001, 9001, 9501):
        server(home, port)
    assert "several Tritons ended unexpectedly: choose" in runner.invoke(app, ["triton", "logs"]).stderr
    assert "uses the gRPC port 7" in runner.invoke(app, ["triton", "down", "--grpc-port", "7"]).stderr
    result = runner.invoke(app, ["triton", "down", "--grpc-port", "9001"])
    assert "had already ended" in result.stdout
    assert (home / "triton" / "run" / "8001" / "state.json").exists()
    assert runner.invoke(app, ["triton", "down"]).stdout.count("had already ended") == 2
    assert json.loads(runner.invoke(app, ["triton", "status", "--json"]).stdout) == []


def test_down_of_a_living_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop is reported; a dead server beside it causes no ambiguity."""
    folder = server(home)
    server(home, 9001)
    assert folder.claim()
    monkeypatch.setattr(supervise, "stop", lambda *_: True)
    assert runner.invoke(app, ["triton", "down"]).stdout == "Triton on port 8001 is stopped\n"
    folder.release(keep_log=False)


def test_logs_shows_the_end(home: Path) -> None:
    """The last lines are shown; none for a missing log."""
    folder = server(home)
    assert runner.invoke(app, ["triton", "logs"]).stdout == ""
    folder.log.write_text("one\ntwo\nthree\n")
    assert runner.invoke(app, ["triton", "logs", "-n", "2"]).stdout == "two\nthree\n"


def test_new_log_lines(tmp_path: Path) -> None:
    """Reading continues where it ended; a new file is read from its start, and a missing one is empty."""
    log = tmp_path / "log"
    assert commands._read_new(log, 5) == ("", 5)
    log.write_text("one two")
    assert commands._read_new(log, 4) == ("two", 7)
    log.write_text("new")
    assert commands._read_new(log, 7) == ("new", 3)


def test_logs_follow(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later lines are printed until an interrupt."""
    folder = server(home)
    folder.log.write_text("one\n")
    texts = iter(["two\n", "three\n"])

    def turn(_: float) -> None:
        for text in texts:
            with folder.log.open("a") as file:
                file.write(text)
            return
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", turn)
    result = runner.invoke(app, ["triton", "logs", "-f"])
    assert result.exit_code == 130
    assert result.stdout == "one\ntwo\nthree\n"


def test_up_prints_the_address(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The flags become options; a server that already runs is reported as such."""
    folder = server(home)
    state = folder.read()
    assert state is not None
    starts: list[TritonOptions] = []

    def start(options: TritonOptions, progress: object) -> tuple[RunFolder, State, bool]:
        starts.append(options)
        return folder, state, len(starts) == 1

    monkeypatch.setattr(supervise, "start", start)
    flags = ["--repository", str(tmp_path), "--http-port", "0", "--grpc-port", "1", "--metrics-port", "2", "--offline"]
    result = runner.invoke(app, ["triton", "up", "--open-ports", *flags])
    assert result.stdout.startswith("Triton 2.51.0 is ready at triton://127.0.0.1:8001\n")
    assert str(folder.log) in result.stdout
    expected = TritonOptions(
        home=home,
        repository=tmp_path,
        open_ports=True,
        http_port=0,
        grpc_port=1,
        metrics_port=2,
        offline=True,
        owner="up",
    )
    assert starts == [expected]
    closed = runner.invoke(app, ["triton", "up", *flags])
    assert closed.exit_code == 1
    assert "HTTP and metrics require open ports" in closed.stderr
    assert "is already running" in runner.invoke(app, ["triton", "up"]).stdout
    assert starts[1] == TritonOptions(home=home, owner="up")


def test_up_that_fails_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is 1."""

    def start(*_: object) -> None:
        raise SourceError("the package index cannot be reached")

    monkeypatch.setattr(supervise, "start", start)
    result = runner.invoke(app, ["triton", "up"])
    assert result.exit_code == 1
    assert result.stderr == "error: the package index cannot be reached\n"


def test_a_port_out_of_range_is_a_usage_error(home: Path) -> None:
    """Exit code 2."""
    assert runner.invoke(app, ["triton", "up", "--grpc-port", "70000"]).exit_code == 2
