"""Fair order: the shares of classes, clients in rotation, and entries of clients and requests, each of which has its
virtual time (see `planner`)."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from shoal.core.protocols import round_up
from shoal.types import TrafficClass

WEIGHTS: dict[TrafficClass, int] = {"interactive": 8, "bulk": 1}


@dataclass(slots=True)
class ClassShare:
    """A traffic class's part of what is served. `vtime`: the work served to it, divided by its weight. `last_served`:
    when it was last served. `since`: when it last became non-empty."""

    weight: int
    vtime: float = 0.0
    last_served: float = 0.0
    since: float = 0.0
    items: int = 0

    @property
    def waits_since(self) -> float:
        return max(self.last_served, self.since)


def enter_class(classes: Mapping[TrafficClass, ClassShare], entered: ClassShare, now: float) -> None:
    """Record that an empty class gets items.

    It starts at the smallest virtual time of the classes with items, or the largest of all if every class is empty. The
    service of a class before an idle period is therefore neither its debt afterwards nor another's credit.
    """
    waiting = [share.vtime for share in classes.values() if share.items]
    virtual_now = min(waiting) if waiting else max([share.vtime for share in classes.values()])
    entered.since = now
    entered.vtime = max(entered.vtime, virtual_now)


def order_classes(classes: Mapping[TrafficClass, ClassShare], now: float, max_age_ms: float) -> list[TrafficClass]:
    """Return the classes with items by virtual time. Of several, the one that was served longer ago goes first if it
    has waited for `max_age_ms`.

    It is chosen by its last service, not by its wait: a class whose batch has just ended has waited since that batch
    began, and would precede a class that came meanwhile. Waits count from the last service, not from the oldest item: a
    backlog is always old, and would turn the queue into first come, first served, which would favor the bulk client.
    """
    order = sorted([name for name, share in classes.items() if share.items], key=lambda name: classes[name].vtime)
    if len(order) > 1:
        oldest = min(order, key=lambda name: classes[name].last_served)
        if (now - classes[oldest].waits_since) * 1000 > max_age_ms:
            order.remove(oldest)
            order.insert(0, oldest)
    return order


M = TypeVar("M", bound=Hashable)


class Rotation(Generic[M]):
    """Members of clients, who take turns whatever the number of their members. Every operation is O(1).

    Only its methods change `clients`, the members of each client in order, the client whose turn is next first.
    """

    __slots__ = ("clients",)

    def __init__(self) -> None:
        self.clients: OrderedDict[str, OrderedDict[M, None]] = OrderedDict()

    def add(self, client: str, member: M) -> None:
        self.clients.setdefault(client, OrderedDict())[member] = None

    def discard(self, client: str, member: M) -> bool:
        """Remove a member; returns whether it was there."""
        members = self.clients.get(client)
        if members is None or member not in members:
            return False
        del members[member]
        if not members:
            del self.clients[client]
        return True

    def turn(self) -> tuple[str, M]:
        """Return the next client and its first member, which stays; both move to the end. There must be one."""
        client, members = next(iter(self.clients.items()))
        member = next(iter(members))
        members.move_to_end(member)
        self.clients.move_to_end(client)
        return client, member


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
