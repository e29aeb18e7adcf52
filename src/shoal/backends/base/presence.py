"""Tracks whether the server behind an engine is in service, from its calls and from periodic checks that readmit it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from shoal.backends.base.backoff import retry_pauses
from shoal.errors import InternalError, ShoalError, TransportFailed

SLOW_LOOKS = 3
"""Consecutive checks without an answer that take a server out of service. A single one may be slow because the server
is busy."""


class Presence:
    """The health of one server, called `name` in the log. `ready` is whether it serves; `reason` is why it does not.

    `look` raises a ShoalError for an unhealthy server. `admit` is awaited each time the server comes up or back, and
    raises a ShoalError to keep it out. After `slow_looks` consecutive errors, or one TransportFailed, the server is out
    of service. Wrap each call in `with presence:`; a call that raises TransportFailed takes the server out of service.
    `aclose` waits for these calls; afterwards, entering raises TransportFailed.
    """

    def __init__(
        self,
        name: str,
        logger: logging.Logger,
        *,
        look: Callable[[], Awaitable[None]],
        admit: Callable[[], Awaitable[None]],
        serving: bool = False,
        slow_looks: int = SLOW_LOOKS,
    ) -> None:
        self.ready = serving
        self.reason = "" if serving else "it has not been reached yet"
        self._name = name
        self._logger = logger
        self._probe = look
        self._admit = admit
        self._slow_checks = slow_looks
        self._closed = False
        self._calls = 0
        self._idle = asyncio.Event()
        self._check_due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, *, look_s: float, again_s: Sequence[float]) -> None:
        """Start the periodic checks. Call it once. `look_s` is the interval for a healthy server. `again_s` are the
        intervals for an unhealthy one; the last one repeats."""
        self._task = asyncio.create_task(self._watch(look_s, again_s), name=f"watch {self._name}")

    def __enter__(self) -> None:
        if self._closed:
            raise TransportFailed(f"{self._name} is closed: send the request again")
        self._calls += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, TransportFailed):
            self.mark_lost(error)
        self._calls -= 1
        if not self._calls:
            self._idle.set()

    @property
    def check_due(self) -> bool:
        """Whether the next check of a healthy server is due now."""
        return self._check_due.is_set()

    def check_now(self) -> None:
        """Check a healthy server without waiting for the interval to end."""
        self._check_due.set()

    def mark_lost(self, error: ShoalError) -> None:
        """Take the server out of service and check it now."""
        if self.ready:
            self._logger.warning("%s is out of service: %s", self._name, error.message)
        self.ready = False
        self.reason = error.message
        self.check_now()

    async def aclose(self) -> None:
        self._closed = True
        self.ready = False
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        while self._calls:
            self._idle.clear()
            await self._idle.wait()

    async def _watch(self, look_s: float, again_s: Sequence[float]) -> None:
        missed, pauses = 0, retry_pauses(again_s)
        while True:
            await self._pause(look_s if self.ready and not missed else next(pauses))
            self._check_due.clear()  # before the check: a call that fails during it makes the next check due
            try:
                await self._check()
                missed, pauses = 0, retry_pauses(again_s)
            except ShoalError as error:
                missed += 1
                self._record_error(error, missed)
            except Exception as error:  # a bug here must not end the checks: the model would never come back
                self._logger.exception("the health check of %s failed unexpectedly", self._name)
                missed += 1
                self._record_error(InternalError(f"the health check failed: {error!r}"), missed)

    async def _check(self) -> None:
        await self._probe()
        if not self.ready:
            await self._admit()
            self.ready, self.reason = True, ""
            self._logger.info("%s is in service", self._name)

    def _record_error(self, error: ShoalError, missed: int) -> None:
        if self.ready and not isinstance(error, TransportFailed) and missed < self._slow_checks:
            return
        # A server that stays unreachable is not logged again, even if its message changes. A rejected one is logged.
        if not self.ready and error.message != self.reason and not isinstance(error, TransportFailed):
            self._logger.warning("%s cannot serve: %s", self._name, error.message)
        self.mark_lost(error)

    async def _pause(self, seconds: float) -> None:
        """Sleep. While the server is ready, `check_now` wakes it early."""
        if not self.ready:
            await asyncio.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._check_due.wait()


class PresenceMixin:
    """An engine or generator whose readiness is that of its server, `_presence`."""

    _presence: Presence

    @property
    def reason(self) -> str:
        """Why it is not ready; "" while it is."""
        return self._presence.reason

    def ready(self) -> bool:
        return self._presence.ready

    async def aclose(self) -> None:
        await self._presence.aclose()
