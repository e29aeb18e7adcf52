"""A tritonserver that Shoal manages: found or fetched, started only for this user, supervised, restarted when it dies.

Clients load the models (explicit model control): a restarted server has none, and its clients load theirs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from shoal.backends.base.child_process import ChildProcess
from shoal.backends.triton import distribution, environment
from shoal.backends.triton.build_folder import Progress, SilentProgress
from shoal.backends.triton.process import (
    Command,
    CrashWatch,
    Ports,
    describe_exit,
    end_process,
    new_shm_prefix,
    spawn,
    wait_ready,
)
from shoal.backends.triton.run_state import HOST, Phase, RunFolder, State, find_process, remove_remains
from shoal.downloads.cancellation import run_in_thread
from shoal.errors import SetupError

_log = logging.getLogger(__name__)

_TRIES = 5
"""Attempts at free ports: rarely, another program takes one before Triton starts."""

_PORT_ERRORS = ("already in use", "Address already in use")
_LOG_LINES = 20
_CRASH_LOOK_S = 5.0
"""Seconds between looks for a server that hangs while it dies; two in a row must find it."""
_MAX_LOG_BYTES = 16 << 20
_KILL_AFTER_S = 3.0
"""Added to the server's own exit timeout, by which it should have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonOptions:
    """How a server is run. `home`: Shoal's data folder. Times in seconds.

    `open_ports`: it listens on three ports of the loopback, for every program and user of this machine; else on a Unix
    socket of this user, and `grpc_port` is a number that identifies it. Ports: 0 takes a free one.

    `restarts`: maximum restarts in a row of a server that died, after `backoff_s`, twice that, and so on up to
    `max_backoff_s`; the count starts again after it was ready for `stable_s`.
    """

    home: Path
    repository: Path | None = None
    open_ports: bool = False
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    offline: bool = False
    load: tuple[str, ...] = ()
    owner: Literal["up", "serve"] = "serve"
    start_timeout_s: float = 60.0
    exit_timeout_s: float = 5.0
    restarts: int = 5
    backoff_s: float = 0.5
    max_backoff_s: float = 15.0
    stable_s: float = 60.0

    @property
    def root(self) -> Path:
        return self.home.expanduser().absolute() / "triton"

    @property
    def folder(self) -> Path:
        """The model repository: the configured one, else Shoal's own."""
        return self.repository.expanduser().absolute() if self.repository else self.root / "repository"

    @property
    def run(self) -> Path:
        return self.root / "run"


@dataclass(frozen=True, slots=True)
class Installation:
    """What to run; `environment` None: the distribution has its own Python."""

    distribution: distribution.Distribution
    environment: environment.Environment | None


def obtain(
    options: TritonOptions, progress: Progress | None = None, stop: threading.Event | None = None
) -> Installation:
    """Return this machine's tritonserver, else a fetched one with its Python. Blocks, for minutes if it must fetch.

    Raises SetupError (unsupported machine, no libpython), SourceError (not fetched), Cancelled once `stop` is set.
    """
    if (found := distribution.find_installed()) is not None:
        return Installation(found, None)
    progress, stop = progress or SilentProgress(), stop or threading.Event()
    distribution.check_machine()
    python = environment.find_interpreter(environment.find_candidates())
    fetched = distribution.fetch(
        options.root / "distributions", python.version, offline=options.offline, progress=progress, stop=stop
    )
    made = environment.build(
        options.root / "environments", python, offline=options.offline, progress=progress, stop=stop
    )
    return Installation(fetched, made)


@asynccontextmanager
async def run_triton(options: TritonOptions, progress: Progress | None = None) -> AsyncIterator[TritonServer]:
    """Yield a server that is ready; stop it on exit. The kernel kills it if this process dies before.

    Raises SetupError (cannot run here, port in use, died or too slow: with the end of its log), SourceError, Cancelled.
    """
    stop = threading.Event()
    installed = await run_in_thread(lambda: obtain(options, progress, stop), stop.set)
    server = await _start(options, installed)
    try:
        yield server
    finally:
        await server.aclose()


async def _start(options: TritonOptions, installed: Installation) -> TritonServer:
    requested = Ports(options.http_port, options.grpc_port, options.metrics_port)
    if not options.open_ports:
        requested = Ports(0, options.grpc_port, 0)
    taken = f"another Shoal process runs, starts or stops a Triton on port {requested.grpc}: see `shoal triton status`"
    if requested.grpc and await asyncio.to_thread(RunFolder(options.run / str(requested.grpc)).is_supervised):
        raise SetupError(taken)
    for attempt in range(_TRIES):
        ports = await asyncio.to_thread(requested.choose_free if options.open_ports else requested.only_number)
        folder = RunFolder(options.run / str(ports.grpc))
        if not await asyncio.to_thread(folder.claim):
            continue
        server = await asyncio.to_thread(TritonServer, options, installed, ports, folder)
        try:
            await server.start()
        except PortTaken:
            if attempt == _TRIES - 1 or ports == requested:
                raise
        else:
            return server
    raise SetupError(taken)


class PortTaken(SetupError):
    """Another program took a port between its choice and the server's start."""


class TritonServer:
    """One server and its supervision, for one event loop. Made by `run_triton`; the constructor reads files.

    `url` is the target of its gRPC API; `http_url` is host:port, for a server with open ports. They stay the same after
    a restart.
    """

    def __init__(self, options: TritonOptions, installed: Installation, ports: Ports, folder: RunFolder) -> None:
        self._options = options
        self._installed = installed
        self._ports = ports
        self._folder = folder
        socket = "" if options.open_ports else folder.choose_socket(ports.grpc)
        self._command = Command(
            installed.distribution,
            installed.environment,
            options.folder,
            ports,
            options.exit_timeout_s,
            options.load,
            socket,
        )
        self._process: ChildProcess | None = None
        self._crash_watch: CrashWatch | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._state = State(
            owner=options.owner,
            supervisor=find_process(os.getpid()),
            http_port=ports.http,
            grpc_port=ports.grpc,
            metrics_port=ports.metrics,
            socket=socket,
            repository=str(options.folder),
            binary=str(installed.distribution.binary),
            since=time.time(),
        )
        self._ready_at = 0.0
        self._platforms = installed.distribution.platforms()

    @property
    def url(self) -> str:
        return self._state.url

    @property
    def http_url(self) -> str:
        return f"{HOST}:{self._ports.http}"

    @property
    def repository(self) -> Path:
        return self._options.folder

    @property
    def platforms(self) -> tuple[str, ...]:
        """Its backends by name: "python", "onnxruntime", ..."""
        return self._platforms

    @property
    def python(self) -> Path | None:
        """The interpreter of python models; None if the distribution has its own."""
        made = self._installed.environment
        return None if made is None else made.programs / "python"

    @property
    def pid(self) -> int | None:
        """The id of the process that runs now; None between restarts."""
        return self._state.server.pid if self._state.server else None

    @property
    def phase(self) -> Phase:
        return self._state.phase

    @property
    def version(self) -> str:
        return self._state.version

    @property
    def restarts(self) -> int:
        return self._state.restarts

    @property
    def log(self) -> Path:
        return self._folder.log

    async def log_tail(self, lines: int = _LOG_LINES) -> str:
        return await asyncio.to_thread(self._folder.tail, lines)

    async def start(self) -> None:
        """Start it for the first time; release the folder if that fails. Raises SetupError, PortTaken."""
        try:
            await asyncio.to_thread(self._prepare)
            await self._launch()
        except BaseException:  # a cancelled start, too, must leave neither a process nor a claimed folder
            await self._end(keep_log=True)
            raise
        self._watch_task = asyncio.create_task(self._watch(), name=f"triton {self.url}")

    async def wait(self) -> None:
        """Wait without end while the server is supervised. Raises SetupError when supervision gives up."""
        assert self._watch_task is not None, "wait() comes after start()"
        await asyncio.shield(self._watch_task)
        raise SetupError(self._state.error)

    async def aclose(self) -> None:
        """Stop it: SIGTERM, later SIGKILL."""
        # A free port serves one run, so its log is not kept; that of a configured port is.
        await self._end(keep_log=self._options.grpc_port != 0)

    def _prepare(self) -> None:
        try:
            self._options.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self._folder.log.unlink()
        except OSError as error:
            raise SetupError(
                f"{error.filename}: {error.strerror}; name another folder with --repository or SHOAL_HOME"
            ) from error

    async def _launch(self) -> None:
        """Start a process and wait until it is ready. Raises SetupError with the end of the log."""
        prefix = new_shm_prefix(self._ports.grpc)
        arguments = await asyncio.to_thread(self._command.arguments, prefix)
        log = await asyncio.to_thread(_open_log, self._folder.log)
        try:
            self._process = spawn(arguments, self._installed.environment, log)
        finally:
            os.close(log)
        self._crash_watch = await asyncio.to_thread(CrashWatch, self._process, self._folder.log)
        await self._update_state(server=await asyncio.to_thread(find_process, self._process.pid), shm_prefix=prefix)
        opened = (self._ports.http, self._ports.metrics) if self._options.open_ports else ()
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                found = await wait_ready(self._process, self.url, opened)
        except TimeoutError:
            tail = await self.log_tail()
            await end_process(self._process, 0)
            raise SetupError(
                f"tritonserver was not ready after {self._options.start_timeout_s:g} s; the end of {self.log}:\n{tail}"
            ) from None
        if found is None:
            tail = await self.log_tail()
            kind = PortTaken if any(clash in tail for clash in _PORT_ERRORS) else SetupError
            how = describe_exit(self._process.returncode)
            raise kind(f"tritonserver {how} before it was ready; the end of {self.log}:\n{tail}")
        self._ready_at = time.monotonic()
        await self._update_state(phase="ready", version=found)
        _log.info("Triton %s is ready at %s, pid %d", self._state.version, self.url, self._process.pid)

    async def _watch(self) -> None:
        """Restart the server whenever it ends, until it ends too often in a row."""
        failures = 0
        while True:
            code = await self._wait_for_end()
            stable = time.monotonic() - self._ready_at >= self._options.stable_s
            failures = 1 if self._state.phase == "ready" and stable else failures + 1
            why = f"tritonserver {describe_exit(code)}"
            await asyncio.to_thread(remove_remains, self._state)
            if failures > self._options.restarts:
                await self._give_up(f"{why} {failures} times in a row; it will not be restarted. See {self.log}")
                return
            pause = min(self._options.backoff_s * 2 ** (failures - 1), self._options.max_backoff_s)
            await self._update_state(server=None, phase="restarting", restarts=self._state.restarts + 1)
            await self._log_note(f"{why}; restarting in {pause:g} s ({failures} of {self._options.restarts})")
            await asyncio.sleep(pause)
            try:
                await self._launch()
            except (SetupError, OSError) as error:
                # Its process has ended or could not be started: the next iteration counts that, and waits longer.
                words = error.message if isinstance(error, SetupError) else f"tritonserver cannot be started: {error}"
                await self._log_note(words.partition("\n")[0])

    async def _wait_for_end(self) -> int:
        """Return the exit code of the process once it has ended; kill it if it hangs while it dies."""
        process, watch, looks = self._process, self._crash_watch, 0
        assert process is not None and watch is not None, "the watch begins with a running server"
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CRASH_LOOK_S):
                    return await process.wait()
            looks = looks + 1 if await asyncio.to_thread(watch.is_in_handler) else 0
            if looks == 2:
                await self._log_note("tritonserver hangs in its handler of a fatal signal; killing it")
                await end_process(process, 0)

    async def _give_up(self, why: str) -> None:
        await self._update_state(server=None, phase="failed", error=why)
        await self._log_note(why)

    async def _log_note(self, line: str) -> None:
        _log.warning("Triton at %s: %s", self.url, line)
        await asyncio.to_thread(self._folder.note, line)

    async def _update_state(self, **changes: object) -> None:
        """Change the state, in memory and on disk."""
        self._state = msgspec.structs.replace(self._state, **changes)
        try:
            await asyncio.to_thread(self._folder.write, self._state)
        except OSError as error:
            _log.warning("%s: %s; `shoal triton status` will not list this server", error.filename, error.strerror)

    async def _end(self, *, keep_log: bool) -> None:
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.wait({self._watch_task})
        if self._process is not None and self._process.returncode is None:
            await self._update_state(phase="stopping")
            await end_process(self._process, self._options.exit_timeout_s + _KILL_AFTER_S)
        await asyncio.to_thread(remove_remains, self._state)
        await asyncio.to_thread(self._folder.release, keep_log=keep_log)


def _open_log(path: Path) -> int:
    """Open a log for appending; truncate one above 16 MiB, as after many restarts."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        if path.stat().st_size > _MAX_LOG_BYTES:
            flags |= os.O_TRUNC
    try:
        return os.open(path, flags, 0o644)
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror}; check the folder that SHOAL_HOME names") from error
