"""Starts the processes, starts them again when they end, and stops them all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

SETUP_FAILED = 100
"""Exit codes from here on: the process cannot serve, and the code of the command is the rest."""
STABLE_S = 10.0
"""A process that ran for this long is started again at once."""
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 5.0
KILL_S = 5.0
"""Time beyond the drain that a process has to end."""

TICK_S = 1.0
"""Interval of the model process's signs of life."""
HANG_TICKS = 60
"""Intervals without one, after the first, after which the model process is killed. Counted, not timed: of a machine or
a container that was suspended, all processes were."""

logger = logging.getLogger("shoal.workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One of the processes. `module` is run with `arguments`; `payload` comes on its standard input, `files` are the
    descriptors that it inherits, under the same numbers."""

    name: str
    module: str
    arguments: Sequence[str]
    payload: bytes
    files: Sequence[int]


class Supervisor:
    """Runs `models` and `fronts`. `drain_s`: how long requests in flight may take after a stop. `pulse`: the end of a
    pipe, non-blocking, to which the model process writes a byte every TICK_S; without it, nobody notices if that
    hangs."""

    def __init__(self, models: Program, fronts: Sequence[Program], drain_s: float, *, pulse: int | None = None) -> None:
        self._models = models
        self._fronts = fronts
        self._drain_s = drain_s
        self._pulse = pulse
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._threads = ThreadPoolExecutor(1 + len(fronts), "processes")
        self._has_restarted = False
        self._failure: int | None = None

    async def run(self, stop: asyncio.Event) -> int:
        """Run until `stop` is set, or the models cannot be served at all. Returns the exit code."""
        tasks = [asyncio.create_task(self._keep(program, stop)) for program in (self._models, *self._fronts)]
        watching = asyncio.create_task(self._kill_if_hanging())
        try:
            await stop.wait()
            watching.cancel()
            for process in self._processes.values():
                process.terminate()
            _, late = await asyncio.wait(tasks, timeout=self._drain_s + KILL_S)
            if late:
                logger.warning("%s did not end in time and are killed", ", ".join(self._processes))
        finally:
            watching.cancel()
            stop.set()  # else what is killed would be started again
            for process in self._processes.values():
                process.kill()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._threads.shutdown(wait=False)
        return self._failure or 0

    async def _kill_if_hanging(self) -> None:
        """Kill the model process when it gives no sign of life any more; `_keep` starts it again."""
        alive: subprocess.Popen[bytes] | None = None
        missed = 0
        while self._pulse is not None:
            await asyncio.sleep(TICK_S)
            process = self._processes.get(self._models.name)
            if _has_input(self._pulse):
                alive, missed = process, 0
            elif process is not None and process is alive:
                missed += 1
                if missed == HANG_TICKS:
                    logger.error("%s has hung for %g s and is killed", self._models.name, HANG_TICKS * TICK_S)
                    process.kill()

    async def _keep(self, program: Program, stop: asyncio.Event) -> None:
        delay = 0.0
        while not stop.is_set():
            began = time.monotonic()
            try:
                code = await self._run_once(program)
                how = _describe_end(code)
            except OSError as error:  # no memory or no descriptors, perhaps only now
                code, how = 1, f"it cannot be started: {error.strerror}"
            if stop.is_set():
                return
            lived = time.monotonic() - began
            if program is self._models:
                if code >= SETUP_FAILED and not self._has_restarted:
                    self._failure = code - SETUP_FAILED
                    stop.set()
                    return
                self._has_restarted = True
            delay = 0.0 if lived >= STABLE_S else min(max(2 * delay, FIRST_DELAY_S), MAX_DELAY_S)
            logger.error("%s ended (%s): starting it again", program.name, how)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await stop.wait()

    async def _run_once(self, program: Program) -> int:
        if program is self._models and self._pulse is not None:
            _has_input(self._pulse)  # a last sign of life of the process before is none of this one
        self._processes[program.name] = process = _start(program)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, _wait, process, program.payload)
        finally:
            del self._processes[program.name]


def _start(program: Program) -> subprocess.Popen[bytes]:
    """Start a process from the main thread: it ends with the thread that started it."""
    return subprocess.Popen(
        [sys.executable, "-m", program.module, *program.arguments],
        stdin=subprocess.PIPE,
        pass_fds=program.files,
        start_new_session=True,  # Ctrl-C in a terminal reaches only the supervisor
    )


def _wait(process: subprocess.Popen[bytes], payload: bytes) -> int:
    """Give a process its input, and return its exit code once it has ended."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # it may end first
        process.stdin.write(payload)
    return process.wait()


def _has_input(descriptor: int) -> bool:
    """Read all that has arrived, and return whether it was anything."""
    try:
        return bool(os.read(descriptor, 65536))
    except BlockingIOError:
        return False


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
