"""State on disk of the servers that this user's Shoal runs: `$SHOAL_HOME/triton/run/<gRPC port>/`.

    lock         held by the process that supervises the server, as long as it lives
    grpc:<port>  the server's socket, unless its ports are open; no other user can enter the folder
    state.json   ports, process and repository; read by `shoal triton status`
    log          the server's output, with Shoal's lines about restarts

The lock shows whether a server is supervised: the kernel releases it however its process ends. A process id alone
is not enough, because ids are reused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from shoal.decoding import json_decoder
from shoal.downloads.disk import try_lock

Phase = Literal["starting", "ready", "restarting", "stopping", "failed"]
HOST = "127.0.0.1"
"""Address that a server with open ports listens on."""

_SOCKET_BYTES = 107
"""Maximum length of a Unix socket's path, in bytes."""

_SOCKET_FOLDER = "shoal-triton-"
_TAIL_BYTES = 64 << 10
_TRIES = 4


class Process(msgspec.Struct, frozen=True):
    """A process by id and start (clock ticks since boot), a pair that is never reused."""

    pid: int
    started: int

    def is_alive(self) -> bool:
        return process_start(self.pid) == self.started

    def signal(self, number: int) -> bool:
        """Send a signal to exactly this process; return False if it has ended."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.is_alive():
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True


def find_process(pid: int) -> Process:
    return Process(pid, process_start(pid) or 0)


def process_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is none, or only a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may contain spaces and brackets
    return None if fields[0] in "ZX" else int(fields[19])


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one server, started at `since` (unix seconds) by `shoal triton up` or `shoal serve --triton`
    (`owner`). `socket`: path of the server's gRPC socket, its only one; empty if its ports are open."""

    owner: Literal["up", "serve"]
    supervisor: Process
    server: Process | None = None
    phase: Phase = "starting"
    http_port: int
    grpc_port: int
    metrics_port: int
    socket: str = ""
    repository: str
    binary: str
    version: str = ""
    shm_prefix: str = ""
    since: float
    restarts: int = 0
    error: str = ""

    @property
    def url(self) -> str:
        """The target of its gRPC API, as `Client` takes it."""
        return self.socket or f"{HOST}:{self.grpc_port}"


_STATE = json_decoder(State)


class RunFolder:
    """The run folder of one server. Every method reads or writes files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log"
        self._lock: int | None = None
        self._socket = ""

    def claim(self) -> bool:
        """Take the folder for this process and clean up after a dead one; return False if another process holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        for _ in range(_TRIES):
            if try_lock(lock):
                break
            time.sleep(0.05)  # `is_supervised` of another process holds it briefly
        else:
            os.close(lock)
            return False
        self._lock = lock
        if (state := self.read()) is not None:
            remove_remains(state)
            remove_socket(state.socket)
        return True

    def choose_socket(self, number: int) -> str:
        """Return the path of the socket to listen on: in this folder or, if that path is too long, in a new one under
        the system's folder for temporary files. Both are closed to other users."""
        place = self.path / f"grpc:{number}"
        if len(os.fsencode(place)) > _SOCKET_BYTES:
            place = Path(tempfile.mkdtemp(prefix=_SOCKET_FOLDER), place.name)
        self._socket = str(place)
        return self._socket

    def release(self, *, keep_log: bool) -> None:
        """Release the folder and delete the state, and the log unless `keep_log`."""
        try:
            remove_socket(self._socket)
            (self.path / "state.json").unlink(missing_ok=True)
            if not keep_log:
                shutil.rmtree(self.path, ignore_errors=True)
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def is_supervised(self) -> bool:
        """Return whether a living process holds the folder."""
        try:
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return not try_lock(lock)
        finally:
            os.close(lock)

    def write(self, state: State) -> None:
        file = tempfile.NamedTemporaryFile(dir=self.path, prefix=".state-", delete=False)  # noqa: SIM115 - closed below
        try:
            with file:
                file.write(msgspec.json.encode(state))
            os.replace(file.name, self.path / "state.json")
        except OSError:
            Path(file.name).unlink(missing_ok=True)
            raise

    def read(self) -> State | None:
        try:
            return _STATE.decode((self.path / "state.json").read_bytes())
        except (OSError, msgspec.DecodeError):
            return None

    def tail(self, lines: int) -> str:
        """Return the last lines of the log, at most 64 KiB; empty if there is none."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def note(self, line: str) -> None:
        """Append a line from Shoal to the log."""
        with contextlib.suppress(OSError), self.log.open("a") as file:
            file.write(f"shoal: {line}\n")


def run_folders(root: Path) -> Iterator[RunFolder]:
    """Yield the folders of servers under `root`, by port."""
    with contextlib.suppress(OSError):
        found = sorted((int(path.name), path) for path in root.iterdir() if path.name.isdecimal())
        yield from (RunFolder(path) for _, path in found)


def remove_remains(state: State) -> None:
    """End the processes and delete the shared memory that a killed server may have left."""
    if state.server is not None:
        end_session(state.server)
    remove_shared_memory(state.shm_prefix)


def remove_socket(path: str) -> None:
    """Delete a server's socket, and the folder that was made only for it."""
    if not path:
        return
    Path(path).unlink(missing_ok=True)
    if Path(path).parent.name.startswith(_SOCKET_FOLDER):
        with contextlib.suppress(OSError):
            Path(path).parent.rmdir()


def end_session(leader: Process, proc: Path = Path("/proc")) -> None:
    """Kill a server and every process of its session: a model's process checks for the server only between requests.

    A session's number is not reused while it has processes, so no other program can be hit.
    """
    now = process_start(leader.pid)
    if now is not None and now != leader.started:
        return  # the number was reused, so the session was empty
    for path in proc.iterdir():
        if path.name.isdecimal() and _session(path) == leader.pid:
            find_process(int(path.name)).signal(signal.SIGKILL)


def _session(path: Path) -> int | None:
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[3])
    except OSError:  # it ended meanwhile
        return None


def remove_shared_memory(prefix: str, folder: Path = Path("/dev/shm")) -> None:
    """Delete the shared memory that a killed server left, by its unique prefix."""
    if not prefix.startswith(SHM_MARK):
        return
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{prefix}*"):
            path.unlink(missing_ok=True)


SHM_MARK = "shoal_triton_"
"""Start of every prefix, so that no file of another program matches."""
