"""One tritonserver process: its command line, its ports, and when it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.backends.triton.distribution import Distribution
from shoal.backends.triton.environment import Environment, surroundings
from shoal.backends.triton.state import SHM_MARK
from shoal.errors import SetupError

HOST = "127.0.0.1"
"""Triton asks nobody for a key, and whoever may load a model into it may run code: it stays on this machine."""

_SHM_BYTES = 4 << 20
"""A python model's first piece of shared memory, which grows by need; Triton's own default of 1 MB grows at once."""

_POLL_S = 0.05
_HTTP_TIMEOUT_S = 5.0
_GUARD = str(Path(__file__).with_name("guard.py"))


@dataclass(frozen=True, slots=True)
class Ports:
    http: int
    grpc: int
    metrics: int

    def free(self) -> Ports:
        """These ports, with free ones for each 0. Raises SetupError that names the flag of one that is in use.

        A free port is only likely to stay so until the server takes it: Triton cannot be given an open socket.
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
                        f" {flag} (0 takes a free one), or stop the program that has it"
                    ) from None
                chosen.append(one.getsockname()[1])
        return Ports(*chosen)


@dataclass(frozen=True, slots=True)
class Command:
    """What is run: the same for every start of a server but for its shared memory."""

    distribution: Distribution
    environment: Environment | None
    repository: Path
    ports: Ports
    exit_timeout_s: float
    load: tuple[str, ...] = ()

    def arguments(self, shm_prefix: str) -> list[str]:
        command = [
            str(self.distribution.binary),
            f"--model-repository={self.repository}",
            "--model-control-mode=explicit",
            f"--backend-directory={self.distribution.backends}",
            f"--cache-directory={self.distribution.caches}",
            f"--http-address={HOST}",
            f"--grpc-address={HOST}",
            f"--metrics-address={HOST}",
            f"--http-port={self.ports.http}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-port={self.ports.metrics}",
            # A stub that died keeps a stopping server waiting for all of this time.
            f"--exit-timeout-secs={max(1, round(self.exit_timeout_s))}",
        ]
        if "python" in self.distribution.platforms():
            command += [f"--backend-config=python,shm-region-prefix-name={shm_prefix}"]
            command += [f"--backend-config=python,shm-default-byte-size={_SHM_BYTES}"]
        return command + [f"--load-model={name}" for name in self.load]


def new_shm_prefix(port: int) -> str:
    """Servers side by side, and one after another, must not meet in /dev/shm."""
    return f"{SHM_MARK}{port}_{secrets.token_hex(4)}_"


async def spawn(arguments: Sequence[str], environment: Environment | None, log: int) -> asyncio.subprocess.Process:
    """Start a server that ends with this thread, in a session of its own: a terminal's Ctrl-C is Shoal's to handle.

    `log`: an open file for all that it writes. Raises SetupError.
    """
    try:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", _GUARD, str(os.getpid())),
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=surroundings(environment),
            start_new_session=True,
        )
    except OSError as error:
        raise SetupError(f"{arguments[0]} cannot be started: {error.strerror}") from error


async def wait_ready(process: asyncio.subprocess.Process, port: int) -> bool:
    """Until the server at that HTTP port is ready: True; False when its process has ended. Has no end of its own."""
    while process.returncode is None:
        with contextlib.suppress(OSError, TimeoutError):
            if (await get(port, "/v2/health/ready"))[0] == 200:
                return True
        await asyncio.sleep(_POLL_S)
    return False


async def version(port: int) -> str:
    """The server's version; empty when it does not say."""
    try:
        _, body = await get(port, "/v2")
        return str(msgspec.json.decode(body, type=dict[str, Any]).get("version", ""))
    except (OSError, TimeoutError, msgspec.DecodeError):
        return ""


async def get(port: int, path: str) -> tuple[int, bytes]:
    """(status, body) of one GET on the loopback. Raises OSError and TimeoutError."""
    async with asyncio.timeout(_HTTP_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n\r\n".encode())
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
    words = head.split(None, 2)
    return (int(words[1]) if len(words) > 1 and words[1].isdigit() else 0), body


async def end(process: asyncio.subprocess.Process, patience_s: float) -> None:
    """SIGTERM, and SIGKILL to it and its models' processes when it has not ended `patience_s` later."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            await process.wait()
    if process.returncode is None:
        # Not yet waited for, so that the number is still its own, and its group's.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def describe(code: int | None) -> str:
    """How a process ended, in words."""
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
