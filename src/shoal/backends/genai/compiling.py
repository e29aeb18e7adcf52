"""Tries guides in a separate process before the model's process compiles them.

The library compiles a guide without any limit of time or memory, and cannot be interrupted. A separate process
(`guide_trial`) therefore compiles each guide first, one at a time, within limits of time and memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import signal
import subprocess
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from shoal.backends.base.child_process import ChildProcess
from shoal.backends.genai.messages import LENGTH, Verdict
from shoal.backends.genai.process import spawn_process
from shoal.decoding import msgpack_decoder
from shoal.errors import Crashed, InvalidValue, Overloaded, TransportFailed
from shoal.types import Guide

_VERDICT = msgpack_decoder(Verdict)

LIMIT_S = 5.0
"""Maximum seconds to compile a guide. With a vocabulary of 128,000 tokens, a text of up to 200 letters takes 3."""

GRACE_S = 1.0
"""Seconds after the process's own alarm until the gateway kills it."""

OPEN_S = 60.0
"""Maximum seconds until the process is ready: a large vocabulary takes seconds."""

MAX_WAITING = 64
"""Maximum guides in trial or waiting for it."""

MAX_REMEMBERED = 256
"""Maximum remembered trial results."""

REJECTION_TTL_S = 60.0
"""Seconds until a rejected guide may be tried again: the trial may have been slow because of the machine's load."""


class GuideChecker:
    """Tries the guides of one model. `path`: the opened model; `prepare` is awaited with each guide that passed, before
    its first use."""

    def __init__(
        self,
        path: Path,
        vocabulary: int,
        prepare: Callable[[Guide], Awaitable[None]],
        *,
        limit_s: float | None = None,
    ) -> None:
        self._path = path
        self._vocabulary = vocabulary
        self._prepare = prepare
        self._limit_s = LIMIT_S if limit_s is None else limit_s
        self._verdicts: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._trials: dict[bytes, _PendingTrial] = {}
        self._trial_lock = asyncio.Lock()
        self._child: asyncio.Task[_TrialProcess] | None = None
        self._closed = False
        self.size = 0
        """Bytes that the compiled guides occupy in the model's process, which keeps them."""

    @property
    def pid(self) -> int | None:
        """The process id of the trial process, None if none is ready."""
        child = self._child
        if child is None or not child.done() or child.cancelled() or child.exception() is not None:
            return None
        return child.result().process.pid

    async def check(self, guide: Guide) -> None:
        """Return once the guide can be used with the model.

        Raises InvalidValue if it cannot, Overloaded if too many guides wait, Crashed if no trial process starts, and
        the errors of `prepare`. A trial that has not begun is cancelled with its last waiting request.
        """
        key = _key(guide)
        refused, until = self._verdicts.get(key, ("", 0.0))
        if until < asyncio.get_running_loop().time():
            refused = await self._await_trial(key, guide)
        else:
            self._verdicts.move_to_end(key)
        if refused:
            raise InvalidValue(refused, param=guide.field)

    @property
    def pending(self) -> int:
        """Number of trials that run or wait."""
        return len(self._trials)

    def knows(self, guide: Guide) -> bool:
        """Whether the guide was tried."""
        return _key(guide) in self._verdicts

    async def _await_trial(self, key: bytes, guide: Guide) -> str:
        """Return the reason for rejection, or "". Requests for the same guide share one trial."""
        running = self._trials.get(key)
        if running is None:
            if self._closed:
                raise TransportFailed("the model was unloaded during the request")
            if len(self._trials) >= MAX_WAITING:
                raise Overloaded("too many output formats are being compiled; try again", retry_after=self._limit_s)
            running = self._trials[key] = _PendingTrial()
            running.task = asyncio.create_task(self._run_trial(key, guide, running), name="guide")
            running.task.add_done_callback(lambda task: self._on_trial_done(key, task))
        running.waiting += 1
        try:
            return await asyncio.shield(running.task)
        except asyncio.CancelledError:
            if self._closed and running.task.cancelled():
                raise TransportFailed("the model was unloaded during the request") from None
            raise
        finally:
            running.waiting -= 1
            if not running.waiting and not running.has_started:
                running.task.cancel()
                self._trials.pop(key, None)

    def _on_trial_done(self, key: bytes, task: asyncio.Task[str]) -> None:
        if not task.cancelled():
            task.exception()  # mark it as retrieved: no request may be waiting
        if key in self._trials and self._trials[key].task is task:
            del self._trials[key]

    async def _run_trial(self, key: bytes, guide: Guide, running: _PendingTrial) -> str:
        async with self._trial_lock:
            running.has_started = True
            verdict = await self._get_verdict(guide)
            if not verdict.refused:
                await self._prepare(guide)
                self.size += verdict.size
        stands_s = REJECTION_TTL_S if verdict.refused else math.inf
        self._verdicts[key] = verdict.refused, asyncio.get_running_loop().time() + stands_s
        if len(self._verdicts) > MAX_REMEMBERED:
            self._verdicts.popitem(last=False)
        return verdict.refused

    async def _get_verdict(self, guide: Guide) -> Verdict:
        child = await self._ready_child()
        try:
            verdict = await child.try_guide(guide, self._limit_s + GRACE_S)
        except (asyncio.IncompleteReadError, OSError, TimeoutError) as gone:
            await self._replace(child)
            late = isinstance(gone, TimeoutError) or child.process.returncode == -signal.SIGALRM
            reason = f"takes longer than {self._limit_s:g} s" if late else "takes too much memory"
            return Verdict(
                refused=f"the output format {reason} to compile: use fewer repeats, lower or remove maximum lengths, "
                "or use fewer properties"
            )
        except asyncio.CancelledError:
            await child.end()
            raise
        if verdict.needs_restart:
            await self._replace(child)
        return verdict

    async def _ready_child(self) -> _TrialProcess:
        """Return the trial process, started by the first guide. Raises Crashed."""
        if self.pid is not None and self._child is not None:
            child = self._child.result()
            if child.process.returncode is not None:  # it was killed while idle
                await self._replace(child)
        if self._child is None:
            self._child = asyncio.create_task(_TrialProcess.spawn(self._path, self._vocabulary, self._limit_s))
        try:
            return await asyncio.shield(self._child)
        except Exception:  # after any failure, the next guide starts a new process
            self._child = None
            raise

    async def _replace(self, child: _TrialProcess) -> None:
        """Start the next process immediately, since a large vocabulary takes seconds."""
        await child.end()
        if not self._closed:
            self._child = asyncio.create_task(_TrialProcess.spawn(self._path, self._vocabulary, self._limit_s))

    async def aclose(self) -> None:
        """Cancel all trials and end the process."""
        self._closed = True
        tasks = [running.task for running in self._trials.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._child is not None:
            child, self._child = self._child, None
            if not child.done():
                child.cancel()
            (made,) = await asyncio.gather(child, return_exceptions=True)
            if isinstance(made, _TrialProcess):
                await made.end()


def _key(guide: Guide) -> bytes:
    return hashlib.sha256(f"{guide.kind}\0{guide.value}".encode()).digest()


class _PendingTrial:
    """A trial. `waiting`: number of waiting requests; `has_started`: it has left the queue."""

    task: asyncio.Task[str]

    def __init__(self) -> None:
        self.waiting = 0
        self.has_started = False


class _TrialProcess:
    """The trial process and the socket to it."""

    def __init__(self, process: ChildProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def spawn(cls, path: Path, vocabulary: int, limit_s: float) -> _TrialProcess:
        """Start a process and return it once it is ready. Raises Crashed."""
        try:
            process, reader, writer = await spawn_process(
                *("guide_trial", str(path), str(vocabulary), str(limit_s)),
                output=subprocess.DEVNULL,
                # every allocator arena reserves address space, and address space is limited here
                env=os.environ | {"MALLOC_ARENA_MAX": "2"},
            )
        except OSError as error:
            raise Crashed(
                f"the process that compiles output formats cannot be started: {error.strerror}; load the model again"
            ) from error
        child = cls(process, reader, writer)
        try:
            async with asyncio.timeout(OPEN_S):
                await child._read_verdict()
        except (asyncio.IncompleteReadError, OSError, TimeoutError):
            await child.end()
            raise Crashed("the process that compiles output formats did not start; try again") from None
        except BaseException:
            await child.end()
            raise
        return child

    async def try_guide(self, guide: Guide, patience_s: float) -> Verdict:
        """Return the verdict. Raises IncompleteReadError, OSError or TimeoutError if the process does not answer."""
        body = msgspec.msgpack.encode(guide)
        self._writer.write(LENGTH.pack(len(body)) + body)
        async with asyncio.timeout(patience_s):
            return await self._read_verdict()

    async def _read_verdict(self) -> Verdict:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return _VERDICT.decode(await self._reader.readexactly(length))

    async def end(self) -> None:
        """Kill the process if it is still running, and wait for its end."""
        self._writer.close()
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)  # process.kill() may reap the exit code before asyncio
        await self.process.wait()
