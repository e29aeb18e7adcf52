"""Stop the work of a request when its client is too slow or disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Literal, Self

from shoal.errors import Cancelled, RequestTimeout
from shoal.http.exchange import Exchange

WATCH_DELAY_S = 0.01
"""Delay before watching. Most requests finish sooner, and need only one timer instead of a second one or a task."""


class DisconnectWatch:
    """Watches the current task's client inside a `with` block, which calls `mark_body_read` once the body is read.

    Until then, the awaited work is cancelled after `timeout` seconds and the block raises RequestTimeout. Afterwards,
    it is cancelled when the client disconnects and the block raises Cancelled; nothing else may call `receive` then. A
    cancellation from elsewhere passes unchanged. No task outlives the block. An `exchange` reports disconnects itself,
    so no task is needed, and no timer once the body is complete.
    """

    __slots__ = (
        "_body_read",
        "_exchange",
        "_is_watching",
        "_loop",
        "_reason",
        "_receive",
        "_task",
        "_timeout",
        "_timer",
        "_watcher",
    )

    def __init__(self, receive: Callable[[], Awaitable[Any]], timeout: float, exchange: Exchange | None = None) -> None:
        self._receive = receive
        self._timeout = timeout
        self._exchange = exchange
        self._timer: asyncio.TimerHandle | None = None
        self._body_read = False
        self._is_watching = False
        self._reason: Literal["", "late", "gone"] = ""
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task(self._loop)
        if self._exchange is None:
            self._timer = self._loop.call_later(WATCH_DELAY_S, self._start_watching)
        else:
            self._exchange.on_disconnect = self._notice_disconnect
            if not self._exchange.body_complete:
                self._timer = self._loop.call_later(self._timeout, self._cancel, "late")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        if self._reason and kind is asyncio.CancelledError and self._task is not None and self._task.uncancel() == 0:
            if self._reason == "gone":
                raise Cancelled("The client left before the answer was ready.") from None
            raise RequestTimeout(f"The body did not arrive within {self._timeout:g} s; send it faster.") from None

    def mark_body_read(self) -> None:
        self._body_read = True
        if self._timer is not None and (self._is_watching or self._exchange is not None):
            self._timer.cancel()
        if self._is_watching:
            self._create_watcher()

    def stop(self) -> None:
        """Stop watching: nothing is cancelled afterwards. May be called twice."""
        if self._exchange is not None:
            self._exchange.on_disconnect = None
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    def _start_watching(self) -> None:
        self._is_watching = True
        if self._body_read:
            self._create_watcher()
        else:
            self._timer = self._loop.call_later(max(0.0, self._timeout - WATCH_DELAY_S), self._cancel, "late")

    def _create_watcher(self) -> None:
        self._watcher = self._loop.create_task(self._wait_for_disconnect())

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._watcher is not None:
            self._cancel("gone")

    def _notice_disconnect(self) -> None:
        self._cancel("gone")

    def _cancel(self, why: Literal["late", "gone"]) -> None:
        self._reason = why
        if self._task is not None:
            self._task.cancel()
