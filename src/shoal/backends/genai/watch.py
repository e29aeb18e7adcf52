"""Notices that a model's process no longer answers, though it runs: it is stopped, or stuck in a step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger("shoal.backends.genai")

LOOK_S = 5.0
PING_AT = 3
SILENT_AT = 6
GONE_AT = 27
"""Looks without a word after which it is pinged (15 s), out of service (30 s) and given up (120 s after the ping).
A step on a slow machine takes a few seconds."""


class Watch:
    """`silent`: it owes an answer for so long that it should be asked nothing more for now.

    `ping` is called when it has to prove that it is alive, `gone`, once, when it did not. Silence is counted in looks:
    a gateway that was held up itself, and reads only now what came meanwhile, must not take that for silence.
    """

    def __init__(self, name: str, *, ping: Callable[[], None], gone: Callable[[], None]) -> None:
        self._name = name
        self._ping = ping
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._looks = 0
        self.silent = False

    def expect_answer(self) -> None:
        """It was told something that it has to answer."""
        if self._timer is None:
            self._looks = 0
            self._timer = self._loop.call_later(LOOK_S, self._tick)

    def record_message(self, *, owes: bool) -> None:
        """It said something. `expect_answer`: and has more to say."""
        self._looks = 0
        if self.silent:
            self.silent = False
            logger.warning("%s answers again", self._name)
        if not owes:
            self.close()

    def close(self) -> None:
        """It owes nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._looks += 1
        if self._looks >= GONE_AT:
            self._timer = None
            self._gone()
            return
        self._timer = self._loop.call_later(LOOK_S, self._tick)
        if self._looks == PING_AT:
            self._ping()
        elif self._looks == SILENT_AT:
            self.silent = True
            logger.error("%s is out of service: its process does not answer for %g s", self._name, LOOK_S * SILENT_AT)
