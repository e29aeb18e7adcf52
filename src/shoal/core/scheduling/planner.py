"""What the next batch is: pure, told the time, never waits.

Fairness is start-time fair queueing over three levels, class then client then request (Goyal, Vin and Cheng 1996):
every flow carries a virtual time, the tokens it has been served divided by its weight; the smallest goes first; a flow
that arrives starts at its parent's virtual time, so that nobody saves up credit while idle. This gives deficit round
robin's shares in O(log flows) an item, and lets a batch charge ahead of a flow's turn: its time runs on.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

import msgspec

from shoal.core.protocols import CostModel, EngineFacts, round_up
from shoal.types import TrafficClass

WEIGHTS: dict[TrafficClass, int] = {"interactive": 8, "bulk": 1}

INTERACTIVE_MEMORY_S = 1.0
"""For so long after an interactive item the lane counts as shared, and bulk batches are kept short."""

SHARED_BULK_PART = 0.5
"""Part of `max_batch_ms` that a bulk batch may take while the lane is shared: an interactive item that arrives waits
for the slot that is free first, and should find it within half of what it is promised."""

SHARED_CALL_PART = 0.125
"""Part of a shared lane's bulk batch that the call itself may cost: where calls are dear, batches stay longer (up to
`max_batch_ms`), else short ones would take a bulk caller's rate away. Simulated at 5 ms a call, 40 us a token and 30
single texts a second: bulk keeps 93 % of its rate in place of 72 %, and single texts wait 31 ms more in place of 17."""

MIXED_PART = 0.25
"""Part of `max_batch_ms` up to which bulk items may fill a batch that an interactive item leads: it waits for them."""

LEAST_PART = 4.0
"""A burst is spread over free slots only in parts worth so many calls' fixed cost: a request of two short texts is one
batch, not two."""

SCAN_LIMIT = 256
"""Flows looked at for one batch: bounds the work of `take` when a thousand flows hold a thousand lengths."""

LOOK_AGAIN_S = 0.05
"""How soon to look again where only time can tell."""


class Entry(msgspec.Struct, eq=False):
    """One item in the queue. `cost` in tokens; `alone` keeps it out of any batch with others (poison isolation)."""

    cost: int
    group: Hashable
    traffic: TrafficClass
    client: str
    request: Hashable
    arrived: float
    deadline: float
    alone: bool = False
    queued: bool = False
    sequence: int = 0


E = TypeVar("E", bound=Entry)


@dataclass(frozen=True, slots=True)
class Limits:
    """The operator's settings for a lane; a replica's facts narrow them further."""

    max_batch_size: int = 64
    max_batch_tokens: int = 16384
    max_batch_ms: float = 40.0
    max_wait_time_ms: float = 0.0
    max_age_ms: float = 250.0


def longest_batch_s(limits: Limits, cost: CostModel) -> float:
    """How long a batch may be predicted to take. Tokens may always take as long as the call itself: a call is paid for
    whatever it carries, and batches of one under dear calls would only make the queue longer."""
    return max(limits.max_batch_ms / 1000, cost.fixed * 2)


class Batch(msgspec.Struct, Generic[E], frozen=True):
    """Entries for one slot. `length` is the padded length of each row, `tokens` the sum of the true lengths."""

    entries: list[E]
    length: int
    tokens: int
    flush: str


class Wait(msgspec.Struct, frozen=True):
    """Nothing to run yet; look again at `until` (None: when something arrives)."""

    until: float | None


class _Flow(Generic[E]):
    """One request's queued entries, by (group, bucket) so that a batch finds its like without a search.

    Entries that left the queue stay in their deque until somebody looks at its head.
    """

    __slots__ = ("key", "queues", "vtime")

    def __init__(self, key: Hashable, vtime: float) -> None:
        self.key = key
        self.vtime = vtime
        self.queues: dict[tuple[Hashable, int], deque[E]] = {}

    def push(self, entry: E, bucket: int) -> None:
        key = (entry.group, -entry.sequence if entry.alone else bucket)
        self.queues.setdefault(key, deque()).append(entry)

    def head(self, key: tuple[Hashable, int]) -> E | None:
        """The first entry of a queue that is still waiting; an empty queue is forgotten."""
        queue = self.queues.get(key)
        while queue:
            if queue[0].queued:
                return queue[0]
            queue.popleft()
        self.queues.pop(key, None)
        return None

    def heads(self) -> list[tuple[tuple[Hashable, int], E]]:
        return [(key, entry) for key in list(self.queues) if (entry := self.head(key)) is not None]


class _Branch(Generic[E]):
    """A class or a client: children in a heap by virtual time. Only the child on top is ever touched."""

    __slots__ = ("aside", "children", "floor", "heap", "key", "vtime")

    def __init__(self, key: Hashable, vtime: float) -> None:
        self.key = key
        self.vtime = vtime
        self.floor = 0.0
        self.children: dict[Hashable, _Branch[E] | _Flow[E]] = {}
        self.heap: list[tuple[float, int, _Branch[E] | _Flow[E]]] = []
        self.aside: list[tuple[float, int, _Branch[E] | _Flow[E]]] = []

    def charge_top(self, tokens: float, sequence: int) -> None:
        """The child on top was served: its virtual time moves on by what it used."""
        vtime, _, child = self.heap[0]
        self.floor = max(self.floor, vtime)
        child.vtime = vtime + tokens
        heapq.heapreplace(self.heap, (child.vtime, sequence, child))

    def drop_top(self) -> None:
        vtime, _, child = heapq.heappop(self.heap)
        self.floor = max(self.floor, vtime)
        del self.children[child.key]

    def set_top_aside(self, tokens: float = 0) -> None:
        """Look past the child on top until `restore`; `tokens`: it was served so many."""
        vtime, sequence, child = heapq.heappop(self.heap)
        if tokens:
            self.floor = max(self.floor, vtime)
        child.vtime = vtime + tokens
        self.aside.append((child.vtime, sequence, child))

    def restore(self) -> None:
        for item in self.aside:
            heapq.heappush(self.heap, item)
        self.aside.clear()


@dataclass(slots=True)
class _Class(Generic[E]):
    """A traffic class and when it was last served; `since` is when it last went from empty to not empty."""

    root: _Branch[E]
    weight: int
    vtime: float = 0.0
    served: float = 0.0
    since: float = 0.0
    items: int = 0


class _Draft(msgspec.Struct, Generic[E]):
    """The batch being filled, and what joining it would cost. `seconds` is how long it may be predicted to take."""

    facts: EngineFacts
    limits: Limits
    seconds: float = 0.0
    entries: list[E] = msgspec.field(default_factory=list)
    length: int = 0
    tokens: int = 0
    waste: dict[int, int] = msgspec.field(default_factory=dict)
    limited: bool = False
    full: bool = False

    def fits(self, cost: int, length: int) -> bool:
        """Whether one more item keeps the batch, which has its first, inside every limit. A no is remembered."""
        facts = self.facts
        size = len(self.entries) + 1
        tokens = self.tokens + cost
        if facts.padded:
            tokens = round_up(size, facts.size_buckets) * max(length, self.length)
        most = min(self.limits.max_batch_tokens, facts.max_batch_tokens or self.limits.max_batch_tokens)
        roomy = size <= min(self.limits.max_batch_size, facts.max_batch_size) and tokens <= most
        inside = roomy and facts.cost.seconds(tokens) <= self.seconds
        self.limited = self.limited or not inside
        return inside

    def worth(self, length: int) -> bool:
        """Whether padding an item of another bucket costs less than the call that it saves."""
        cost = self.facts.cost
        return (self.waste.get(length, 0) + self._padding(length)) * cost.per_token < cost.fixed

    def add(self, entry: E, length: int) -> None:
        if padding := self._padding(length):
            self.waste[length] = self.waste.get(length, 0) + padding
        self.entries.append(entry)
        self.length = max(self.length, length)
        self.tokens += entry.cost

    def is_closed(self, portion: float) -> bool:
        return self.full or (bool(self.entries) and (self.entries[0].alone or self.tokens >= portion))

    def _padding(self, length: int) -> int:
        """Padded tokens that an item of this length adds beyond its own: below the row, or under all other rows."""
        if not self.facts.padded:
            return 0
        return self.length - length if length < self.length else len(self.entries) * (length - self.length)


class Planner(Generic[E]):
    """The queue of one lane and the choice of its next batch. Not thread-safe; every method is told `now`.

    An entry that comes to an empty queue is `_lone` until another one follows: it needs no flow to be found in.
    """

    def __init__(self, limits: Limits, length_buckets: Sequence[int] = ()) -> None:
        self.limits = limits
        self.items = 0
        self.tokens = 0
        self._buckets = tuple(length_buckets)
        self._classes: dict[TrafficClass, _Class[E]] = {
            name: _Class(_Branch(name, 0.0), weight) for name, weight in WEIGHTS.items()
        }
        self._arrivals: deque[E] = deque()
        self._sequence = count(1)
        self._interactive_seen = float("-inf")
        self._parked: list[_Branch[E]] = []
        self._lone: E | None = None

    def add(self, entry: E, now: float) -> None:
        """Queue one entry; it stays until it is taken or discarded."""
        entry.queued = True
        entry.sequence = next(self._sequence)
        lane = self._classes[entry.traffic]
        if not lane.items:
            lane.since = now
            lane.vtime = max(lane.vtime, self._virtual_now())
        lane.items += 1
        if self.items:
            if self._lone is not None:
                self._enter_flow(self._lone)
                self._lone = None
            self._enter_flow(entry)
        else:
            self._lone = entry
        self.items += 1
        self.tokens += entry.cost
        self._arrivals.append(entry)
        if entry.traffic == "interactive":
            self._interactive_seen = now

    def _enter_flow(self, entry: E) -> None:
        client = self._child(self._classes[entry.traffic].root, entry.client)
        flow = self._flow(client, entry.request)
        flow.push(entry, round_up(entry.cost, self._buckets))

    def discard(self, entry: E) -> None:
        """Take an entry out of the queue; does nothing when it already left."""
        if entry.queued:
            self._remove(entry)

    def take(
        self, facts: EngineFacts, now: float, *, share: int = 1, behind: float = 0.0
    ) -> tuple[Batch[E] | Wait, list[E]]:
        """The next batch for a free slot of a replica with these facts, and the entries that cannot be answered within
        their deadline: they leave the queue without a call.

        `share` > 1 splits what is queued over so many slots that are free now and compute side by side. A batch that
        begins now waits for `behind` seconds on the replica.
        """
        expired: list[E] = []
        if not self.items:
            return Wait(None), expired
        until = self._arrivals[0].arrived + self.limits.max_wait_time_ms / 1000
        if now < until and self.items < self._max_items(facts) and self.tokens < self.limits.max_batch_tokens:
            return Wait(until), expired
        if self._lone is not None:
            return self._take_lone(self._lone, facts, now, behind)
        draft = self._fill(facts, now, share, behind, expired)
        if draft is None:
            # All that was looked at has expired. If items were left all the same, nothing else would wake the lane.
            return Wait(now + LOOK_AGAIN_S if self.items else None), expired
        full = draft.limited or len(draft.entries) == self._max_items(facts)
        flush = "full" if full else "age" if self.limits.max_wait_time_ms else "idle"
        return Batch(draft.entries, draft.length, draft.tokens, flush), expired

    def _take_lone(self, entry: E, facts: EngineFacts, now: float, behind: float) -> tuple[Batch[E] | Wait, list[E]]:
        """As `_fill` for the only entry: on an idle replica it runs unless its deadline is over."""
        lane = self._classes[entry.traffic]
        self._remove(entry)
        lane.vtime += entry.cost / lane.weight
        lane.served = now
        if entry.deadline <= now or (behind and entry.deadline < now + behind + facts.cost.seconds(entry.cost)):
            return Wait(None), [entry]
        full = self._max_items(facts) == 1
        flush = "full" if full else "age" if self.limits.max_wait_time_ms else "idle"
        return Batch([entry], round_up(entry.cost, facts.length_buckets), entry.cost, flush), []

    def pending(self) -> list[E]:
        """Every entry in the queue, oldest first."""
        return [entry for entry in self._arrivals if entry.queued]

    def _fill(self, facts: EngineFacts, now: float, share: int, behind: float, expired: list[E]) -> _Draft[E] | None:
        draft: _Draft[E] = _Draft(facts, self.limits)
        worthwhile = LEAST_PART * facts.cost.fixed / max(facts.cost.per_token, 1e-9)
        portion = max(-(-self.tokens // share), worthwhile) if share > 1 else self.tokens
        looked = 0
        hasty: list[E] = []
        for name in self._class_order(now):
            lane = self._classes[name]
            draft.seconds, draft.full = self._seconds_for(name, draft, now), False
            while lane.root.heap and looked < SCAN_LIMIT and not draft.is_closed(portion):
                client, flow = self._top(lane.root)
                key = self._match(flow, draft)
                if key is None:
                    # A flow whose entries have all left costs one pop and never comes back. Counted, a crowd of callers
                    # who gave up would hide those behind them.
                    looked += bool(flow.queues)
                    self._pass_over(lane.root, client, flow)
                    continue
                entry = self._serve(lane, client, flow, key)
                lane.served = now
                if entry.deadline <= now:
                    expired.append(entry)
                elif entry.deadline < now + behind + self._predict_seconds(facts, draft, entry):
                    hasty.append(entry)
                else:
                    draft.add(entry, round_up(entry.cost, facts.length_buckets))
        if self._parked:
            self._restore()
        if hasty and not (draft.entries or behind):
            # Nothing else wants the slot: a prediction that is too long must be able to learn that it is.
            last = max(hasty, key=lambda entry: entry.deadline)
            hasty.remove(last)
            draft.add(last, round_up(last.cost, facts.length_buckets))
        expired += hasty
        return draft if draft.entries else None

    def _match(self, flow: _Flow[E], draft: _Draft[E]) -> tuple[Hashable, int] | None:
        """The flow's queue whose head should join: the draft's own bucket, else the nearest worth its padding."""
        if not draft.entries:
            heads = flow.heads()
            if len(heads) > 1:
                return min(heads, key=lambda head: head[1].sequence)[0]
            return heads[0][0] if heads else None
        leader = draft.entries[0]
        own = (leader.group, draft.length)
        same = flow.head(own)
        if same is not None:
            # What does not fit without padding fits with it even less: looking through other flows would be in vain.
            draft.full = not draft.fits(same.cost, draft.length)
            return None if draft.full else own
        best: tuple[Hashable, int] | None = None
        distance = 0
        for key, entry in flow.heads():
            if entry.alone or entry.group != leader.group:
                continue
            length = round_up(entry.cost, draft.facts.length_buckets)
            apart = abs(length - draft.length)
            if (best is None or apart < distance) and draft.worth(length) and draft.fits(entry.cost, length):
                best, distance = key, apart
        return best

    def _serve(self, lane: _Class[E], client: _Branch[E], flow: _Flow[E], key: tuple[Hashable, int]) -> E:
        """Take the head of the queue out of its flow, which is on top of its client's heap, and charge all levels."""
        entry = flow.queues[key].popleft()
        self._remove(entry)
        lane.vtime += entry.cost / lane.weight
        if flow.queues[key]:
            flow.head(key)
        else:
            del flow.queues[key]
        if flow.queues:
            client.charge_top(entry.cost, next(self._sequence))
        else:
            client.drop_top()
        if not client.children:
            lane.root.drop_top()
        elif client.heap:
            lane.root.charge_top(entry.cost, next(self._sequence))
        else:
            self._parked.append(lane.root)
            lane.root.set_top_aside(entry.cost)
        return entry

    def _pass_over(self, root: _Branch[E], client: _Branch[E], flow: _Flow[E]) -> None:
        """Nothing of this flow belongs into the batch: look past it until `_restore`, or drop it when it is empty."""
        if flow.queues:
            self._parked.append(client)
            client.set_top_aside()
        else:
            client.drop_top()
        if not client.heap:
            if client.aside:
                self._parked.append(root)
                root.set_top_aside()
            else:
                root.drop_top()

    def _restore(self) -> None:
        for branch in self._parked:
            branch.restore()
        self._parked.clear()

    def _seconds_for(self, name: TrafficClass, draft: _Draft[E], now: float) -> float:
        """As `longest_batch_s`, shorter for bulk items beside interactive ones."""
        fixed, seconds = draft.facts.cost.fixed, self.limits.max_batch_ms / 1000
        if name == "bulk" and draft.entries:
            # Companions of an interactive item make it wait.
            return max(seconds * MIXED_PART, fixed * (1 + MIXED_PART))
        if name == "bulk" and now - self._interactive_seen < INTERACTIVE_MEMORY_S:
            seconds = max(seconds * SHARED_BULK_PART, min(seconds, fixed / SHARED_CALL_PART))
            # Where slots queue for the same cores, an item that comes waits for the batches of all of them.
            seconds *= (draft.facts.parallel or draft.facts.slots) / draft.facts.slots
        return max(seconds, fixed * 2)

    def _predict_seconds(self, facts: EngineFacts, draft: _Draft[E], entry: E) -> float:
        """Seconds of the batch that this entry would join: a full one, or all that is queued. Not of a smaller one that
        it would be in time with: batches would shrink just when there is too much to do."""
        cost = facts.cost
        queued = min(draft.tokens + entry.cost + self.tokens, entry.cost * self._max_items(facts))
        return max(min(draft.seconds, cost.seconds(queued)), cost.seconds(entry.cost))

    def _class_order(self, now: float) -> list[TrafficClass]:
        """Classes by virtual time; one that nobody served for `max_age_ms` goes first.

        Age counts since the class was last served, not since its oldest item came: a backlog is always old, and would
        turn the queue into first come, first served, for which the bulk client would be grateful.
        """
        busy = [name for name, lane in self._classes.items() if lane.items]
        if len(busy) == 1:
            return busy
        starved = [
            n
            for n in busy
            if (now - max(self._classes[n].served, self._classes[n].since)) * 1000 > self.limits.max_age_ms
        ]
        by_time = sorted(busy, key=lambda name: self._classes[name].vtime)
        return starved[:1] + [name for name in by_time if name not in starved[:1]]

    def _virtual_now(self) -> float:
        """The class's time that is furthest behind among those that wait; the furthest of all where none does: what
        a class used before an idle moment is neither its debt afterwards nor another's credit."""
        waiting = [lane.vtime for lane in self._classes.values() if lane.items]
        return min(waiting) if waiting else max([lane.vtime for lane in self._classes.values()])

    def _top(self, root: _Branch[E]) -> tuple[_Branch[E], _Flow[E]]:
        client = root.heap[0][2]
        assert isinstance(client, _Branch)
        flow = client.heap[0][2]
        assert isinstance(flow, _Flow)
        return client, flow

    def _child(self, root: _Branch[E], key: str) -> _Branch[E]:
        child = root.children.get(key)
        if child is None:
            child = _Branch(key, root.floor)
            root.children[key] = child
            heapq.heappush(root.heap, (child.vtime, next(self._sequence), child))
        assert isinstance(child, _Branch)
        return child

    def _flow(self, client: _Branch[E], key: Hashable) -> _Flow[E]:
        flow = client.children.get(key)
        if flow is None:
            flow = _Flow(key, client.floor)
            client.children[key] = flow
            heapq.heappush(client.heap, (flow.vtime, next(self._sequence), flow))
        assert isinstance(flow, _Flow)
        return flow

    def _remove(self, entry: E) -> None:
        entry.queued = False
        if entry is self._lone:
            self._lone = None
        self.items -= 1
        self.tokens -= entry.cost
        self._classes[entry.traffic].items -= 1
        while self._arrivals and not self._arrivals[0].queued:
            self._arrivals.popleft()

    def _max_items(self, facts: EngineFacts) -> int:
        return min(self.limits.max_batch_size, facts.max_batch_size)
