"""Coalesce items with the same `Prepared.key`, whose answers are equal by construction: compute each key once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from shoal.core.scheduling.request_state import Item


class Coalescer:
    """Tracks items in flight and in the queue by key.

    A new item joins an item in flight, or a queued item of its own request. It never joins a queued item of another
    request, because it would then wait for that request's turn. Each keeps its own place in the queue, and the first
    one to leave it answers all of them.
    """

    def __init__(self) -> None:
        self._in_flight: dict[Hashable, Item] = {}
        self._queued: dict[Hashable, dict[Hashable, Item]] = {}

    def __len__(self) -> int:
        return len(self._in_flight) + sum(map(len, self._queued.values()))

    def find_leader(self, key: Hashable | None, request: Hashable) -> Item | None:
        """Return the item that another item with this key should join, if any."""
        if key is None:
            return None
        return self._in_flight.get(key) or self._queued.get(key, {}).get(request)

    def add(self, item: Item) -> None:
        """Record an item that enters the queue, for the first time or again."""
        key = item.prepared.key
        if key is not None:
            if self._in_flight.get(key) is item:  # it failed and is queued again
                del self._in_flight[key]
            self._queued.setdefault(key, {})[item.request] = item

    def dequeue(self, items: Sequence[Item]) -> tuple[list[Item], list[tuple[Item, Item]]]:
        """Record items that leave the queue together.

        Returns the items to run, and pairs (duplicate, item that also answers it).
        """
        run: list[Item] = []
        answered: list[tuple[Item, Item]] = []
        together = set(items)
        for item in items:
            key = item.prepared.key
            if key is None:
                run.append(item)
                continue
            first = self._in_flight.setdefault(key, item)
            queued = self._queued.pop(key, {})
            if first is item:
                run.append(item)
            else:
                answered.append((item, first))
            if len(queued) > 1:  # otherwise only this item itself
                answered += [(duplicate, first) for duplicate in queued.values() if duplicate not in together]
        return run, answered

    def forget(self, item: Item) -> None:
        """Remove an item that is answered or has no waiters left."""
        key = item.prepared.key
        if self._in_flight.get(key) is item:
            del self._in_flight[key]
        queued = self._queued.get(key)
        if queued is not None and queued.get(item.request) is item:
            del queued[item.request]
            if not queued:
                del self._queued[key]
