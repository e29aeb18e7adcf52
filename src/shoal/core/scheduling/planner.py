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
from dataclasses import dataclass, field
from itertools import count
from typing import Generic

import msgspec

from shoal.core.protocols import CostModel, EngineFacts, round_up
from shoal.core.scheduling.batch_draft import Draft
from shoal.core.scheduling.fair_queue import WEIGHTS, Branch, ClassShare, E, Flow, enter_class, order_classes
from shoal.types import TrafficClass

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

BULK_RUN = 8
"""Items of a bulk request that are served in one turn beside other requests: as many as an interactive request usually
has. A turn costs the event loop more than the items do, and a request whose items are in fewer batches ends sooner."""

SCAN_LIMIT = 256
"""Maximum flows examined per batch: bounds the work of `take` when a thousand flows have a thousand lengths."""

SPARE_ARRIVALS = 64
"""Entries that may stay referenced after they were served, beside as many as wait: they hold tensors."""

NEVER = float("-inf")

LOOK_AGAIN_S = 0.05
"""Polling interval where no event signals a change."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The operator's settings for a lane; a replica's facts narrow them further.

    `mixes_lengths`: a batch may pad items of another length bucket. Kernels sum in another order where the padded
    length differs, so without it the result of an item does not depend on its batch.
    """

    max_batch_size: int = 64
    max_batch_tokens: int = 16384
    max_batch_ms: float = 40.0
    max_wait_time_ms: float = 0.0
    max_age_ms: float = 250.0
    mixes_lengths: bool = True


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


class _FreeSlot(msgspec.Struct, frozen=True):
    """The slot that a batch is for, as `Planner.take` describes it."""

    facts: EngineFacts
    now: float
    share: int
    behind: float
    replicas: int


@dataclass(slots=True)
class _Class(ClassShare, Generic[E]):
    """A traffic class with its clients and the work of its entries."""

    root: Branch[E] = field(kw_only=True)
    work: float = 0.0


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
            name: _Class(weight, root=Branch(name, 0.0)) for name, weight in WEIGHTS.items()
        }
        self._arrivals: deque[E] = deque()
        self._sequence = count(1)
        self._interactive_seen = NEVER
        self._skipping_branches: list[Branch[E]] = []
        self._single_entry: E | None = None
        self._keeps_slot = False

    def add(self, entries: Sequence[E], now: float) -> None:
        """Queue entries of one request, at least one, until each is taken or discarded."""
        first = entries[0]
        lane = self._classes[first.traffic]
        if not lane.items:
            enter_class(self._classes, lane, now)
        items, tokens, work = len(entries), 0, 0.0
        for entry in entries:
            entry.queued, entry.sequence, cost = True, next(self._sequence), entry.cost
            entry.work = self._cost.work(cost, cost) if self._cost.attention else cost
            tokens += cost
            work += entry.work
        lane.items += items
        lane.work += work
        if self.items or items > 1:
            if self._single_entry is not None:
                self._enter_flow([self._single_entry])
                self._single_entry = None
            self._enter_flow(entries)
        else:
            self._single_entry = first
        self.items += items
        self.tokens += tokens
        self._work += work
        self._arrivals += entries
        if first.traffic == "interactive" or self._interactive_seen == NEVER:
            self._interactive_seen = now  # a new lane counts as shared: it is chance who comes first

    def _enter_flow(self, entries: Sequence[E]) -> None:
        first = entries[0]
        client = self._child(self._classes[first.traffic].root, first.client)
        self._flow(client, first.request).push(entries, self._buckets)

    def discard(self, entry: E) -> None:
        """Remove an entry from the queue; does nothing if it already left."""
        if entry.queued:
            self._remove([entry])

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
        if not self.items:
            return Wait(None), []
        until = self._arrivals[0].arrived + self.limits.max_wait_time_ms / 1000
        if now < until and self.items < self._max_items(facts) and self.tokens < self.limits.max_batch_tokens:
            return Wait(until), []
        self._keeps_slot = last_slot
        if self._single_entry is not None:
            if last_slot and self._must_wait(self._single_entry, facts.cost, now):
                return Wait(now + LOOK_AGAIN_S), []
            return self._take_lone(self._single_entry, facts, now, behind)
        draft, expired = self._fill(_FreeSlot(facts, now, share, behind, replicas))
        if not draft.entries:
            # Every examined entry has expired or has to wait. If others remain, nothing else would wake the lane.
            return Wait(now + LOOK_AGAIN_S if self.items else None), expired
        full = draft.limited or len(draft.entries) == self._max_items(facts)
        flush = "full" if full else "age" if self.limits.max_wait_time_ms else "idle"
        return Batch(draft.entries, flush), expired

    def _take_lone(self, entry: E, facts: EngineFacts, now: float, behind: float) -> tuple[Batch[E] | Wait, list[E]]:
        """Take the only entry, as `_fill` would: on an idle replica it runs unless its deadline has passed."""
        lane = self._classes[entry.traffic]
        self._remove([entry])
        lane.vtime += entry.work / lane.weight
        lane.last_served = now
        if entry.deadline <= now or (behind and entry.deadline < now + behind + facts.cost.seconds(entry.work)):
            return Wait(None), [entry]
        full = self.limits.max_batch_size == 1 or facts.max_batch_size == 1
        flush = "full" if full else "age" if self.limits.max_wait_time_ms else "idle"
        return Batch([entry], flush), []

    def _fill(self, slot: _FreeSlot) -> tuple[Draft[E], list[E]]:
        """Return the next batch, which may be empty, and the entries that cannot meet their deadline."""
        facts, now, share = slot.facts, slot.now, slot.share
        max_tokens = min(self.limits.max_batch_tokens, facts.max_batch_tokens or self.limits.max_batch_tokens)
        draft: Draft[E] = Draft(facts, self._max_items(facts), max_tokens)
        worthwhile = LEAST_PART * facts.cost.fixed / max(facts.cost.per_token, 1e-9)
        portion = max(self._work / share, worthwhile) if share > 1 else self._work
        looked = 0
        expired: list[E] = []
        hasty: list[E] = []
        for name in order_classes(self._classes, now, self.limits.max_age_ms):
            lane = self._classes[name]
            draft.open(self._longest_tokens(name, draft, now, slot.replicas))
            while lane.root.heap and looked < SCAN_LIMIT and not draft.is_closed(portion):
                client, flow = self._top(lane.root)
                key = self._match(flow, draft)
                if key is None or (self._keeps_slot and self._must_wait(flow.queues[key][0], facts.cost, now)):
                    # An empty flow costs one pop and is removed. If it counted toward the scan limit, many callers who
                    # left would hide the requests behind them.
                    looked += bool(flow.queues)
                    self._pass_over(lane.root, client, flow)
                    continue
                queue = flow.queues[key]
                first = queue[0]
                length = round_up(first.cost, facts.length_buckets)
                count = 1
                if len(queue) > 1:
                    is_alone = len(client.heap) == len(lane.root.heap) == 1
                    most = draft.max_items if is_alone else BULK_RUN if name == "bulk" else 1
                    count = draft.count_run(queue, length, most, portion)
                entries = self._serve(lane, client, flow, key, count)
                lane.last_served = now
                if first.deadline <= now:
                    expired += entries
                elif first.deadline < now + slot.behind + self._predict_seconds(facts, draft, first):
                    hasty += entries
                else:
                    draft.add(entries, length)
        if self._skipping_branches:
            self._restore()
        if hasty and not (draft.entries or slot.behind):
            # The slot would stay idle, so run one: an overestimating cost model must be able to correct itself.
            last = max(hasty, key=lambda entry: entry.deadline)
            hasty.remove(last)
            draft.add([last], round_up(last.cost, facts.length_buckets))
        return draft, expired + hasty

    def _match(self, flow: Flow[E], draft: Draft[E]) -> tuple[Hashable, int] | None:
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
        if not self.limits.mixes_lengths:
            return None
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

    def _serve(
        self, lane: _Class[E], client: Branch[E], flow: Flow[E], key: tuple[Hashable, int], count: int
    ) -> list[E]:
        """Take the first entries of a queue of the top flow, and charge their work at all levels."""
        queue = flow.queues[key]
        if count == len(queue):
            entries = flow.queues.pop(key)
        else:
            entries = queue[:count]
            del queue[:count]
            flow.head(key)
        work = self._remove(entries)
        lane.vtime += work / lane.weight
        if flow.queues:
            client.charge_top(work, next(self._sequence))
        else:
            client.drop_top()
        if not client.children:
            lane.root.drop_top()
        elif client.heap:
            lane.root.charge_top(work, next(self._sequence))
        else:
            self._skipping_branches.append(lane.root)
            lane.root.set_top_aside(work)
        return entries

    def _pass_over(self, root: Branch[E], client: Branch[E], flow: Flow[E]) -> None:
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

    def _longest_tokens(self, name: TrafficClass, draft: Draft[E], now: float, replicas: int) -> float:
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

    def _predict_seconds(self, facts: EngineFacts, draft: Draft[E], entry: E) -> float:
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

    def _top(self, root: Branch[E]) -> tuple[Branch[E], Flow[E]]:
        client = root.heap[0][2]
        assert isinstance(client, Branch)
        flow = client.heap[0][2]
        assert isinstance(flow, Flow)
        return client, flow

    def _child(self, root: Branch[E], key: str) -> Branch[E]:
        child = root.children.get(key)
        if child is None:
            child = Branch(key, root.floor)
            root.children[key] = child
            heapq.heappush(root.heap, (child.vtime, next(self._sequence), child))
        assert isinstance(child, Branch)
        return child

    def _flow(self, client: Branch[E], key: Hashable) -> Flow[E]:
        flow = client.children.get(key)
        if flow is None:
            flow = Flow(key, client.floor)
            client.children[key] = flow
            heapq.heappush(client.heap, (flow.vtime, next(self._sequence), flow))
        assert isinstance(flow, Flow)
        return flow

    def _remove(self, entries: Sequence[E]) -> float:
        """Take entries of one class out of the counts, and return their work."""
        tokens, work = 0, 0.0
        for entry in entries:
            entry.queued = False
            tokens += entry.cost
            work += entry.work
        self._single_entry = None  # there is one only if it is the whole queue
        items, lane = len(entries), self._classes[entries[0].traffic]
        self.items -= items
        self.tokens -= tokens
        self._work = self._work - work if self.items else 0.0  # rounding must not add up
        lane.items -= items
        lane.work = lane.work - work if lane.items else 0.0
        while self._arrivals and not self._arrivals[0].queued:
            self._arrivals.popleft()
        if len(self._arrivals) > 2 * self.items + SPARE_ARRIVALS:
            self._arrivals = deque([entry for entry in self._arrivals if entry.queued])
        return work

    def _max_items(self, facts: EngineFacts) -> int:
        return min(self.limits.max_batch_size, facts.max_batch_size)
