"""Supervision of a program that imitates tritonserver; tests/integration use the real one."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from shoal.backends.triton import distribution, environment, process, server
from shoal.backends.triton.distribution import Distribution
from shoal.backends.triton.environment import Environment, Interpreter
from shoal.backends.triton.process import Command, CrashWatch
from shoal.backends.triton.run_state import RunFolder, process_start
from shoal.backends.triton.server import Installation, PortTaken, TritonOptions, TritonServer, obtain, run_triton
from shoal.errors import Cancelled, SetupError
from tests.unit.backends.triton import fake_server
from tests.unit.backends.triton.fake_server import FakeServer

Make: TypeAlias = Callable[[str], FakeServer]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """`fake(behaviour)`: makes `run_triton` find that program."""

    def make(behaviour: str) -> FakeServer:
        made = FakeServer(tmp_path / "server", behaviour)
        monkeypatch.setattr(server, "obtain", lambda *_: made.installed)
        monkeypatch.setattr(process, "_POLL_S", 0.005)
        return made

    yield make


def options(folder: Path, **changes: Any) -> TritonOptions:
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    return TritonOptions(**{"home": folder / "home", "backoff_s": 0.01, **ports, **changes})


async def until(true: Callable[[], bool]) -> None:
    """Run the loop until a condition is true; the test's timeout limits it."""
    while not true():  # noqa: ASYNC110 - another process has no event to wait for
        await asyncio.sleep(0.001)


async def test_started_and_stopped(fake: Make, tmp_path: Path) -> None:
    """Its facts, and its state on disk, which exists only while it runs."""
    program = fake("")
    async with run_triton(options(tmp_path)) as running:
        assert running.phase == "ready"
        assert running.version == "9.9"
        assert running.platforms == ("python",)
        assert running.python is None
        assert running.repository.is_dir()
        assert f"fake server {running.pid}" in await running.log_tail()
        folder = RunFolder(running.log.parent)
        found = await asyncio.to_thread(folder.read)
        assert found is not None
        assert (found.phase, found.owner, found.url) == ("ready", "serve", running.url)
        assert running.url == found.socket == str(folder.path / f"grpc:{found.grpc_port}")
        pid = running.pid
    assert not folder.path.exists()
    assert pid
    assert await asyncio.to_thread(process_start, pid or 0) is None
    assert len(program.starts) == 1


async def test_with_open_ports(fake: Make, tmp_path: Path) -> None:
    """Three ports, open to all local users, and no socket."""
    fake("")
    async with run_triton(options(tmp_path, open_ports=True)) as running:
        found = await asyncio.to_thread(RunFolder(running.log.parent).read)
        assert found is not None
        assert found.socket == ""
        assert running.url == f"127.0.0.1:{found.grpc_port}"
        assert running.http_url == f"127.0.0.1:{found.http_port}"


async def test_a_home_too_long_for_a_socket(fake: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the socket has its own folder, which is removed with the server."""
    fake("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    long = tmp_path / ("x" * 120)
    async with run_triton(options(tmp_path, home=long)) as running:
        place = Path(running.url)
        assert running.phase == "ready"
        assert place.parent.parent == tmp_path
        assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert not place.parent.exists()


async def test_a_named_port_keeps_its_log(fake: Make, tmp_path: Path) -> None:
    """The log of a free port is removed."""
    fake("")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    async with run_triton(options(tmp_path, grpc_port=port)) as running:
        assert running.url.endswith(f"/run/{port}/grpc:{port}")
    assert running.log.exists()
    assert await asyncio.to_thread(RunFolder(running.log.parent).read) is None


async def test_it_is_started_again_when_it_dies(fake: Make, tmp_path: Path) -> None:
    """With the same ports and new shared memory; the log records it."""
    program = fake("")
    async with run_triton(options(tmp_path)) as running:
        first, url = running.pid, running.url
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: running.restarts == 1 and running.phase == "ready")
        assert running.url == url
        assert running.pid not in (None, first)
        assert "shoal: tritonserver was ended by SIGKILL; restarting in" in await running.log_tail()
    one, other = (line.split() for line in program.starts)
    assert [a for a in one if "shm-region" not in a] == [a for a in other if "shm-region" not in a]
    assert one != other


async def test_one_that_hangs_while_it_dies(fake: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed and started again; one that only logs such a line, as a model may, is left alone."""
    monkeypatch.setattr(server, "_CRASH_LOOK_S", 0.01)
    looks, is_in_handler = 0, CrashWatch.is_in_handler

    def count(watch: CrashWatch) -> bool:
        nonlocal looks
        looks += 1
        return is_in_handler(watch)

    monkeypatch.setattr(CrashWatch, "is_in_handler", count)
    fake(fake_server.HANGS)
    async with run_triton(options(tmp_path)) as running:
        for _ in range(2):
            assert running.pid is not None
            os.kill(running.pid, signal.SIGUSR1)
            await until(lambda: running.restarts == 1 and running.phase == "ready")
        log = await asyncio.to_thread(running.log.read_text)
        assert "hangs in its handler of a fatal signal; killing it\nshoal: tritonserver was ended by SIG" in log
        await until(lambda: running.log.read_text().count("Signal (11)") == 2)
        looks = 0
        await until(lambda: looks > 4)
        assert (running.restarts, running.phase) == (1, "ready")


async def test_a_start_that_fails_is_tried_again(fake: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its files are replaced at that moment, or the machine is out of descriptors."""
    program = fake("")
    async with run_triton(options(tmp_path)) as running:
        arguments, failures = Command.arguments, iter([OSError(errno.EMFILE, "no descriptors")] * 2)

        def read_later(command: Command, prefix: str) -> list[str]:
            for error in failures:
                raise error
            return arguments(command, prefix)

        monkeypatch.setattr(Command, "arguments", read_later)
        assert running.pid is not None
        os.kill(running.pid, signal.SIGKILL)
        await until(lambda: running.restarts == 3 and running.phase == "ready")
        assert "tritonserver cannot be started: [Errno 24] no descriptors" in await running.log_tail()
    assert len(program.starts) == 2


async def test_it_is_given_up_after_so_many_times(fake: Make, tmp_path: Path) -> None:
    """Waiters get the reason; each pause is longer than the one before."""
    program = fake(fake_server.DIES_LATER)
    async with run_triton(options(tmp_path, restarts=2)) as running:
        assert running.pid is not None
        os.kill(running.pid, signal.SIGKILL)
        with pytest.raises(SetupError, match="3 times in a row"):
            await running.wait()
        found: tuple[str, int | None] = (running.phase, running.pid)
        assert found == ("failed", None)
        log = await running.log_tail()
        assert "in 0.01 s (1 of 2)" in log
        assert "in 0.02 s (2 of 2)" in log
    assert len(program.starts) == 3


async def test_a_stable_server_begins_a_new_row(fake: Make, tmp_path: Path) -> None:
    """Deaths that are far apart do not add up."""
    fake("")
    async with run_triton(options(tmp_path, restarts=1, stable_s=0.0)) as running:
        for restarts in (1, 2, 3):
            assert running.pid is not None
            os.kill(running.pid, signal.SIGKILL)
            await until(lambda wanted=restarts: running.restarts == wanted and running.phase == "ready")  # type: ignore[misc]


async def test_one_that_dies_at_once(fake: Make, tmp_path: Path) -> None:
    """The error has the end of its log, and the port's folder is released."""
    program = fake(fake_server.DIES)
    with pytest.raises(SetupError, match=r"exit code 1 before it was ready.*\n.*\nit cannot be") as caught:
        async with run_triton(options(tmp_path)):
            raise AssertionError("it is not ready")
    assert not isinstance(caught.value, PortTaken)
    assert len(program.starts) == 1
    [folder] = options(tmp_path).run.iterdir()
    assert not await asyncio.to_thread(RunFolder(folder).is_supervised)
    assert await asyncio.to_thread(RunFolder(folder).read) is None


async def test_one_that_is_late(fake: Make, tmp_path: Path) -> None:
    """It is ended, and the error has the end of its log."""
    fake(fake_server.LATE)
    with pytest.raises(SetupError, match=r"not ready after 3 s.*\nfake server (\d+)"):
        async with run_triton(options(tmp_path, start_timeout_s=3.0)):
            raise AssertionError("it is not ready")


async def test_a_port_that_was_taken_meanwhile_is_chosen_anew(fake: Make, tmp_path: Path) -> None:
    """If Shoal chose it."""
    program = fake(fake_server.CLASHES_ONCE)
    async with run_triton(options(tmp_path)) as running:
        assert running.phase == "ready"
    one, other = program.starts
    assert one != other


async def test_a_named_port_that_was_taken_meanwhile(fake: Make, tmp_path: Path) -> None:
    """It is not replaced; and the attempts at free ports are limited."""
    program = fake(fake_server.CLASHES)
    ports = process.Ports(0, 0, 0).choose_free()
    named = {"http_port": ports.http, "grpc_port": ports.grpc, "metrics_port": ports.metrics}
    with pytest.raises(PortTaken, match="already in use"):
        async with run_triton(options(tmp_path, open_ports=True, **named)):
            raise AssertionError("it is not ready")
    assert len(program.starts) == 1
    with pytest.raises(PortTaken):
        async with run_triton(options(tmp_path)):
            raise AssertionError("it is not ready")
    assert len(program.starts) == 6


async def test_a_port_that_another_shoal_is_starting_on(fake: Make, tmp_path: Path) -> None:
    """Its folder is claimed, although nothing listens yet."""
    fake("")
    port = process.Ports(0, 0, 0).choose_free().grpc
    other = RunFolder(options(tmp_path).run / str(port))
    assert await asyncio.to_thread(other.claim)
    with pytest.raises(SetupError, match=f"another Shoal process runs, starts or stops a Triton on port {port}"):
        async with run_triton(options(tmp_path, grpc_port=port)):
            raise AssertionError("it is not ready")
    await asyncio.to_thread(other.release, keep_log=False)


async def test_one_that_does_not_stop_is_killed(fake: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its exit timeout."""
    fake(fake_server.STUBBORN)
    monkeypatch.setattr(server, "_KILL_AFTER_S", 0.0)
    async with run_triton(options(tmp_path, exit_timeout_s=0.01)) as running:
        pid = running.pid
    assert await asyncio.to_thread(process_start, pid or 0) is None


async def test_a_repository_that_cannot_be_made(fake: Make, tmp_path: Path) -> None:
    """The error names it, and the setting."""
    fake("")
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"file/models.*--repository"):
        async with run_triton(options(tmp_path, repository=tmp_path / "file" / "models")):
            raise AssertionError("it is not ready")


async def test_a_state_that_cannot_be_written_does_not_stop_it(
    fake: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk breaks `status`, not the server."""
    fake("")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "state.json")

    monkeypatch.setattr(RunFolder, "write", full)
    async with run_triton(options(tmp_path)) as running:
        assert running.phase == "ready"
    assert "will not list this server" in caplog.text


async def test_cancelled_while_it_fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is stopped, and awaited."""
    begun, ended = threading.Event(), threading.Event()

    def slow(wanted: TritonOptions, progress: object, stop: threading.Event) -> Installation:
        begun.set()
        assert stop.wait(30)
        ended.set()
        raise Cancelled("stopped")

    monkeypatch.setattr(server, "obtain", slow)

    async def start() -> None:
        async with run_triton(options(tmp_path)):
            raise AssertionError("it was cancelled")

    task = asyncio.create_task(start())
    await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


def test_the_machine_s_own_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without network, and without Shoal's environment."""
    own = Distribution(Path("/usr/bin/tritonserver"), Path("/backends"), Path("/caches"))
    monkeypatch.setattr(distribution, "find_installed", lambda: own)
    assert obtain(options(tmp_path)) == Installation(own, None)


def test_without_one_it_is_fetched_for_a_python_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stub matches the interpreter whose libpython was found."""
    calls: list[Any] = []
    found = Distribution(Path("/fetched"), Path("/b"), Path("/c"))
    made = Environment(Path("/e/bin"), Path("/e/libpython"))
    python = Interpreter("/usr/bin/python3.12", "3.12", Path("/lib/libpython3.12.so.1.0"))
    monkeypatch.setattr(distribution, "find_installed", lambda: None)
    monkeypatch.setattr(distribution, "check_machine", lambda: "x86_64")

    def fetch(*args: Any, offline: bool, **_: Any) -> Distribution:
        calls.append((*args, offline))
        return found

    def build(*args: Any, offline: bool, **_: Any) -> Environment:
        calls.append((*args, offline))
        return made

    monkeypatch.setattr(distribution, "fetch", fetch)
    monkeypatch.setattr(environment, "find_interpreter", lambda _: python)
    monkeypatch.setattr(environment, "build", build)
    assert obtain(options(tmp_path, offline=True)) == Installation(found, made)
    root = tmp_path / "home" / "triton"
    assert calls == [(root / "distributions", "3.12", True), (root / "environments", python, True)]


def test_a_log_that_grew_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts append to it up to a size; a missing folder is an error."""
    monkeypatch.setattr(server, "_MAX_LOG_BYTES", 5)
    log = tmp_path / "log"
    for expected in (b"abc", b"abcabc", b"abc"):
        descriptor = server._open_log(log)
        os.write(descriptor, b"abc")
        os.close(descriptor)
        assert log.read_bytes() == expected
    with pytest.raises(SetupError, match="SHOAL_HOME"):
        server._open_log(tmp_path / "none" / "log")


def test_paths_of_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` in the home is expanded, and the repository is Shoal's own by default."""
    monkeypatch.setenv("HOME", str(tmp_path))
    own = TritonOptions(home=Path("~/shoal"))
    assert own.folder == tmp_path / "shoal" / "triton" / "repository"
    assert own.run == tmp_path / "shoal" / "triton" / "run"
    assert TritonOptions(home=tmp_path, repository=Path("~/models")).folder == tmp_path / "models"


def test_waiting_comes_after_starting(tmp_path: Path) -> None:
    made = TritonServer(
        options(tmp_path),
        Installation(Distribution(Path("x"), tmp_path, tmp_path), None),
        process.Ports(1, 2, 3),
        RunFolder(tmp_path / "run"),
    )
    with pytest.raises(AssertionError, match="after start"):
        asyncio.run(made.wait())
