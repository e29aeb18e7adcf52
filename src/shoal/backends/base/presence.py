"""Whether a server behind an engine is in service: noticed by its calls, and by a watch that brings it back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType

from shoal.errors import InternalError, ShoalError, TransportFailed

SLOW_LOOKS = 3
"""So many unanswered looks in a row take a server out of service: one may be late when the server is busy."""


class Presence:
    """One server, called `name` in the log: `ready` says whether it serves, `reason` why it does not.

    `look` raises a ShoalError for a server that is not well. `admit` is awaited each time that it comes (back), and
    raises one to keep it out. `with presence:` is around each call, which `aclose` waits for; one that finds the server
    gone takes it out of service. It raises TransportFailed after `aclose`.
    """

    def __init__(
        self,
        name: str,
        logger: logging.Logger,
        *,
        look: Callable[[], Awaitable[None]],
        admit: Callable[[], Awaitable[None]],
        serving: bool = False,
    ) -> None:
        self.ready = serving
        self.reason = "" if serving else "it was not reached yet"
        self._name = name
        self._logger = logger
        self._look = look
        self._admit = admit
        self._closed = False
        self._running = 0
        self._idle = asyncio.Event()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, *, look_s: float, again_s: float) -> None:
        """Begin to watch, once: with `look_s` between looks at a server that is well, `again_s` at one that is not."""
        self._task = asyncio.create_task(self._watch(look_s, again_s), name=f"watch {self._name}")

    def __enter__(self) -> None:
        if self._closed:
            raise TransportFailed(f"{self._name} is closed: send the request again")
        self._running += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, TransportFailed):
            self.mark_lost(error)
        self._running -= 1
        if not self._running:
            self._idle.set()

    def mark_lost(self, error: ShoalError) -> None:
        """It is out of service, and looked at now."""
        if self.ready:
            self._logger.warning("%s is out of service: %s", self._name, error.message)
        self.ready = False
        self.reason = error.message
        self._wake.set()

    async def aclose(self) -> None:
        self._closed = True
        self.ready = False
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        while self._running:
            self._idle.clear()
            await self._idle.wait()

    async def _watch(self, look_s: float, again_s: float) -> None:
        missed = 0
        while True:
            await self._pause(look_s if self.ready and not missed else again_s)
            try:
                await self._look()
                if not self.ready:
                    await self._admit()
                    self.ready, self.reason = True, ""
                    self._logger.info("%s is in service", self._name)
                missed = 0
            except ShoalError as error:
                missed += 1
                if self.ready:
                    if isinstance(error, TransportFailed) or missed >= SLOW_LOOKS:
                        self.mark_lost(error)
                elif error.message != self.reason:
                    # One that is away stays so in one breath or another; one that came back and is kept out is news.
                    if not isinstance(error, TransportFailed):
                        self._logger.warning("%s cannot serve: %s", self._name, error.message)
                    self.reason = error.message
            except Exception as error:  # a bug here must not end the watch: the model would never come back
                self._logger.exception("watching %s failed in an unforeseen way", self._name)
                self.mark_lost(InternalError(f"watching the server failed: {error!r}"))

    async def _pause(self, seconds: float) -> None:
        """Sleep; a request that loses the server while it serves ends it."""
        if not self.ready:
            await asyncio.sleep(seconds)
            return
        self._wake.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass
