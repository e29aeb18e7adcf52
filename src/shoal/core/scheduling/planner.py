"""Pick the next batch of a lane. Pure: the caller passes the time, and nothing waits.

Fairness is start-time fair queueing over three levels, class, client and request (Goyal, Vin and Cheng 1996). Every
flow has a virtual time: the work served to it divided by its weight. The smallest goes first. A new flow starts at
its parent's virtual time, so idle flows accumulate no credit. This gives the shares of deficit round robin in
O(log flows) per item. A batch may serve a flow ahead of its turn: its virtual time advances all the same.
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
"""Time after an interactive item during which the lane counts as shared and bulk batches are kept short."""

SHARED_BULK_PART = 0.5
"""Fraction of `max_batch_ms` that a bulk batch may take while the lane is shared. An interactive item that arrives
waits for the first free slot, and should get one within half of `max_batch_ms`."""

SHARED_CALL_PART = 0.125
"""Fraction of a bulk batch's time on a shared lane that the call overhead may take. Where calls are expensive, batches
may be longer (up to `max_batch_ms`), because short ones would cost the bulk client its throughput. Simulated at 5 ms a
call, 40 us a token and 30 single texts a second: bulk keeps 93 % of its rate instead of 72 %, and single texts wait
31 ms longer instead of 17."""

PATIENCE = 6
"""Multiple of `max_batch_ms` that an efficient batch may always take: 240 ms by default, about the time after which a
class that was not served goes first."""

DELAY_PART = 0.25
"""Fraction of the queue's delay that an efficient batch may take: whoever arrives waits that long in any case."""

MIXED_PART = 0.25
"""Fraction of `max_batch_ms` up to which bulk items may fill a batch of an interactive item, which waits for them."""

LEAST_PART = 4.0
"""Minimum size of the parts of a burst that is spread over free slots, in multiples of a call's fixed cost: a request
with two short texts is one batch, not two."""

SCAN_LIMIT = 256
"""Maximum flows examined per batch: bounds the work of `take` when a thousand flows have a thousand lengths."""

NEVER = float("-inf")

LOOK_AGAIN_S = 0.05
"""Polling interval where no event signals a change."""


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


@dataclass(frozen=True, slots=True)
class Limits:
    """The operator's settings for a lane; a replica's facts narrow them further."""

    max_batch_size: int = 64
    max_batch_tokens: int = 16384
    max_batch_ms: float = 40.0
    max_wait_time_ms: float = 0.0
    max_age_ms: float = 250.0


def longest_batch_tokens(limits: Limits, cost: CostModel, delay: float = 0.0) -> float:
    """Return the maximum work of a batch, where the queue takes `delay` seconds.

    A batch may take `max_batch_ms`, or longer where a larger one is worth it: up to the size at which the engine is
    efficient, as long as its tokens take at most `PATIENCE` times that, or a fraction of the delay that the queue has
    anyway. They may always take as long as the call overhead: each call costs that in any case, and batches of one
    under expensive calls would only lengthen the queue.
    """
    seconds = limits.max_batch_ms / 1000
    patience = max(seconds * PATIENCE, delay * DELAY_PART)
    least = cost.tokens_within(max(seconds, cost.fixed * 2))
    return max(least, min(cost.efficient(), cost.tokens_within(cost.fixed + patience)))


class Batch(msgspec.Struct, Generic[E], frozen=True):
    """Entries for one slot, and why they leave: "full", "idle" or "age" (see BatchFacts)."""

    entries: list[E]
    flush: str


class Wait(msgspec.Struct, frozen=True):
    """Nothing to run yet; call `take` again at `until` (None: when something arrives)."""

    until: float | None


class _Flow(Generic[E]):
    """One request's queued entries by (group, bucket), so that a batch finds matching entries without a search.

    Entries that left the queue stay in their list until its head is read. A request has at most a few hundred entries
    here, and mostly one, for which a list is cheaper than a deque.
    """

    __slots__ = ("key", "queues", "vtime")

    def __init__(self, key: Hashable, vtime: float) -> None:
        self.key = key
        self.vtime = vtime
        self.queues: dict[tuple[Hashable, int], list[E]] = {}

    def push(self, entry: E, bucket: int) -> None:
        key = (entry.group, -entry.sequence if entry.runs_alone else bucket)
        queue = self.queues.get(key)
        if queue is None:
            self.queues[key] = [entry]
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


class _Branch(Generic[E]):
    """A class or a client: children in a heap by virtual time. Only the top child is ever modified."""

    __slots__ = ("children", "floor", "heap", "key", "skipped", "vtime")

    def __init__(self, key: Hashable, vtime: float) -> None:
        self.key = key
        self.vtime = vtime
        self.floor = 0.0
        self.children: dict[Hashable, _Branch[E] | _Flow[E]] = {}
        self.heap: list[tuple[float, int, _Branch[E] | _Flow[E]]] = []
        self.skipped: list[tuple[float, int, _Branch[E] | _Flow[E]]] = []

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


@dataclass(slots=True)
class _Class(Generic[E]):
    """A traffic class. `last_served`: when it was last served. `since`: when it last became non-empty."""

    root: _Branch[E]
    weight: int
    vtime: float = 0.0
    last_served: float = 0.0
    since: float = 0.0
    items: int = 0
    work: float = 0.0


class _Draft(msgspec.Struct, Generic[E]):
    """The batch being filled. `longest`: work that its duration allows. `waste`: padding tokens by bucket length."""

    facts: EngineFacts
    limits: Limits
    longest: float = 0.0
    entries: list[E] = msgspec.field(default_factory=list)
    length: int = 0
    tokens: int = 0
    work: float = 0.0
    waste: dict[int, int] = msgspec.field(default_factory=dict)
    limited: bool = False
    is_full: bool = False

    def fits(self, entry: E, length: int) -> bool:
        """Whether one more item keeps a non-empty batch within every limit; a negative answer sets `limited`."""
        facts = self.facts
        size = len(self.entries) + 1
        tokens, work = self.tokens + entry.cost, self.work + entry.work
        if facts.pads_batches:
            longest = max(length, self.length)
            tokens = round_up(size, facts.size_buckets) * longest
            work = facts.cost.work(tokens, longest) if facts.cost.attention else tokens
        most = min(self.limits.max_batch_tokens, facts.max_batch_tokens or self.limits.max_batch_tokens)
        inside = size <= min(self.limits.max_batch_size, facts.max_batch_size) and tokens <= most
        inside = inside and work <= self.longest
        self.limited = self.limited or not inside
        return inside

    def worth(self, length: int) -> bool:
        """Whether padding items of this bucket costs less than the call that it saves."""
        cost = self.facts.cost
        padding = self.waste.get(length, 0) + self._padding(length)
        return cost.work(padding, max(length, self.length)) * cost.per_token < cost.fixed

    def add(self, entry: E, length: int) -> None:
        if padding := self._padding(length):
            self.waste[length] = self.waste.get(length, 0) + padding
        self.entries.append(entry)
        self.length = max(self.length, length)
        self.tokens += entry.cost
        self.work += entry.work

    def is_closed(self, portion: float) -> bool:
        return self.is_full or (bool(self.entries) and (self.entries[0].runs_alone or self.work >= portion))

    def _padding(self, length: int) -> int:
        """Padding tokens that an item of this length adds: to its own row, or to all others if it is the longest."""
        if not self.facts.pads_batches:
            return 0
        return self.length - length if length < self.length else len(self.entries) * (length - self.length)


class Planner(Generic[E]):
    """The queue of one lane, which picks the next batch. Not thread-safe; the caller passes the time as `now`.

    `attention` is that of the lane's model (see CostModel). An entry that arrives at an empty queue is `_single_entry`,
    outside of any flow, until another one arrives.
    """

    def __init__(self, limits: Limits, length_buckets: Sequence[int] = (), attention: float = 0.0) -> None:
        self.limits = limits
        self._cost = CostModel(attention=attention)  # only for its `work`
        self.items = 0
        self.tokens = 0
        self._work = 0.0
        self._buckets = tuple(length_buckets)
        self._classes: dict[TrafficClass, _Class[E]] = {
            name: _Class(_Branch(name, 0.0), weight) for name, weight in WEIGHTS.items()
        }
        self._arrivals: deque[E] = deque()
        self._sequence = count(1)
        self._interactive_seen = NEVER
        self._skipping_branches: list[_Branch[E]] = []
        self._single_entry: E | None = None
        self._keeps_slot = False

    def add(self, entry: E, now: float) -> None:
        """Queue one entry until it is taken or discarded."""
        entry.queued = True
        entry.sequence = next(self._sequence)
        lane = self._classes[entry.traffic]
        if not lane.items:
            lane.since = now
            lane.vtime = max(lane.vtime, self._virtual_now())
        entry.work = self._cost.work(entry.cost, entry.cost) if self._cost.attention else entry.cost
        lane.items += 1
        lane.work += entry.work
        if self.items:
            if self._single_entry is not None:
                self._enter_flow(self._single_entry)
                self._single_entry = None
            self._enter_flow(entry)
        else:
            self._single_entry = entry
        self.items += 1
        self.tokens += entry.cost
        self._work += entry.work
        self._arrivals.append(entry)
        if entry.traffic == "interactive" or self._interactive_seen == NEVER:
            self._interactive_seen = now  # a new lane counts as shared: it is chance who comes first

    def _enter_flow(self, entry: E) -> None:
        client = self._child(self._classes[entry.traffic].root, entry.client)
        flow = self._flow(client, entry.request)
        flow.push(entry, round_up(entry.cost, self._buckets))

    def discard(self, entry: E) -> None:
        """Remove an entry from the queue; does nothing if it already left."""
        if entry.queued:
            self._remove(entry)

    def take(
        self,
        facts: EngineFacts,
        now: float,
        *,
        share: int = 1,
        behind: float = 0.0,
        replicas: int = 1,
        last_slot: bool = False,
    ) -> tuple[Batch[E] | Wait, list[E]]:
        """Return the next batch for a free slot of a replica with these facts, and the entries that cannot meet their
        deadline, which leave the queue without a call.

        `share` > 1 splits the queue over that many slots, which are free now and compute in parallel. A batch that
        starts now waits `behind` seconds on the replica, one of `replicas` that serve the queue. `last_slot`: all
        other slots have long batches, so this one is kept from long bulk items while interactive ones arrive.
        """
        expired: list[E] = []
        if not self.items:
            return Wait(None), expired
        until = self._arrivals[0].arrived + self.limits.max_wait_time_ms / 1000
        if now < until and self.items < self._max_items(facts) and self.tokens < self.limits.max_batch_tokens:
            return Wait(until), expired
        self._keeps_slot = last_slot
        if self._single_entry is not None:
            if last_slot and self._must_wait(self._single_entry, facts.cost, now):
                return Wait(now + LOOK_AGAIN_S), expired
            return self._take_lone(self._single_entry, facts, now, behind)
        draft = self._fill(facts, now, share, behind, replicas, expired)
        if draft is None:
            # Every examined entry has expired or has to wait. If others remain, nothing else would wake the lane.
            return Wait(now + LOOK_AGAIN_S if self.items else None), expired
        full = draft.limited or len(draft.entries) == self._max_items(facts)
        flush = "full" if full else "age" if self.limits.max_wait_time_ms else "idle"
        return Batch(draft.entries, flush), expired

    def _take_lone(self, entry: E, facts: EngineFacts, now: float, behind: float) -> tuple[Batch[E] | Wait, list[E]]:
        """Take the only entry, as `_fill` would: on an idle replica it runs unless its deadline has passed."""
        lane = self._classes[entry.traffic]
        self._remove(entry)
        lane.vtime += entry.work / lane.weight
        lane.last_served = now
        if entry.deadline <= now or (behind and entry.deadline < now + behind + facts.cost.seconds(entry.work)):
            return Wait(None), [entry]
        full = self.limits.max_batch_size == 1 or facts.max_batch_size == 1
        flush = "full" if full else "age" if self.limits.max_wait_time_ms else "idle"
        return Batch([entry], flush), []

    def _fill(
        self, facts: EngineFacts, now: float, share: int, behind: float, replicas: int, expired: list[E]
    ) -> _Draft[E] | None:
        draft: _Draft[E] = _Draft(facts, self.limits)
        worthwhile = LEAST_PART * facts.cost.fixed / max(facts.cost.per_token, 1e-9)
        portion = max(self._work / share, worthwhile) if share > 1 else self._work
        looked = 0
        hasty: list[E] = []
        for name in self._class_order(now):
            lane = self._classes[name]
            draft.longest, draft.is_full = self._longest_tokens(name, draft, now, replicas), False
            while lane.root.heap and looked < SCAN_LIMIT and not draft.is_closed(portion):
                client, flow = self._top(lane.root)
                key = self._match(flow, draft)
                if key is None or (self._keeps_slot and self._must_wait(flow.queues[key][0], facts.cost, now)):
                    # An empty flow costs one pop and is removed. If it counted toward the scan limit, many callers who
                    # left would hide the requests behind them.
                    looked += bool(flow.queues)
                    self._pass_over(lane.root, client, flow)
                    continue
                entry = self._serve(lane, client, flow, key)
                lane.last_served = now
                if entry.deadline <= now:
                    expired.append(entry)
                elif entry.deadline < now + behind + self._predict_seconds(facts, draft, entry):
                    hasty.append(entry)
                else:
                    draft.add(entry, round_up(entry.cost, facts.length_buckets))
        if self._skipping_branches:
            self._restore()
        if hasty and not (draft.entries or behind):
            # The slot would stay idle, so run one: an overestimating cost model must be able to correct itself.
            last = max(hasty, key=lambda entry: entry.deadline)
            hasty.remove(last)
            draft.add(last, round_up(last.cost, facts.length_buckets))
        expired += hasty
        return draft if draft.entries else None

    def _match(self, flow: _Flow[E], draft: _Draft[E]) -> tuple[Hashable, int] | None:
        """Return the flow's queue whose head should join: of the draft's bucket, else the nearest worth its padding."""
        if not draft.entries:
            heads = flow.heads()
            if len(heads) > 1:
                return min(heads, key=lambda head: head[1].sequence)[0]
            return heads[0][0] if heads else None
        leader = draft.entries[0]
        own = (leader.group, draft.length)
        same = flow.head(own)
        if same is not None:
            # An item that does not fit without padding does not fit with it either, so no other flow is searched.
            draft.is_full = not draft.fits(same, draft.length)
            return None if draft.is_full else own
        best: tuple[Hashable, int] | None = None
        distance = 0
        for key, entry in flow.heads():
            if entry.runs_alone or entry.group != leader.group:
                continue
            length = round_up(entry.cost, draft.facts.length_buckets)
            apart = abs(length - draft.length)
            if (best is None or apart < distance) and draft.worth(length) and draft.fits(entry, length):
                best, distance = key, apart
        return best

    def _serve(self, lane: _Class[E], client: _Branch[E], flow: _Flow[E], key: tuple[Hashable, int]) -> E:
        """Take the head of a queue of the top flow, and charge its cost at all levels."""
        queue = flow.queues[key]
        entry = queue.pop(0)
        self._remove(entry)
        lane.vtime += entry.work / lane.weight
        if queue:
            flow.head(key)
        else:
            del flow.queues[key]
        if flow.queues:
            client.charge_top(entry.work, next(self._sequence))
        else:
            client.drop_top()
        if not client.children:
            lane.root.drop_top()
        elif client.heap:
            lane.root.charge_top(entry.work, next(self._sequence))
        else:
            self._skipping_branches.append(lane.root)
            lane.root.set_top_aside(entry.work)
        return entry

    def _pass_over(self, root: _Branch[E], client: _Branch[E], flow: _Flow[E]) -> None:
        """Skip a flow with no matching entry until `_restore`, or drop it if it is empty."""
        if flow.queues:
            self._skipping_branches.append(client)
            client.set_top_aside()
        else:
            client.drop_top()
        if not client.heap:
            if client.skipped:
                self._skipping_branches.append(root)
                root.set_top_aside()
            else:
                root.drop_top()

    def _restore(self) -> None:
        for branch in self._skipping_branches:
            branch.restore()
        self._skipping_branches.clear()

    def _longest_tokens(self, name: TrafficClass, draft: _Draft[E], now: float, replicas: int) -> float:
        """Like `longest_batch_tokens`, but fewer for bulk items that share the lane with interactive ones."""
        facts, cost, seconds = draft.facts, draft.facts.cost, self.limits.max_batch_ms / 1000
        if name == "bulk" and draft.entries:
            # An interactive item waits for the bulk items in its batch.
            return cost.tokens_within(max(seconds * MIXED_PART, cost.fixed * (1 + MIXED_PART)))
        if name == "bulk" and now - self._interactive_seen < INTERACTIVE_MEMORY_S:
            seconds = max(seconds * SHARED_BULK_PART, min(seconds, cost.fixed / SHARED_CALL_PART))
            # Where slots share cores, an arriving item waits for the batches of all slots.
            return cost.tokens_within(max(seconds * facts.cores / facts.slots, cost.fixed * 2))
        if draft.entries:
            return cost.tokens_within(max(seconds, cost.fixed * 2))
        # An interactive item that arrives does not wait for queued bulk items, only for their batches.
        delay = cost.seconds(self._classes[name].work) / (facts.cores * replicas) if name == "interactive" else 0.0
        return longest_batch_tokens(self.limits, cost, delay)

    def _predict_seconds(self, facts: EngineFacts, draft: _Draft[E], entry: E) -> float:
        """Predict the duration of the batch that this entry would join: a full one, or the whole queue.

        A smaller batch that meets its deadline is not considered: batches would shrink under overload.
        """
        cost = facts.cost
        queued = min(draft.work + entry.work + self._work, entry.work * self._max_items(facts))
        return cost.seconds(max(min(draft.longest, queued), entry.work))

    def _must_wait(self, entry: E, cost: CostModel, now: float) -> bool:
        """Whether a long bulk item has to leave the last slot to interactive items, the last of which arrived less than
        the item's own time ago. Otherwise each of these would wait for the end of a text that cannot be split."""
        seconds = cost.seconds(entry.work)
        return (
            entry.traffic == "bulk"
            and seconds * 1000 > self.limits.max_batch_ms
            and now - self._interactive_seen < max(seconds, INTERACTIVE_MEMORY_S)
        )

    def _class_order(self, now: float) -> list[TrafficClass]:
        """Return the classes by virtual time; a class not served for `max_age_ms` goes first.

        Age counts from when the class was last served, not from its oldest item: a backlog is always old, and would
        turn the queue into first come, first served, which would favor the bulk client.
        """
        busy = [name for name, lane in self._classes.items() if lane.items]
        if len(busy) == 1:
            return busy
        starved = [
            n
            for n in busy
            if (now - max(self._classes[n].last_served, self._classes[n].since)) * 1000 > self.limits.max_age_ms
        ]
        by_time = sorted(busy, key=lambda name: self._classes[name].vtime)
        return starved[:1] + [name for name in by_time if name not in starved[:1]]

    def _virtual_now(self) -> float:
        """Return the smallest virtual time of the classes with items, or the largest of all if every class is empty.

        The service of a class before an idle period is therefore neither its debt afterwards nor another's credit.
        """
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
        if entry is self._single_entry:
            self._single_entry = None
        self.items -= 1
        self.tokens -= entry.cost
        self._work = self._work - entry.work if self.items else 0.0  # rounding must not add up
        lane = self._classes[entry.traffic]
        lane.items -= 1
        lane.work = lane.work - entry.work if lane.items else 0.0
        while self._arrivals and not self._arrivals[0].queued:
            self._arrivals.popleft()

    def _max_items(self, facts: EngineFacts) -> int:
        return min(self.limits.max_batch_size, facts.max_batch_size)
