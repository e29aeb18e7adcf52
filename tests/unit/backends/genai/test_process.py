"""The process of a language model, seen from the gateway: its start, its output, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shoal.backends.base.child_process import ChildProcess
from shoal.backends.genai.messages import Cancel, LoadRefused, Open, Ping, Start, encode_frame
from shoal.backends.genai.process import KEPT_BYTES, SHOWN_BYTES, Worker, _load_error
from shoal.errors import ConfigError, Crashed, MissingExtra, OutOfMemory, ShoalError
from shoal.types import Sampling
from tests.unit.backends.genai.conftest import EXACT, IR

if find_spec("openvino_genai") is None:
    pytest.skip("needs the 'llm' extra", allow_module_level=True)

linux = pytest.mark.skipif(sys.platform != "linux", reason="of Linux: a process that ends with its parent, waitid")

PARENT = """
import asyncio, sys
from pathlib import Path
from shoal.backends.genai.messages import Open, encode_frame
from shoal.backends.genai.process import Worker
from tests.unit.backends.genai.conftest import EXACT, IR

async def main():
    worker = await Worker.spawn("tiny")
    worker.enqueue(0, encode_frame(Open(path=str(IR), options=EXACT)))
    await worker.wait_opened()
    print(worker.process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a shell script in place of the process."""

    def put(script: str) -> None:
        path = tmp_path / "program"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return put


async def loaded() -> Worker:
    worker = await Worker.spawn("tiny")
    worker.enqueue(0, encode_frame(Open(path=str(IR), options=EXACT)))
    await worker.wait_opened()
    return worker


class TestStart:
    async def test_one_that_cannot_be_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The error has the reason, and nothing stays open."""
        monkeypatch.setattr(sys, "executable", "/nowhere")
        before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
        with pytest.raises(Crashed, match=r"tiny cannot be started: No such file"):
            await Worker.spawn("tiny")
        await asyncio.sleep(0)
        assert not before or len(os.listdir("/proc/self/fd")) <= before

    async def test_one_that_dies_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The error has the exit code."""
        monkeypatch.setattr(sys, "executable", shutil.which("false"))
        worker = await Worker.spawn("tiny")
        with pytest.raises(Crashed, match=r"exited \(1\)"):
            await worker.wait_opened()
        await worker.end(0)
        await worker.end(0)


class TestLastWords:
    async def test_the_last_of_what_it_wrote_is_logged(self, program: Any, caplog: pytest.LogCaptureFixture) -> None:
        """The log has a bounded tail of stdout and stderr."""
        program("yes 'words and words' | head -c 3000000; echo 'out of luck ñ' >&2; exit 3")
        worker = await Worker.spawn("tiny")
        with pytest.raises(Crashed, match=r"exited \(3\)"):
            await worker.wait_opened()
        assert len(worker._output_tail) == KEPT_BYTES
        await worker.end(0)
        assert caplog.messages[-1].endswith("out of luck ñ")
        assert len(caplog.messages[-1]) < SHOWN_BYTES + 100

    async def test_one_that_writes_for_ever_is_read(self, program: Any) -> None:
        """The output is drained, so the process does not block and can be closed."""
        program("exec yes")
        worker = await Worker.spawn("tiny")
        async with asyncio.timeout(10):
            for _ in iter(lambda: len(worker._output_tail) == KEPT_BYTES, True):
                await asyncio.sleep(0)
            await worker.end(0)
        assert worker.process.returncode == -signal.SIGKILL
        assert len(worker._output_tail) == KEPT_BYTES


class TestWaiting:
    async def test_what_is_taken_back_is_not_sent(self) -> None:
        """Cancelling drops an unsent Start, and sends a Cancel for one that was sent."""
        worker = await loaded()
        os.kill(worker.process.pid, signal.SIGSTOP)
        ids = (400,) * 2000
        for number in range(1, 501):
            worker.enqueue(number, encode_frame(Start(id=number, ids=ids, sampling=Sampling())))
            for _ in range(3):
                await asyncio.sleep(0)
            worker.cancel(number)
        buffered = sum(map(len, worker._outbox.values())) + worker._writer.transport.get_write_buffer_size()
        starts = [number for number in worker._outbox if number > 0]
        os.kill(worker.process.pid, signal.SIGCONT)
        await worker.end(5)
        assert starts == []
        assert buffered < 20_000
        assert len(worker._outbox) < 200

    async def test_messages_are_sent_in_order(self) -> None:
        """Messages are sent in order, some bytes at a time."""
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        process = ChildProcess(["sleep", "60"], output=subprocess.PIPE)
        worker = Worker(process, reader, writer)
        start = encode_frame(Start(id=7, ids=(1,), sampling=Sampling()))
        worker.enqueue(7, start)
        worker.enqueue(8, start)
        worker.cancel(8)
        worker.ping()
        await asyncio.sleep(0)
        worker.cancel(7)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert theirs.recv(10_000) == start + encode_frame(Ping()) + encode_frame(Cancel(id=7))
        theirs.close()
        await worker.end(0)


class TestEnd:
    @linux
    def test_it_dies_with_a_gateway_that_is_killed(self) -> None:
        """The process is killed with the gateway even while it is stopped or loading."""
        root = Path(__file__).parents[4]
        command = [sys.executable, "-c", PARENT]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, text=True) as parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            descriptor = os.pidfd_open(pid)
            os.kill(pid, signal.SIGSTOP)
            parent.kill()
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        assert ended.poll(10_000)
        os.close(descriptor)

    @linux
    def test_it_does_not_begin_when_the_gateway_is_gone(self) -> None:
        """A process whose gateway already ended exits at once."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            done = subprocess.run(
                [sys.executable, "-m", "shoal.backends.genai.worker", str(theirs.fileno()), "1"],
                pass_fds=[theirs.fileno()],
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
        assert done.returncode == 1
        assert "the process that started this one has ended" in done.stderr

    @linux
    async def test_killing_twice_keeps_how_it_ended(self, caplog: pytest.LogCaptureFixture) -> None:
        """Killing a process twice does not lose its exit code."""
        worker = await Worker.spawn("tiny")
        worker.kill()
        with contextlib.suppress(ChildProcessError):  # asyncio's child watcher was faster
            os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222  # the loop must block here
        worker.kill()
        await worker.end(0)
        assert worker.process.returncode == -signal.SIGKILL
        assert caplog.messages == []

    @pytest.mark.parametrize(
        ("kind", "error"),
        [("config", ConfigError), ("missing_extra", MissingExtra), ("out_of_memory", OutOfMemory)],
    )
    def test_other_refusals(self, kind: Any, error: type[ShoalError]) -> None:
        """Each kind of error arrives as the same error."""
        assert type(_load_error(LoadRefused(kind=kind, message="no"))) is error
