"""Select a replica of a language model for each request. The clock is injected; nothing else is external."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.core.generation.affinity import NO_DEMAND, Demand, Load, choose
from shoal.core.protocols import ReplicaStatus
from shoal.core.scheduling.ejection import Ejection

PAUSE_S = 5.0
"""Pause of an ejected replica in seconds; it doubles with each further ejection in a row. LLM answers take seconds."""

LONGEST_PAUSE_S = 60.0


@dataclass(slots=True)
class _Replica:
    running: int = 0
    tokens: int = 0
    last_pick: int = 0
    ejection: Ejection = field(default_factory=lambda: Ejection(first_s=PAUSE_S, longest_s=LONGEST_PAUSE_S))

    def can_take(self, now: float) -> bool:
        return self.ejection.can_take(now, self.running)


class ReplicaSelector:
    """Picks the replica for each answer (see `affinity`).

    A replica that fails several times in a row, or keeps a request waiting for `patience_s` without a first piece, is
    ejected (see `Ejection`) unless it is the only one.
    """

    def __init__(self, names: Sequence[str], patience_s: float, clock: Callable[[], float]) -> None:
        self._names = names
        self._replicas = [_Replica() for _ in names]
        self._patience_s = patience_s
        self._clock = clock
        self._picks = 0

    def pick(self, there: Sequence[int], demand: Demand = NO_DEMAND) -> int:
        """Pick one of the replicas in `there`, which must not be empty."""
        now = self._clock()
        fit = [at for at in there if self._replicas[at].can_take(now)] or there
        replicas = [self._replicas[at] for at in fit]
        loads = [Load(each.running, each.tokens, each.last_pick) for each in replicas]
        at = fit[choose([self._names[at] for at in fit], loads, demand)]
        self._picks += 1
        self._replicas[at].last_pick = self._picks
        return at

    def begin(self, at: int, demand: Demand = NO_DEMAND) -> float:
        """Record the start of a request; returns the start time, for `end`."""
        self._replicas[at].running += 1
        self._replicas[at].tokens += demand.tokens
        return self._clock()

    def record_first_piece(self, at: int) -> None:
        """Record that the replica produced a first piece."""
        self._replicas[at].ejection.end_trial()

    def end(
        self, at: int, started_at: float, *, answered: bool, failed: bool = False, demand: Demand = NO_DEMAND
    ) -> None:
        """Record the end of a request. `failed`: the replica failed. A request without a piece that ended before
        `patience_s` counts neither as success nor as failure."""
        replica = self._replicas[at]
        replica.running -= 1
        replica.tokens -= demand.tokens
        now = self._clock()
        silent = not answered and now - started_at >= self._patience_s
        if failed or silent:
            replica.ejection.record_failure(now, unreachable=silent)
        elif answered:
            replica.ejection.record_success()

    def status(self, at: int, name: str, *, present: bool) -> ReplicaStatus:
        return self._replicas[at].ejection.status(name, self._clock(), present=present)
