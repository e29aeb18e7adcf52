"""Queued entries in fair order: requests of clients, each with its virtual time (see `planner`)."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import msgspec

from shoal.core.protocols import round_up
from shoal.types import TrafficClass


class Entry(msgspec.Struct, eq=False):
    """One item in the queue. `cost` is in tokens; `runs_alone` keeps a possibly bad item out of batches with others.
    The planner sets `work`, that of the item alone (`CostModel.work`)."""

    cost: int
    group: Hashable
    traffic: TrafficClass
    client: str
    request: Hashable
    arrived: float
    deadline: float
    runs_alone: bool = False
    queued: bool = False
    sequence: int = 0
    work: float = 0.0


E = TypeVar("E", bound=Entry)


class Flow(Generic[E]):
    """One request's queued entries by (group, bucket), so that a batch finds matching entries without a search.

    Entries that left the queue stay in their list until its head is read. A request has at most a few hundred entries
    here, and mostly one, for which a list is cheaper than a deque.
    """

    __slots__ = ("key", "queues", "vtime")

    def __init__(self, key: Hashable, vtime: float) -> None:
        self.key = key
        self.vtime = vtime
        self.queues: dict[tuple[Hashable, int], list[E]] = {}

    def push(self, entries: Sequence[E], buckets: Sequence[int]) -> None:
        queues = self.queues
        for entry in entries:
            key = (entry.group, -entry.sequence if entry.runs_alone else round_up(entry.cost, buckets))
            queue = queues.get(key)
            if queue is None:
                queues[key] = [entry]
            else:
                queue.append(entry)

    def head(self, key: tuple[Hashable, int]) -> E | None:
        """Return the first entry of a queue that is still queued; an empty queue is removed."""
        queue = self.queues.get(key)
        while queue:
            if queue[0].queued:
                return queue[0]
            queue.pop(0)
        self.queues.pop(key, None)
        return None

    def heads(self) -> list[tuple[tuple[Hashable, int], E]]:
        return [(key, entry) for key in list(self.queues) if (entry := self.head(key)) is not None]


class Branch(Generic[E]):
    """A class or a client: children in a heap by virtual time. Only the top child is ever modified."""

    __slots__ = ("children", "floor", "heap", "key", "skipped", "vtime")

    def __init__(self, key: Hashable, vtime: float) -> None:
        self.key = key
        self.vtime = vtime
        self.floor = 0.0
        self.children: dict[Hashable, Branch[E] | Flow[E]] = {}
        self.heap: list[tuple[float, int, Branch[E] | Flow[E]]] = []
        self.skipped: list[tuple[float, int, Branch[E] | Flow[E]]] = []

    def charge_top(self, work: float, sequence: int) -> None:
        """Advance the virtual time of the top child, which was served `work`."""
        vtime, _, child = self.heap[0]
        self.floor = max(self.floor, vtime)
        child.vtime = vtime + work
        heapq.heapreplace(self.heap, (child.vtime, sequence, child))

    def drop_top(self) -> None:
        vtime, _, child = heapq.heappop(self.heap)
        self.floor = max(self.floor, vtime)
        del self.children[child.key]

    def set_top_aside(self, work: float = 0.0) -> None:
        """Skip the top child until `restore`, charging it the `work` it was served."""
        vtime, sequence, child = heapq.heappop(self.heap)
        if work:
            self.floor = max(self.floor, vtime)
        child.vtime = vtime + work
        self.skipped.append((child.vtime, sequence, child))

    def restore(self) -> None:
        for item in self.skipped:
            heapq.heappush(self.heap, item)
        self.skipped.clear()
