"""Stop the work of a request when its client is too slow or disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

from shoal.errors import Cancelled, RequestTimeout
from shoal.http.exchange import Exchange

WATCH_DELAY_S = 0.01
"""Delay before watching. Most requests finish sooner, and need only one timer instead of a task."""


class DisconnectWatch:
    """Watches the current task's client inside a `with` block.

    When the client disconnects, the awaited work is cancelled and the block raises Cancelled. A cancellation from
    elsewhere passes unchanged. An `exchange` reports disconnects itself. Without one, call `start` once the body is
    read: from then on a task reads the messages, and nothing else may call `receive`. No task outlives the block.
    """

    __slots__ = ("_exchange", "_loop", "_reason", "_receive", "_task", "_timeout", "_timer", "_watcher")

    def __init__(self, receive: Callable[[], Awaitable[Any]], timeout: float, exchange: Exchange | None = None) -> None:
        self._receive = receive
        self._timeout = timeout
        self._exchange = exchange
        self._timer: asyncio.TimerHandle | None = None
        self._reason: Literal["", "late", "gone"] = ""
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task(self._loop)
        if self._exchange is not None:
            self._exchange.on_disconnect = self._cancel
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._exchange is None:
            self.stop()
        else:
            self._exchange.on_disconnect = None
        if self._reason and kind is asyncio.CancelledError and self._task is not None and self._task.uncancel() == 0:
            if self._reason == "gone":
                raise Cancelled("The client disconnected before the answer was ready.") from None
            raise RequestTimeout(f"The body did not arrive within {self._timeout:g} s; send it faster.") from None

    @contextmanager
    def limit_body_time(self) -> Generator[None]:
        """Cancel what is awaited inside this block after `timeout` seconds; the outer block then raises
        RequestTimeout."""
        timer = self._loop.call_later(self._timeout, self._cancel, "late")
        try:
            yield
        finally:
            timer.cancel()

    def start(self) -> None:
        """Start reading messages, in a moment."""
        self._timer = self._loop.call_later(WATCH_DELAY_S, self._create_watcher)

    def stop(self) -> None:
        """Stop watching: nothing is cancelled afterwards. May be called twice."""
        if self._exchange is not None:
            self._exchange.on_disconnect = None
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    def _create_watcher(self) -> None:
        self._watcher = self._loop.create_task(self._wait_for_disconnect())

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._watcher is not None:
            self._cancel()

    def _cancel(self, why: Literal["late", "gone"] = "gone") -> None:
        self._reason = why
        if self._task is not None:
            self._task.cancel()
