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
        self.events: dict[str | int, Event] = {}
        self.has_events = asyncio.Event()
        self.is_closed = False
        self._count = 0

    def put(self, event: Event) -> None:
        self._count += 1
        self.events[event.model if event.name == "download_progress" else self._count] = event
        if len(self.events) > MAX_WAITING:
            self.is_closed = True
            self.events.clear()
        self.has_events.set()


class Events:
    """Delivers every event to every watcher. A slow one loses progress but never a status: it is disconnected
    instead."""

    def __init__(self) -> None:
        self._watchers: set[_Watcher] = set()
        self._closed = False

    def publish(self, event: Event) -> None:
        for watcher in self._watchers:
            if not watcher.is_closed:
                watcher.put(event)

    async def watch(self) -> AsyncGenerator[Event]:
        """Yield events from the first `anext` on. Ends when `close` is called or the reader falls too far behind."""
        watcher = _Watcher()
        watcher.is_closed = self._closed
        self._watchers.add(watcher)
        try:
            while watcher.events or not watcher.is_closed:
                if watcher.events:
                    yield watcher.events.pop(next(iter(watcher.events)))
                else:
                    watcher.has_events.clear()
                    await watcher.has_events.wait()
        finally:
            self._watchers.discard(watcher)

    def close(self) -> None:
        self._closed = True
        for watcher in self._watchers:
            watcher.is_closed = True
            watcher.has_events.set()
