"""Detects a model's process that runs but does not answer, because it is stopped or stuck in a step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger("shoal.backends.genai")

LOOK_S = 5.0
PING_AT = 3
SILENT_AT = 6
GONE_AT = 27
"""Ticks without a message after which the process is pinged (15 s), out of service (30 s) and abandoned (120 s after
the ping). A step on a slow machine takes a few seconds."""


class Watch:
    """Watches one process. `silent`: an answer is so late that the process should get no more requests for now.

    `ping` is called to request a reply, `on_silent` once if none arrives. Time is counted in ticks of the event loop:
    a gateway that was blocked itself has not read the messages yet, and must not take that for a hang.
    """

    def __init__(self, name: str, *, ping: Callable[[], None], on_silent: Callable[[], None]) -> None:
        self._name = name
        self._ping = ping
        self._on_silent = on_silent
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._ticks = 0
        self.silent = False

    def expect_answer(self) -> None:
        """Record that a message was sent that the process must answer."""
        if self._timer is None:
            self._ticks = 0
            self._timer = self._loop.call_later(LOOK_S, self._tick)

    def record_message(self, *, owes: bool) -> None:
        """Record a message from the process. `owes`: more answers are due."""
        self._ticks = 0
        if self.silent:
            self.silent = False
            logger.warning("%s responds again", self._name)
        if not owes:
            self.close()

    def close(self) -> None:
        """Stop waiting: no answer is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._ticks += 1
        if self._ticks >= GONE_AT:
            self._timer = None
            self._on_silent()
            return
        self._timer = self._loop.call_later(LOOK_S, self._tick)
        if self._ticks == PING_AT:
            self._ping()
        elif self._ticks == SILENT_AT:
            self.silent = True
            logger.error("%s is out of service: its process has not responded for %g s", self._name, LOOK_S * SILENT_AT)
