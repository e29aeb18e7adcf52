"""The supervisor, with small programs as its processes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import shoal.workers.supervisor
from shoal.workers.supervisor import SETUP_FAILED, Program, Supervisor
from tests.unit.workers.kit import until

SERVE = """
import os, pathlib, signal, sys, time
log = pathlib.Path(sys.argv[1])
payload = sys.stdin.buffer.read().decode()
with log.open("a") as file:
    print(os.getpid(), payload, file=file)
"""
WAIT = SERVE + "signal.sigwait({signal.SIGTERM})\n"
# Blocked first: a stop may arrive while Python starts.
WAIT = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n" + WAIT
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVE + "time.sleep(600)\n"


class Programs:
    """Writes programs as modules, each with a file that lists its starts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, code: str) -> Program:
        (self._folder / f"program_{name}.py").write_text(code)
        return Program(
            name=name,
            module=f"program_{name}",
            arguments=[str(self._folder / name)],
            payload=f"for {name}".encode(),
            files=[],
        )

    def starts(self, name: str) -> list[tuple[int, str]]:
        """Return the process id and the payload of each start."""
        file = self._folder / name
        lines = file.read_text().splitlines() if file.exists() else []
        return [(int(line.split(" ", 1)[0]), line.split(" ", 1)[1]) for line in lines]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Programs(tmp_path)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def run_until(supervisor: Supervisor, true: Callable[[], bool]) -> int:
    """Run until something is true, then stop; return the exit code."""
    stop = asyncio.Event()
    running = asyncio.create_task(supervisor.run(stop))
    try:
        await until(lambda: true() or running.done())
    finally:
        stop.set()
        code = await running
    return code


async def test_all_processes_start_and_stop(programs: Programs) -> None:
    """Each process gets its payload and its arguments; a stop ends them all with code 0."""
    models, fronts = programs.write("models", WAIT), [programs.write("one", WAIT), programs.write("two", WAIT)]
    names = ("models", "one", "two")
    code = await run_until(Supervisor(models, fronts, 30.0), lambda: all(map(programs.starts, names)))
    assert code == 0
    for name in names:
        [(pid, payload)] = programs.starts(name)
        assert payload == f"for {name}"
        assert not is_alive(pid)


async def test_a_killed_process_is_started_again(programs: Programs, caplog: pytest.LogCaptureFixture) -> None:
    """Only the process that ended is replaced, and the log says how it ended."""
    supervisor = Supervisor(programs.write("models", WAIT), [programs.write("one", WAIT)], 30.0)

    def kill_first() -> bool:
        starts = programs.starts("one")
        if len(starts) == 1 and programs.starts("models"):
            with contextlib.suppress(ProcessLookupError):  # it was killed a moment ago
                os.kill(starts[0][0], signal.SIGKILL)
        return len(starts) == 2

    with caplog.at_level(logging.ERROR, "shoal.workers"):
        await run_until(supervisor, kill_first)
    assert len(programs.starts("models")) == 1
    assert "one ended (SIGKILL): starting it again" in caplog.text


async def test_a_process_that_cannot_be_started_is_tried_again(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the machine is out of memory or descriptors for a moment."""
    start, failures = shoal.workers.supervisor._start, iter([OSError(errno.EAGAIN, "no processes left")] * 2)

    def start_later(program: Program) -> subprocess.Popen[bytes]:
        for error in failures:
            raise error
        return start(program)

    monkeypatch.setattr(shoal.workers.supervisor, "_start", start_later)
    supervisor = Supervisor(programs.write("models", WAIT), [programs.write("front", WAIT)], 30.0)
    assert await run_until(supervisor, lambda: bool(programs.starts("models") and programs.starts("front"))) == 0
    assert "models ended (it cannot be started: no processes left): starting it again" in caplog.text


async def test_a_process_that_keeps_ending_waits_longer(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The time before a start doubles up to a limit, and a stop ends the wait."""
    delays: list[float | None] = []
    timeout = asyncio.timeout

    def record(delay: float | None) -> asyncio.Timeout:
        delays.append(delay)
        return timeout(0 if len(delays) < 5 else delay)

    monkeypatch.setattr(shoal.workers.supervisor, "MAX_DELAY_S", 0.5)
    program = programs.write("one", SERVE + "sys.exit(3)")
    monkeypatch.setattr(asyncio, "timeout", record)  # only the supervisor uses it here
    with caplog.at_level(logging.ERROR, "shoal.workers"):
        stop = asyncio.Event()
        running = asyncio.create_task(Supervisor(programs.write("models", WAIT), [program], 30.0).run(stop))
        while len(delays) < 5:  # noqa: ASYNC110 - the restarts have no event
            await asyncio.sleep(0.01)
        stop.set()
        assert await running == 0
    assert delays[:5] == [0.1, 0.2, 0.4, 0.5, 0.5]
    assert "one ended (exit code 3)" in caplog.text


@pytest.mark.parametrize("code", [1, 2])
async def test_a_failed_setup_ends_the_command(programs: Programs, code: int) -> None:
    """If the model process cannot serve at all, the others are stopped and its code is that of the command."""
    models = programs.write("models", f"import sys; sys.stdin.read(); sys.exit({SETUP_FAILED + code})")
    supervisor = Supervisor(models, [programs.write("one", WAIT)], 30.0)
    async with asyncio.timeout(30):
        assert await supervisor.run(asyncio.Event()) == code
    assert not any(is_alive(pid) for pid, _ in programs.starts("one"))


async def test_a_failed_setup_after_a_crash_is_tried_again(programs: Programs) -> None:
    """Only the first start of all can end the command: later, the models were there once."""
    crash = "if len(log.read_text().splitlines()) == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    models = programs.write("models", SERVE + crash + f"sys.exit({SETUP_FAILED + 1})")
    code = await run_until(Supervisor(models, [], 30.0), lambda: len(programs.starts("models")) >= 3)
    assert code == 0


BEAT = (
    "import contextlib\n"
    + SERVE
    + """
pulse = int(sys.argv[2])
while time.sleep(0.01) is None:
    with contextlib.suppress(BlockingIOError):
        os.write(pulse, b".")
    {}
"""
)


@pytest.fixture
def pulse() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    yield ends
    for end in ends:
        os.close(end)


async def test_a_hanging_model_process_is_killed(
    programs: Programs, pulse: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is started again once it gives no sign of life any more, and so is each that follows."""
    monkeypatch.setattr(shoal.workers.supervisor, "TICK_S", 0.05)
    monkeypatch.setattr(shoal.workers.supervisor, "HANG_TICKS", 20)
    written = programs.write("models", BEAT.format("signal.pause()"))
    models = replace(written, arguments=[*written.arguments, str(pulse[1])], files=[pulse[1]])
    with caplog.at_level(logging.ERROR, "shoal.workers"):
        await run_until(Supervisor(models, [], 30.0, pulse=pulse[0]), lambda: len(programs.starts("models")) == 3)
    assert "models has hung for 1 s and is killed" in caplog.text
    assert "models ended (SIGKILL): starting it again" in caplog.text


@pytest.mark.parametrize("left", [b"", b"."], ids=["", "with a last sign of life of the process before"])
async def test_a_model_process_that_still_starts_is_not_killed(
    programs: Programs,
    pulse: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    left: bytes,
) -> None:
    """However long it takes until its first sign of life."""
    os.write(pulse[1], left)
    monkeypatch.setattr(shoal.workers.supervisor, "TICK_S", 0.001)
    monkeypatch.setattr(shoal.workers.supervisor, "HANG_TICKS", 3)
    supervisor = Supervisor(programs.write("models", WAIT), [], 30.0, pulse=pulse[0])
    stop = asyncio.Event()
    running = asyncio.create_task(supervisor.run(stop))
    await until(lambda: len(programs.starts("models")) == 1)
    await asyncio.sleep(0.1)  # many ticks
    stop.set()
    assert await running == 0
    assert len(programs.starts("models")) == 1
    assert "has hung" not in caplog.text


async def test_a_process_that_does_not_stop_is_killed(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the drain, what is left is killed, and the log names it."""
    monkeypatch.setattr(shoal.workers.supervisor, "KILL_S", 0.2)
    supervisor = Supervisor(programs.write("models", WAIT), [programs.write("one", STUBBORN)], 0.0)
    with caplog.at_level(logging.WARNING, "shoal.workers"):
        code = await run_until(supervisor, lambda: bool(programs.starts("models") and programs.starts("one")))
    assert code == 0
    assert "one did not end in time" in caplog.text
    assert not is_alive(programs.starts("one")[0][0])


async def test_a_stop_during_a_start_reaches_the_process(programs: Programs) -> None:
    """A process that is just being started when the stop arrives is stopped as well, long before it would be killed."""
    supervisor = Supervisor(programs.write("models", WAIT), [programs.write("one", WAIT)], 600.0)
    stop = asyncio.Event()
    running = asyncio.create_task(supervisor.run(stop))
    await asyncio.sleep(0)  # the tasks begin
    await asyncio.sleep(0)
    stop.set()
    try:
        async with asyncio.timeout(10):
            assert await running == 0
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_a_cancelled_supervisor_leaves_nothing(programs: Programs) -> None:
    """An error in the supervisor kills its processes."""
    supervisor = Supervisor(programs.write("models", STUBBORN), [], 30.0)
    running = asyncio.create_task(supervisor.run(asyncio.Event()))
    await until(lambda: bool(programs.starts("models")))
    running.cancel()
    async with asyncio.timeout(10):
        await asyncio.wait([running])
    assert not is_alive(programs.starts("models")[0][0])


async def test_a_process_that_ends_before_it_reads_does_no_harm(programs: Programs) -> None:
    """A payload larger than a pipe, and a process that never reads it, is a usual restart."""
    program = Program(name="one", module="program_one", arguments=[], payload=b"x" * 1_000_000, files=[])
    programs.write("one", "import sys; sys.exit(0)")
    supervisor, seen = Supervisor(programs.write("models", WAIT), [program], 30.0), []

    def started() -> bool:
        seen.append(bool(programs.starts("models")))
        return seen[-1]

    assert await run_until(supervisor, started) == 0
