"""Processes that the gateway starts: their output, their end, and that gRPC does not crash them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from shoal.backends.base import child_process
from shoal.backends.base.child_process import ChildProcess

STARTS_BESIDE_GRPC = """
import asyncio, collections, os
import grpc.aio, uvloop
from shoal.backends.base.child_process import ChildProcess

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def call():
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        while True:
            try:
                await channel.unary_unary("/a/b")(b"", timeout=5)
            except grpc.RpcError:  # there is no such method, but gRPC's threads have work
                pass

    calls = [asyncio.create_task(call()) for _ in range(8)]
    exits = [await ChildProcess(["/bin/true"]).wait() for _ in range(200)]
    print(dict(collections.Counter(exits)), len([one for one in calls if one.done()]), flush=True)
    os._exit(0)

uvloop.run(main())
"""


@pytest.fixture(autouse=True)
def poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "POLL_S", 0.001)


async def test_its_output_and_exit_code() -> None:
    """Output and errors come in one stream, standard input is empty, and the process leads its own session."""
    script = "import os, sys; print(sys.stdin.read(), os.getsid(0) == os.getpid(), flush=True); sys.exit('the reason')"
    process = ChildProcess([sys.executable, "-IS", "-c", script], output=subprocess.PIPE)
    async with process.open_output() as output:
        assert await output.read() == b" True\nthe reason\n"
    assert await process.wait() == 1
    process.terminate()
    assert process.returncode == 1


@pytest.mark.parametrize("pidfds", [True, False], ids=["pidfd", "polling"])
async def test_all_who_wait_learn_of_its_end(pidfds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are canceled do not; no descriptor is left."""

    def refuse(pid: int) -> int:
        raise PermissionError("seccomp")

    if not pidfds:
        monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    process = ChildProcess(["/bin/sleep", "60"])
    descriptors = count_descriptors()
    waiting = [asyncio.create_task(process.wait()) for _ in range(3)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    process.terminate()
    assert await asyncio.gather(*waiting[1:]) == [-signal.SIGTERM] * 2
    assert waiting[0].cancelled()
    assert count_descriptors() == descriptors


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


async def test_output_that_others_hold_open() -> None:
    """Cancelling its reader closes the pipe."""
    read, write = os.pipe()
    process = ChildProcess(["/bin/sleep", "60"], output=subprocess.PIPE, pass_fds=[write])

    async def collect() -> bytes:
        async with process.open_output() as output:
            return await output.read()

    descriptors = count_descriptors()
    reading = asyncio.create_task(collect())
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.wait([reading])
    await asyncio.sleep(0)
    assert not descriptors or count_descriptors() < descriptors
    assert process.returncode is None
    process.terminate()
    assert await process.wait() == -signal.SIGTERM
    os.close(write)
    assert os.read(read, 1) == b"", "it held only the descriptors that it was given"
    os.close(read)


async def test_what_cannot_be_started() -> None:
    with pytest.raises(OSError, match="No such file"):
        ChildProcess(["/nowhere"])


def test_none_crashes_while_grpc_works() -> None:
    """With uvloop's own processes, 6 to 18 of these 200 are ended by SIGSEGV before they execute the program."""
    command = [sys.executable, "-c", STARTS_BESIDE_GRPC]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout == "{0: 200} 0\n", run.stderr
