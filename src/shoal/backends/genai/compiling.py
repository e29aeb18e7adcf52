"""Guides are tried where they harm nobody, before the model's process hears of them.

The library compiles a guide for as long, and into as much memory, as it takes, and nothing stops it. So a process of
its own (`trial`) compiles each first, within limits of time and memory, one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import signal
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from shoal.backends.genai.messages import LENGTH, Verdict
from shoal.backends.genai.process import spawn_process
from shoal.decoding import msgpack_decoder
from shoal.errors import Crashed, InvalidValue, Overloaded, TransportFailed
from shoal.types import Guide

_VERDICT = msgpack_decoder(Verdict)

LIMIT_S = 5.0
"""How long a guide may compile. Large vocabularies need it: with 128,000 tokens a text of up to 200 letters takes 3."""

GRACE_S = 1.0
"""How much later than its own alarm the process is ended from here."""

OPEN_S = 60.0
"""How long the process may take to be ready: a large vocabulary takes seconds."""

MAX_WAITING = 64
"""Guides that are tried or wait for it."""

MAX_REMEMBERED = 256
"""Guides whose trial is remembered, with what came of it."""

REJECTION_TTL_S = 60.0
"""How long a refusal stands: it may have been the load of the machine that made a trial slow."""


class GuideChecker:
    """Of one model. `path`: as it was opened; `prepare` is awaited with each guide that passed, before the first
    request gets it."""

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
        self._known: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._running: dict[bytes, _PendingTrial] = {}
        self._turn = asyncio.Lock()
        self._child: asyncio.Task[_TrialProcess] | None = None
        self._closed = False
        self.size = 0
        """Bytes that the guides which passed take in the model's process, which keeps them."""

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one that is ready."""
        child = self._child
        if child is None or not child.done() or child.cancelled() or child.exception() is not None:
            return None
        return child.result().process.pid

    async def check(self, guide: Guide) -> None:
        """Returns when the guide may be given to the model.

        Raises InvalidValue for one that may not, Overloaded when too many wait, Crashed when there is no process, and
        what `prepare` raises. Who leaves gives up the place of a guide whose trial has not begun.
        """
        key = hashlib.sha256(f"{guide.kind}\0{guide.value}".encode()).digest()
        refused, until = self._known.get(key, ("", 0.0))
        if until < asyncio.get_running_loop().time():
            refused = await self._await_trial(key, guide)
        else:
            self._known.move_to_end(key)
        if refused:
            raise InvalidValue(refused, param=guide.field)

    async def _await_trial(self, key: bytes, guide: Guide) -> str:
        """What came of the trial that all who ask for this guide share."""
        running = self._running.get(key)
        if running is None:
            if self._closed:
                raise TransportFailed("the model was unloaded while it answered")
            if len(self._running) >= MAX_WAITING:
                raise Overloaded("too many forms of answers are being compiled; try again", retry_after=self._limit_s)
            running = self._running[key] = _PendingTrial()
            running.task = asyncio.create_task(self._run_trial(key, guide, running), name="guide")
            running.task.add_done_callback(lambda task: self._on_trial_done(key, task))
        running.waiting += 1
        try:
            return await asyncio.shield(running.task)
        except asyncio.CancelledError:
            if self._closed and running.task.cancelled():
                raise TransportFailed("the model was unloaded while it answered") from None
            raise
        finally:
            running.waiting -= 1
            if not running.waiting and not running.begun:
                running.task.cancel()
                self._running.pop(key, None)

    def _on_trial_done(self, key: bytes, task: asyncio.Task[str]) -> None:
        if not task.cancelled():
            task.exception()  # whoever waited for it has it; nobody may
        if key in self._running and self._running[key].task is task:
            del self._running[key]

    async def _run_trial(self, key: bytes, guide: Guide, running: _PendingTrial) -> str:
        async with self._turn:
            running.begun = True
            verdict = await self._get_verdict(guide)
            if not verdict.refused:
                await self._prepare(guide)
                self.size += verdict.size
        stands_s = REJECTION_TTL_S if verdict.refused else math.inf
        self._known[key] = verdict.refused, asyncio.get_running_loop().time() + stands_s
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
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
                refused=f"the form asked of the answer {reason} to compile: repeat less, lower the longest lengths or "
                "leave them out, or ask for fewer properties"
            )
        except asyncio.CancelledError:
            await child.end()
            raise
        if verdict.worn:
            await self._replace(child)
        return verdict

    async def _ready_child(self) -> _TrialProcess:
        """The process, which the first guide starts. Raises Crashed."""
        if self.pid is not None and self._child is not None:
            child = self._child.result()
            if child.process.returncode is not None:  # somebody ended it while it waited
                await self._replace(child)
        if self._child is None:
            self._child = asyncio.create_task(_TrialProcess.spawn(self._path, self._vocabulary, self._limit_s))
        try:
            return await asyncio.shield(self._child)
        except Exception:  # whatever it was, the next guide tries again
            self._child = None
            raise

    async def _replace(self, child: _TrialProcess) -> None:
        """Start the next process at once: a large vocabulary takes it seconds."""
        await child.end()
        if not self._closed:
            self._child = asyncio.create_task(_TrialProcess.spawn(self._path, self._vocabulary, self._limit_s))

    async def aclose(self) -> None:
        """Who waits is cancelled, and the process is ended."""
        self._closed = True
        tasks = [running.task for running in self._running.values()]
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


class _PendingTrial:
    """A trial. `waiting`: who asked for it; `begun`: it is no longer in the queue."""

    task: asyncio.Task[str]

    def __init__(self) -> None:
        self.waiting = 0
        self.begun = False


class _TrialProcess:
    """The process, and the socket to it."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def spawn(cls, path: Path, vocabulary: int, limit_s: float) -> _TrialProcess:
        """Ready to try guides. Raises Crashed."""
        try:
            process, reader, writer = await spawn_process(
                *("trial", str(path), str(vocabulary), str(limit_s)),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                # each arena of the allocator reserves address space, which is what is limited
                env=os.environ | {"MALLOC_ARENA_MAX": "2"},
            )
        except OSError as error:
            raise Crashed(f"forms of answers cannot be compiled: {error.strerror}; load the model again") from error
        child = cls(process, reader, writer)
        try:
            async with asyncio.timeout(OPEN_S):
                await child._read_verdict()
        except (asyncio.IncompleteReadError, OSError, TimeoutError):
            await child.end()
            raise Crashed("the process that compiles forms of answers does not start; try again") from None
        except BaseException:
            await child.end()
            raise
        return child

    async def try_guide(self, guide: Guide, patience_s: float) -> Verdict:
        """Raises IncompleteReadError, OSError or TimeoutError when the process does not live to answer."""
        body = msgspec.msgpack.encode(guide)
        self._writer.write(LENGTH.pack(len(body)) + body)
        async with asyncio.timeout(patience_s):
            return await self._read_verdict()

    async def _read_verdict(self) -> Verdict:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return _VERDICT.decode(await self._reader.readexactly(length))

    async def end(self) -> None:
        """Kill it, when it has not ended already."""
        self._writer.close()
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)  # process.kill() may take the exit code from asyncio
        await self.process.wait()
