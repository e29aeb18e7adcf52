"""Publish model events to watchers. Each watcher has its own bounded queue and never blocks the publisher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal

EventName = Literal["model_status", "download_progress", "download_finished", "download_failed", "model_remove"]

MAX_WAITING = 1000
"""Maximum unread events per watcher. A slower one is disconnected and may start over with the model list."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event of `model`.

    `data` by `name`: model_status {"status", "error", "stage"}; download_progress {"stage", "done", "total",
    "fraction"} (bytes and 0..1, None if unknown); download_failed {"error"}; the others {}.
    """

    name: EventName
    model: str
    data: dict[str, Any] = field(default_factory=dict)


class _Watcher:
    """Queues events; newer progress of a model replaces unread progress of the same model."""

    def __init__(self) -> None:
        self.waiting: dict[str | int, Event] = {}
        self.news = asyncio.Event()
        self.over = False
        self._put = 0

    def put(self, event: Event) -> None:
        self._put += 1
        self.waiting[event.model if event.name == "download_progress" else self._put] = event
        if len(self.waiting) > MAX_WAITING:
            self.over = True
            self.waiting.clear()
        self.news.set()


class Events:
    """Delivers every event to every watcher. A slow one loses progress but never a status: it is disconnected
    instead."""

    def __init__(self) -> None:
        self._watchers: set[_Watcher] = set()
        self._closed = False

    def publish(self, event: Event) -> None:
        for watcher in self._watchers:
            if not watcher.over:
                watcher.put(event)

    async def watch(self) -> AsyncGenerator[Event]:
        """Yield events from the first `anext` on. Ends when `close` is called or the reader falls too far behind."""
        watcher = _Watcher()
        watcher.over = self._closed
        self._watchers.add(watcher)
        try:
            while watcher.waiting or not watcher.over:
                if watcher.waiting:
                    yield watcher.waiting.pop(next(iter(watcher.waiting)))
                else:
                    watcher.news.clear()
                    await watcher.news.wait()
        finally:
            self._watchers.discard(watcher)

    def close(self) -> None:
        self._closed = True
        for watcher in self._watchers:
            watcher.over = True
            watcher.news.set()
