"""Items whose answers are the same by construction (`Prepared.key`): never computed twice at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from shoal.core.scheduling.request_state import Item


class Coalescer:
    """Who else asks for what an item asks for.

    A request joins an item that has left the queue, or one of its own that has not. It never joins another request's
    item in the queue: it would wait for that one's turn. Each keeps its own place, and the first to leave the queue
    answers them all.
    """

    def __init__(self) -> None:
        self._in_flight: dict[Hashable, Item] = {}
        self._queued: dict[Hashable, dict[Hashable, Item]] = {}

    def __len__(self) -> int:
        return len(self._in_flight) + sum(map(len, self._queued.values()))

    def find_leader(self, key: Hashable | None, request: Hashable) -> Item | None:
        """The item that one more of this key should join."""
        if key is None:
            return None
        return self._in_flight.get(key) or self._queued.get(key, {}).get(request)

    def add(self, item: Item) -> None:
        """It waits in the queue, for the first time or again."""
        key = item.prepared.key
        if key is not None:
            if self._in_flight.get(key) is item:  # it failed, and waits again
                del self._in_flight[key]
            self._queued.setdefault(key, {})[item.request] = item

    def dequeue(self, items: Sequence[Item]) -> tuple[list[Item], list[tuple[Item, Item]]]:
        """These leave the queue together: which of them run, and pairs (twin, the item that answers it too)."""
        run: list[Item] = []
        answered: list[tuple[Item, Item]] = []
        together = set(items)
        for item in items:
            key = item.prepared.key
            if key is None:
                run.append(item)
                continue
            first = self._in_flight.setdefault(key, item)
            others = [twin for twin in self._queued.pop(key, {}).values() if twin not in together]
            if first is item:
                run.append(item)
            else:
                others.append(item)
            answered += [(twin, first) for twin in others]
        return run, answered

    def forget(self, item: Item) -> None:
        """It was answered, or nobody waits for it."""
        key = item.prepared.key
        if self._in_flight.get(key) is item:
            del self._in_flight[key]
        queue = self._queued.get(key, {})
        if queue.get(item.request) is item:
            del queue[item.request]
            if not queue:
                del self._queued[key]
