"""Notices that the client of a running request has left, and stops the work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from shoal.errors import Cancelled

PATIENCE_S = 0.01
"""Most requests are answered sooner, and those pay for a timer only, not for a task."""


class Watch:
    """`with Watch(receive):` around the work of the current task, whose body has been read.

    When the client leaves, what the task awaits is cancelled and the block raises Cancelled. A cancellation from
    elsewhere passes unchanged. Whatever happens, no task stays behind.
    """

    __slots__ = ("_gone", "_receive", "_task", "_timer", "_watcher")

    def __init__(self, receive: Callable[[], Awaitable[Any]]) -> None:
        self._receive = receive
        self._gone = False
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task(loop)
        self._timer = loop.call_later(PATIENCE_S, self._begin, loop)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        if kind is asyncio.CancelledError and self._gone and self._task is not None and self._task.uncancel() == 0:
            raise Cancelled("The client left before the answer was ready.") from None

    def stop(self) -> None:
        """From here on a client that leaves is not noticed; may be called twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watcher = loop.create_task(self._until_gone())

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._watcher is not None and self._task is not None:
            self._gone = True
            self._task.cancel()
