"""Whose turn it is among the replicas of a language model: pure, but for the clock that it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

PAUSE_S = 5.0
"""For a replica that said nothing; each further time in a row twice as long."""

LONGEST_PAUSE_S = 60.0


@dataclass(slots=True)
class _Replica:
    running: int = 0
    picked: int = 0
    silences: int = 0
    back: float = 0.0


class Rota:
    """The one with the fewest answers in flight, ties in turn. One that kept a request waiting for `patience_s` without
    a first piece is left alone for a while, then tried with a single request; it is not, when there is no other."""

    def __init__(self, count: int, patience_s: float, clock: Callable[[], float]) -> None:
        self._replicas = [_Replica() for _ in range(count)]
        self._patience_s = patience_s
        self._clock = clock
        self._turn = 0

    def pick(self, there: Sequence[int]) -> int:
        """One of those that are there, which is at least one."""
        now = self._clock()
        fit = [at for at in there if self._fit(self._replicas[at], now)] or there
        at = min(fit, key=lambda at: (self._replicas[at].running, self._replicas[at].picked))
        self._turn += 1
        self._replicas[at].picked = self._turn
        return at

    def begin(self, at: int) -> float:
        """A request goes to it; answers the time, for `end`."""
        self._replicas[at].running += 1
        return self._clock()

    def answered(self, at: int) -> None:
        """It has given a first piece."""
        self._replicas[at].silences = 0

    def end(self, at: int, began: float, *, answered: bool) -> None:
        replica = self._replicas[at]
        replica.running -= 1
        now = self._clock()
        if not answered and now - began >= self._patience_s:
            replica.back = now + min(PAUSE_S * 2**replica.silences, LONGEST_PAUSE_S)
            replica.silences = min(replica.silences + 1, 10)

    @staticmethod
    def _fit(replica: _Replica, now: float) -> bool:
        return not replica.silences or (now >= replica.back and not replica.running)
