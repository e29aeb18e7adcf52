"""One tritonserver process: its command line, its ports and its readiness."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from shoal import parent_process
from shoal.backends.base.child_process import ChildProcess
from shoal.backends.triton.client import OPTIONS, grpc_target
from shoal.backends.triton.distribution import Distribution
from shoal.backends.triton.environment import Environment, server_environment
from shoal.backends.triton.run_state import HOST, SHM_MARK
from shoal.errors import SetupError
from shoal.kserve import SERVICE
from shoal.kserve import protocol_pb2 as pb

_SHM_BYTES = 4 << 20
"""Initial shared memory of a python model, which grows on demand; Triton's own default of 1 MB grows at once."""

_POLL_S = 0.05
_CALL_TIMEOUT_S = 2.0
R = TypeVar("R", bound=Message)

_CRASH_LINE = re.compile(rb"^Signal \((?:%d|%d)\) received" % (signal.SIGSEGV, signal.SIGABRT), re.MULTILINE)
_CRASH_LINE_BYTES = 32
_FATAL = 1 << signal.SIGSEGV - 1 | 1 << signal.SIGABRT - 1
_BLOCKED = re.compile(rb"^SigBlk:\s*([0-9a-f]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of a server. Without open ports `grpc` is the number that identifies it, and the others are 0."""

    http: int
    grpc: int
    metrics: int

    def only_number(self) -> Ports:
        """Return only the identifying number; 0 becomes a free one."""
        return Ports(0, self.grpc or Ports(0, 0, 0).choose_free().grpc, 0)

    def choose_free(self) -> Ports:
        """Return these ports, with a free one for each 0. Raises SetupError that names the flag of a port in use.

        Another program may take a free port before the server does: Triton cannot be given an open socket.
        """
        flags = (("--http-port", self.http), ("--grpc-port", self.grpc), ("--metrics-port", self.metrics))
        with contextlib.ExitStack() as stack:
            chosen: list[int] = []
            for flag, port in flags:
                one = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    one.bind((HOST, port))
                    one.listen()  # Linux lets two sockets with SO_REUSEADDR bind one port as long as neither listens
                except OSError as error:
                    raise SetupError(
                        f"port {port} on {HOST} cannot be used for Triton ({error.strerror}): choose another with"
                        f" {flag} (0 picks a free one), or stop the program that uses it"
                    ) from None
                chosen.append(one.getsockname()[1])
        return Ports(*chosen)


@dataclass(frozen=True, slots=True)
class Command:
    """The command of a server: the same for every start except the shared memory prefix.

    Access to a Triton allows running code through models, and its only keys are on its command line, which every user
    can read. So it listens only on `socket`, in a folder that only this user may enter; if that is empty, on the
    loopback's `ports`, open to every local user.
    """

    distribution: Distribution
    environment: Environment | None
    repository: Path
    ports: Ports
    exit_timeout_s: float
    load: tuple[str, ...] = ()
    socket: str = ""

    def arguments(self, shm_prefix: str) -> list[str]:
        command = [
            str(self.distribution.binary),
            f"--model-repository={self.repository}",
            "--model-control-mode=explicit",
            f"--backend-directory={self.distribution.backends}",
            f"--cache-directory={self.distribution.caches}",
            *self._listen_flags(),
            # A stopping server waits this long if a model's stub process is dead.
            f"--exit-timeout-secs={max(1, round(self.exit_timeout_s))}",
        ]
        if "python" in self.distribution.platforms():
            command += [f"--backend-config=python,shm-region-prefix-name={shm_prefix}"]
            command += [f"--backend-config=python,shm-default-byte-size={_SHM_BYTES}"]
        return command + [f"--load-model={name}" for name in self.load]

    def _listen_flags(self) -> list[str]:
        if not self.socket:
            return [
                f"--http-address={HOST}",
                f"--grpc-address={HOST}",
                f"--metrics-address={HOST}",
                f"--http-port={self.ports.http}",
                f"--grpc-port={self.ports.grpc}",
                f"--metrics-port={self.ports.metrics}",
            ]
        # The server appends a colon and the port to the address: together they are the path.
        place, _, number = self.socket.rpartition(":")
        return ["--allow-http=false", "--allow-metrics=false", f"--grpc-address=unix:{place}", f"--grpc-port={number}"]


def new_shm_prefix(port: int) -> str:
    """Return a unique prefix: concurrent and successive servers must not share files in /dev/shm."""
    return f"{SHM_MARK}{port}_{secrets.token_hex(4)}_"


def spawn(arguments: Sequence[str], environment: Environment | None, log: int) -> ChildProcess:
    """Start a server that dies with this thread.

    `log`: an open file for all its output. Raises SetupError.
    """
    command = [sys.executable, "-I", "-S", parent_process.__file__, str(os.getpid()), *arguments]
    try:
        return ChildProcess(command, output=log, env=server_environment(environment))
    except OSError as error:
        raise SetupError(f"{arguments[0]} cannot be started: {error.strerror}") from error


async def wait_ready(process: ChildProcess, url: str, ports: Sequence[int] = ()) -> str | None:
    """Wait until the server at `url` is ready and listens on `ports`, which it opens later; return its version, None if
    its process has ended. There is no timeout."""
    while process.returncode is None:
        version = await asyncio.to_thread(_ready_version, url)
        if version is not None and await asyncio.to_thread(_is_listening, ports):
            return version
        await asyncio.sleep(_POLL_S)
    return None


def _ready_version(url: str) -> str | None:
    """Return the version of a ready server, else None. Blocks."""
    # Not `Client`: if its channel is the process's last one, closing it makes the loop wait for gRPC's thread.
    with grpc.insecure_channel(grpc_target(url), options=OPTIONS) as channel:
        try:
            ready = _call(channel, "ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse)
            if not ready.ready:
                return None
            return _call(channel, "ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse).version
        except grpc.RpcError:
            return None


def _is_listening(ports: Sequence[int]) -> bool:
    try:
        for port in ports:
            socket.create_connection((HOST, port), _CALL_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _call(channel: grpc.Channel, name: str, request: Message, kind: type[R]) -> R:
    call: Any = channel.unary_unary(SERVICE + name, lambda message: message.SerializeToString(), kind.FromString)
    answer: R = call(request, timeout=_CALL_TIMEOUT_S)
    return answer


async def end_process(process: ChildProcess, patience_s: float) -> None:
    """Send SIGTERM, and SIGKILL to it and its models' processes if it has not ended `patience_s` later."""
    process.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            await process.wait()
    if process.returncode is None:
        # Not yet reaped, so the number still belongs to it and its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


class CrashWatch:
    """Looks for a server that hangs in its handler of a fatal signal: the handler allocates memory, which waits forever
    if the crash came from the allocator. `log`: the server's output, read from its present end on."""

    def __init__(self, process: ChildProcess, log: Path) -> None:
        self._pid = process.pid
        self._log = log
        self._read = log.stat().st_size if log.exists() else 0
        self._unread = b""
        self._has_crashed = False

    def is_in_handler(self) -> bool:
        """Return whether the server has logged a fatal signal and a thread of it still handles one: a model could have
        printed that line. Blocks."""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(self._read)
            while not self._has_crashed and (data := file.read(1 << 20)):
                self._read += len(data)
                self._has_crashed = _CRASH_LINE.search(self._unread + data) is not None
                self._unread = data[-_CRASH_LINE_BYTES:]
        return self._has_crashed and any(blocked & _FATAL for blocked in _blocked_signals(self._pid))


def _blocked_signals(pid: int) -> Iterator[int]:
    """Yield the mask of each thread. A signal is blocked while its handler runs."""
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):
            if (found := _BLOCKED.search(status.read_bytes())) is not None:
                yield int(found[1], 16)


def describe_exit(code: int | None) -> str:
    """Describe how a process ended."""
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
