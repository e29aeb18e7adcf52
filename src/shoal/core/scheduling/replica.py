"""One engine instance of a lane: its free slots, health and learned limits."""

from __future__ import annotations

from itertools import islice

import msgspec

from shoal.core.protocols import Engine, EngineFacts, ReplicaStatus
from shoal.core.scheduling.cost import OnlineCost
from shoal.core.scheduling.ejection import Ejection
from shoal.core.scheduling.planner import LOOK_AGAIN_S

LEAST_TOKENS = 1

BUSY_PAUSE_S = 0.1
"""Pause of a replica that was too busy and did not say for how long."""

TIMEOUT_FACTOR = 2.0
"""Assumed ratio of a batch's duration to the time after which it was given up: a prediction that is far too short is
corrected in a few batches, and one that becomes too long by the next batch that succeeds."""


class SlotLease(msgspec.Struct, eq=False):
    """A batch on the replica.

    `started`: the estimated start of its computation: when it was sent, or when an earlier batch ended if it
    `waits_for_core`. `shared`: another batch was in flight at the same time. `suspect`: it has the replica to itself,
    because a recent batch crashed it or failed in company. `seconds`: its predicted duration. `saturated`: it left no
    core of the replica idle.
    """

    started: float
    waits_for_core: bool
    shared: bool = False
    suspect: bool = False
    seconds: float = 0.0
    saturated: bool = False


class Replica:
    """A replica. `facts` are the engine's, with the cost learned online and the token limit learned from
    out-of-memory failures. `cores`: batches that it computes in parallel."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._leases: list[SlotLease] = []
        self._engine_facts = engine.facts
        self.cores = self._engine_facts.cores
        self._cost = OnlineCost(self._engine_facts.cost)
        self._max_batch_tokens: int | None = None
        self.ejection = Ejection()
        self.last_start = 0.0
        self._unreachable_until = 0.0
        self._paused_until = 0.0
        self._suspects = 0
        self._facts: EngineFacts | None = None

    @property
    def running(self) -> int:
        """Batches in flight."""
        return len(self._leases)

    @property
    def facts(self) -> EngineFacts:
        stated = self.engine.facts
        if stated is not self._engine_facts:
            if stated.cost != self._engine_facts.cost:
                self._cost = OnlineCost(stated.cost)
            self._engine_facts = stated
            self.cores = stated.cores
            self._facts = None
        if self._facts is None:
            most = self._max_batch_tokens if self._max_batch_tokens is not None else stated.max_batch_tokens
            self._facts = msgspec.structs.replace(stated, cost=self._cost.model, max_batch_tokens=most)
        return self._facts

    def is_usable(self, now: float) -> bool:
        """Whether the replica is reachable and ready. It may still be ejected, which matters only if others are not."""
        return now >= self._unreachable_until and self.engine.ready()

    def is_healthy(self, now: float) -> bool:
        return self.is_usable(now) and self.ejection.is_healthy(now)

    def status(self, now: float) -> ReplicaStatus:
        return self.ejection.status(self._engine_facts.name, now, present=self.is_usable(now))

    def _slots(self) -> int:
        """Maximum batches in flight: one while batches have to run alone."""
        return 1 if self._suspects else self._engine_facts.slots

    def free_slots(self) -> int:
        return self._slots() - len(self._leases)

    def is_free(self, now: float) -> bool:
        return len(self._leases) < self._slots() and now >= self._paused_until and self.is_usable(now)

    def next_check_s(self, now: float) -> float | None:
        """Seconds until to check again whether it is free; None if the end of a batch triggers the check."""
        if self.running >= self._slots():
            return None
        ends = max(self.ejection.ejected_until, self._paused_until)
        return ends - now if ends > now else LOOK_AGAIN_S

    def idle_cores(self) -> int:
        """Batches that could start now and be computed in parallel with the running ones."""
        return max(0, self.cores - len(self._leases))

    def load(self) -> float:
        """Sort key for free replicas: the smallest would answer a short text soonest."""
        return self.facts.cost.seconds(32) * (1 + len(self._leases))

    def backlog_s(self, now: float) -> float:
        """Predicted seconds that a batch sent now waits for the batches before it."""
        if len(self._leases) < self.cores:
            return 0.0
        first = min(max(0.0, lease.started + lease.seconds - now) for lease in self._leases[: self.cores])
        return first + sum(lease.seconds for lease in self._leases[self.cores :]) / self.cores

    def start(self, now: float, seconds: float = 0.0) -> SlotLease:
        """Take a slot for a batch that is predicted to take `seconds`; `end` gives the slot back."""
        running = len(self._leases)
        self.last_start = now
        lease = SlotLease(
            now, running >= self.cores, running > 0, self._suspects > 0, seconds, saturated=running + 1 >= self.cores
        )
        for other in self._leases:
            other.shared = True
        self._leases.append(lease)
        return lease

    def end(self, lease: SlotLease, now: float) -> None:
        self._leases.remove(lease)
        if lease.suspect:
            self._suspects -= 1
        for each in islice(self._leases, self.cores):
            if each.waits_for_core:
                each.started, each.waits_for_core = now, False

    def record_batch(self, work: float, seconds: float, *, saturated: bool = False) -> None:
        """Record a successful batch: learn its cost and reset the ejection state.

        `seconds` excludes the wait behind another batch. Included, it would look like an expensive call, for which the
        planner makes larger batches, which in turn lengthen the next wait.
        """
        self._cost.observe(work, seconds, saturated=saturated)
        self._facts = None
        self.ejection.record_success()
        self._unreachable_until = 0.0

    def record_timeout(self, work: float, seconds: float) -> None:
        """Record a batch that ended unfinished after `seconds`, at its deadline.

        If that is longer than predicted, learn that such a batch takes longer still: where every batch ended this way,
        a prediction that is too short would never be corrected.
        """
        if work and seconds > self.facts.cost.seconds(work):
            self._cost.observe(work, seconds * TIMEOUT_FACTOR)
            self._facts = None

    def record_crash(self, items: int) -> None:
        """Record a crash of the replica's process while a batch of `items` ran.

        The next `items` batches each have the replica to themselves, so that the next crash identifies its cause.
        """
        self._suspects = max(self._suspects, items)

    def isolate_batches(self, batches: int) -> None:
        """Run the next `batches` batches one at a time, each with the replica to itself."""
        self._suspects += batches

    def mark_unreachable(self, now: float) -> None:
        """Eject a replica that could not be reached, longer each time."""
        self.ejection.record_failure(now, unreachable=True)
        self._unreachable_until = self.ejection.ejected_until

    def pause(self, now: float, seconds: float | None) -> None:
        """Send no work for `seconds` (BUSY_PAUSE_S if None), because the replica's own queue is full."""
        self._paused_until = max(self._paused_until, now + (BUSY_PAUSE_S if seconds is None else seconds))

    def shrink(self, tokens: int) -> None:
        """Limit batches to half of `tokens`, the size of a batch that ran out of memory."""
        known = self._max_batch_tokens if self._max_batch_tokens is not None else tokens
        self._max_batch_tokens = max(min(known, tokens) // 2, LEAST_TOKENS)
        self._facts = None
