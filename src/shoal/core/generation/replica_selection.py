"""Whose turn it is among the replicas of a language model: pure, but for the clock that it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.core.protocols import ReplicaStatus
from shoal.core.scheduling.ejection import Ejection

PAUSE_S = 5.0
"""For a replica that is ejected; each further time in a row twice as long. Answers of language models take seconds."""

LONGEST_PAUSE_S = 60.0


@dataclass(slots=True)
class _Replica:
    running: int = 0
    picked: int = 0
    ejection: Ejection = field(default_factory=lambda: Ejection(first_s=PAUSE_S, longest_s=LONGEST_PAUSE_S))

    def can_take(self, now: float) -> bool:
        return self.ejection.can_take(now, self.running)


class ReplicaSelector:
    """The one with the fewest answers in flight, ties in turn. One that fails several times in a row, or kept a request
    waiting for `patience_s` without a first piece, is ejected as `Ejection` says, unless there is no other."""

    def __init__(self, count: int, patience_s: float, clock: Callable[[], float]) -> None:
        self._replicas = [_Replica() for _ in range(count)]
        self._patience_s = patience_s
        self._clock = clock
        self._turn = 0

    def pick(self, there: Sequence[int]) -> int:
        """One of those that are there, which is at least one."""
        now = self._clock()
        fit = [at for at in there if self._replicas[at].can_take(now)] or there
        at = min(fit, key=lambda at: (self._replicas[at].running, self._replicas[at].picked))
        self._turn += 1
        self._replicas[at].picked = self._turn
        return at

    def begin(self, at: int) -> float:
        """A request goes to it; answers the time, for `end`."""
        self._replicas[at].running += 1
        return self._clock()

    def record_first_piece(self, at: int) -> None:
        """It has given a first piece."""
        self._replicas[at].ejection.end_trial()

    def end(self, at: int, began: float, *, answered: bool, failed: bool = False) -> None:
        """`failed`: the answer ended with the replica's failure. One without a piece that was not waited for tells
        nothing."""
        replica = self._replicas[at]
        replica.running -= 1
        now = self._clock()
        silent = not answered and now - began >= self._patience_s
        if failed or silent:
            replica.ejection.record_failure(now, gone=silent)
        elif answered:
            replica.ejection.record_success()

    def status(self, at: int, name: str, *, present: bool) -> ReplicaStatus:
        return self._replicas[at].ejection.status(name, self._clock(), present=present)
