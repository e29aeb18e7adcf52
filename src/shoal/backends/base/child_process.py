"""Processes that the gateway starts and awaits."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import IO

POLL_S = 0.05


class ChildProcess:
    """A process in a session of its own, so that Ctrl-C in a terminal reaches only the gateway.

    asyncio's own processes are not used: uvloop starts them with fork(2), which runs the handlers that gRPC registers
    for it (pthread_atfork). While gRPC's threads work, these crash the child before it executes its program: up to 6 of
    100 starts with grpcio 1.85. `subprocess` uses vfork(2), which runs no handlers.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        output: int | IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start it. `output`: where its standard output and error go, or subprocess.PIPE to read both with
        `open_output`. Raises OSError."""
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=pass_fds,
            env=env,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, the negative number of the signal that ended it, or None while it runs. While this was None in
        the current step of the loop, no other process has its pid: only this property and `wait` reap it."""
        return self._process.poll()

    async def wait(self) -> int:
        """Return its exit code as soon as it has ended."""
        if self.returncode is None:
            await _wait_for_end(self.pid)
        while (code := self.returncode) is None:  # noqa: ASYNC110 - without pidfds there is no event to wait for
            await asyncio.sleep(POLL_S)
        return code

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        self._process.terminate()

    @asynccontextmanager
    async def open_output(self) -> AsyncIterator[asyncio.StreamReader]:
        """Yield the reader of the piped output; close it at the end, also if the process's children hold it open."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )
        try:
            yield reader
        finally:
            transport.close()


async def _wait_for_end(pid: int) -> None:
    """Return when the process has ended and is not reaped yet; at once where the system has no pidfds."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or a sandbox without the call
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
