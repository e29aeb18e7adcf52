"""One engine instance of a lane: what it may take now, and what its batches have taught."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import msgspec

from shoal.core.protocols import Engine, EngineFacts, ReplicaStatus
from shoal.core.scheduling.cost import OnlineCost
from shoal.core.scheduling.ejection import Ejection
from shoal.core.scheduling.planner import LOOK_AGAIN_S

LEAST_TOKENS = 1

BUSY_PAUSE_S = 0.1
"""How long a replica is left alone that was too busy and did not say for how long it will be."""


class SlotLease(msgspec.Struct, eq=False):
    """A batch on the replica. `began`: when it was computed from, as far as can be told from here: at once, or when one
    before it ended. `shared`: another batch was in flight beside it for a while. `isolate_batches`: it has the replica
    for itself, since one of the batches of now is somebody's ruin. `seconds`: what it was predicted to take."""

    began: float
    waits: bool
    shared: bool = False
    suspect: bool = False
    seconds: float = 0.0


class Replica:
    """Facts are the engine's own, narrowed by what was learnt: its cost online, its memory the hard way. `cores`: how
    many batches it computes side by side."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._turns: list[SlotLease] = []
        self._stated = engine.facts
        self.cores = self._stated.parallel or self._stated.slots
        self._cost = OnlineCost(self._stated.cost)
        self._most_tokens: int | None = None
        self.ejection = Ejection()
        self._gone_until = 0.0
        self._held_until = 0.0
        self._suspects = 0
        self._facts: EngineFacts | None = None

    @property
    def running(self) -> int:
        """Batches in flight."""
        return len(self._turns)

    @property
    def facts(self) -> EngineFacts:
        stated = self.engine.facts
        if stated is not self._stated:
            if stated.cost != self._stated.cost:
                self._cost = OnlineCost(stated.cost)
            self._stated = stated
            self.cores = stated.parallel or stated.slots
            self._facts = None
        if self._facts is None:
            most = self._most_tokens if self._most_tokens is not None else stated.max_batch_tokens
            self._facts = replace(stated, cost=self._cost.model, max_batch_tokens=most)
        return self._facts

    def is_usable(self, now: float) -> bool:
        """Whether it is there; it may be ejected all the same, which counts while others are not."""
        return now >= self._gone_until and self.engine.ready()

    def is_healthy(self, now: float) -> bool:
        return self.is_usable(now) and self.ejection.is_healthy(now)

    def status(self, now: float) -> ReplicaStatus:
        return self.ejection.status(self._stated.name, now, present=self.is_usable(now))

    def is_free(self, now: float) -> bool:
        return len(self._turns) < self._slots and now >= self._held_until and self.is_usable(now)

    def next_check_s(self, now: float) -> float | None:
        """In how many seconds to ask again whether it is free, which it is not; None: the end of a batch will tell."""
        if self.running >= self._slots:
            return None
        ends = max(self.ejection.until, self._held_until)
        return ends - now if ends > now else LOOK_AGAIN_S

    def idle_cores(self) -> int:
        """Batches that could start now and be computed side by side with what runs."""
        return max(0, self.cores - len(self._turns))

    def load(self) -> float:
        """Orders free replicas: the one that would answer a short text first."""
        return self.facts.cost.seconds(32) * (1 + len(self._turns))

    def backlog_s(self, now: float) -> float:
        """Seconds that a batch which is sent now waits for those before it, as far as they can be predicted."""
        if len(self._turns) < self.cores:
            return 0.0
        first = min(max(0.0, turn.began + turn.seconds - now) for turn in self._turns[: self.cores])
        return first + sum(turn.seconds for turn in self._turns[self.cores :]) / self.cores

    def start(self, now: float, seconds: float = 0.0) -> SlotLease:
        """A batch that is predicted to take so long goes there; `end` gives its slot back."""
        running = len(self._turns)
        turn = SlotLease(now, running >= self.cores, shared=running > 0, suspect=self._suspects > 0, seconds=seconds)
        for other in self._turns:
            other.shared = True
        self._turns.append(turn)
        return turn

    def end(self, turn: SlotLease, now: float) -> None:
        self._turns.remove(turn)
        if turn.suspect:
            self._suspects -= 1
        for each in islice(self._turns, self.cores):
            if each.waits:
                each.began, each.waits = now, False

    def record_batch(self, tokens: int, seconds: float) -> None:
        """A batch came back after so many seconds of its own turn: learn its cost, and trust the replica again. Its
        wait behind another batch is no cost: it would look like a dear call, for which batches grow, which makes the
        next wait longer."""
        self._cost.observe(tokens, seconds)
        self._facts = None
        self.ejection.record_success()
        self._gone_until = 0.0

    def record_crash(self, items: int) -> None:
        """Its process died of one of so many items, or beside them: the next batches, as many, have it for themselves,
        so that the next death has one culprit."""
        self._suspects = max(self._suspects, items)

    def isolate_batches(self, batches: int) -> None:
        """So many batches are to run now, each with the replica for itself."""
        self._suspects += batches

    @property
    def _slots(self) -> int:
        return 1 if self._suspects else self._stated.slots

    def mark_unreachable(self, now: float) -> None:
        """The replica was not there: leave it alone for a while, longer each time."""
        self.ejection.record_failure(now, gone=True)
        self._gone_until = self.ejection.until

    def pause(self, now: float, seconds: float | None) -> None:
        """The replica's own queue is full: give it no work for so long."""
        self._held_until = max(self._held_until, now + (BUSY_PAUSE_S if seconds is None else seconds))

    def shrink(self, tokens: int) -> None:
        """A batch of so many tokens ran out of memory: remember half of it as the limit."""
        known = self._most_tokens if self._most_tokens is not None else tokens
        self._most_tokens = max(min(known, tokens) // 2, LEAST_TOKENS)
        self._facts = None
