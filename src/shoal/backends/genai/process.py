"""The gateway's handle of a language model's process: messages to it, messages from it, and its exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

from shoal.backends.base.child_process import ChildProcess
from shoal.backends.genai.messages import (
    LENGTH,
    Cancel,
    FirstMessage,
    LoadRefused,
    Opened,
    Ping,
    decode_first,
    encode_frame,
)
from shoal.errors import ConfigError, Crashed, MissingExtra, ModelFileError, OutOfMemory, ShoalError

logger = logging.getLogger("shoal.backends.genai")

CLOSE_S = 2.0
"""Seconds that the process has to exit: it checks the socket after each step."""

KEPT_BYTES = 2**14
SHOWN_BYTES = 2000
"""Bytes of the process's output that are kept, and logged if it crashes."""

_PING = 0


class Worker:
    """The process, the socket to it, and the end of its output.

    Messages wait here until the process has read the preceding ones, so that a message cancelled earlier is never sent.
    The backlog of a stuck process is thus limited by the requests in flight.
    """

    def __init__(self, process: ChildProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer
        self._outbox: dict[int, bytes] = {}  # by request number, negative for a Cancel
        self._has_messages = asyncio.Event()
        self._output_tail = bytearray()
        self._send_task = asyncio.create_task(self._send(), name="genai-send")
        self._collect_task = asyncio.create_task(self._collect(), name="genai-output")

    @classmethod
    async def spawn(cls, name: str) -> Worker:
        """Start a process. Raises Crashed."""
        try:
            process, reader, writer = await spawn_process("worker", str(os.getpid()), output=subprocess.PIPE)
        except OSError as error:
            raise Crashed(f"the process of {name} cannot be started: {error.strerror}") from error
        # the transport holds at most the unsent rest of one message, so that all others can still be withdrawn
        writer.transport.set_write_buffer_limits(high=0)
        return cls(process, reader, writer)

    def enqueue(self, number: int, data: bytes) -> None:
        """Queue the frame of an Open or a Start without waiting. `number`: the request's."""
        self._outbox[number] = data
        self._has_messages.set()

    def cancel(self, number: int) -> None:
        """Withdraw a queued Start, or send a Cancel if it was already sent."""
        if self._outbox.pop(number, None) is None:
            self.enqueue(-number, encode_frame(Cancel(id=number)))

    def ping(self) -> None:
        self.enqueue(_PING, encode_frame(Ping()))

    async def read_frame(self) -> bytes:
        """Return the body of the next frame. Raises IncompleteReadError or OSError if the process is gone."""
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return await self._reader.readexactly(length)

    async def wait_opened(self) -> Opened:
        """Return the process's report of the loaded model. Raises its SetupError or OutOfMemory if it cannot load the
        model, and Crashed."""
        try:
            answer: FirstMessage = decode_first(await self.read_frame())
        except (asyncio.IncompleteReadError, OSError):
            raise await self.crash_error() from None
        if isinstance(answer, Opened):
            return answer
        raise _load_error(answer)

    async def crash_error(self) -> Crashed:
        """Return the error for a process that has closed its socket."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.process.wait()
        await asyncio.wait([self._collect_task], timeout=CLOSE_S)
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited ({code})"
        tail = self._output_tail[-SHOWN_BYTES:].decode(errors="replace").strip()
        if tail:
            logger.error("last output of a language model's process:\n%s", tail)
        return Crashed(f"the language model's process {how}; see the log for its last output; load the model again")

    def kill(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # process.kill() may reap the exit code before asyncio

    async def end(self, patience_s: float) -> None:
        """Close the socket, which ends the process, and kill it if it still runs after `patience_s` seconds."""
        self._send_task.cancel()
        self._writer.close()
        if self.process.returncode is None and patience_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self.process.wait()
        self.kill()
        await self.process.wait()
        await asyncio.wait([self._collect_task], timeout=CLOSE_S)
        self._collect_task.cancel()
        await asyncio.gather(self._send_task, self._collect_task, return_exceptions=True)

    async def _send(self) -> None:
        try:
            while await self._has_messages.wait():
                self._has_messages.clear()
                while self._outbox:
                    self._writer.write(self._outbox.pop(next(iter(self._outbox))))
                    await self._writer.drain()
        except OSError as error:  # the process is gone: the reader of frames reports it
            logger.debug("a language model's process no longer reads requests: %s", error)

    async def _collect(self) -> None:
        """Read the process's output to its end and keep the last part."""
        async with self.process.open_output() as output:
            while data := await output.read(KEPT_BYTES):
                self._output_tail += data
                del self._output_tail[:-KEPT_BYTES]


async def spawn_process(
    module: str, *arguments: str, output: int, env: Mapping[str, str] | None = None
) -> tuple[ChildProcess, asyncio.StreamReader, asyncio.StreamWriter]:
    """Run a module of this package as a process, with the descriptor of its socket as the first argument. `output` as
    in ChildProcess. Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        command = [sys.executable, "-P", "-m", f"shoal.backends.genai.{module}", str(theirs.fileno()), *arguments]
        try:
            process = ChildProcess(command, output=output, pass_fds=[theirs.fileno()], env=env)
        except OSError:
            writer.close()
            raise
    return process, reader, writer


def _load_error(refused: LoadRefused) -> ShoalError:
    if refused.kind == "model_file":
        return ModelFileError(refused.message, file=refused.file)
    if refused.kind == "missing_extra":
        return MissingExtra("a language model on this machine", "llm")
    kinds: dict[str, type[ShoalError]] = {"config": ConfigError, "out_of_memory": OutOfMemory}
    return kinds[refused.kind](refused.message)
