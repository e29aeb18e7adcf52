"""When a replica that fails is left alone, and when it is tried again: one state machine for every kind of replica."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.core.protocols import ReplicaState, ReplicaStatus

MAX_FAILURES = 5
"""Failures in a row after which a replica that still answers is ejected (Envoy's consecutive_5xx)."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""Fleets of models are small: an ejected replica is missed, so it is tried again sooner than Envoy's 30 to 300 s."""


@dataclass(slots=True, eq=False, kw_only=True)
class Ejection:
    """The state of one replica: in service, ejected `until` a time, or on trial.

    MAX_FAILURES failures in a row eject it, one absence does at once, and each ejection in a row is twice as long as
    the last. Then the replica is on trial: it gets one request at a time until one succeeds. `ejections` counts them.
    """

    first_s: float = FIRST_PAUSE_S
    longest_s: float = LONGEST_PAUSE_S
    failures: int = 0
    ejections: int = 0
    until: float = 0.0
    on_trial: bool = False
    _pause: float = field(default=0.0, init=False)

    def is_healthy(self, now: float) -> bool:
        """Neither ejected nor on trial."""
        return now >= self.until and not self.on_trial

    def can_take(self, now: float, in_flight: int) -> bool:
        """Whether it may get one more request beside those that it has."""
        return now >= self.until and not (self.on_trial and in_flight)

    def end_trial(self) -> None:
        """It begins to answer: the trial is over, though the answer may still fail."""
        self.on_trial = False

    def record_success(self) -> None:
        self.failures = 0
        self._pause = 0.0
        self.on_trial = False
        self.until = 0.0

    def record_failure(self, now: float, *, gone: bool = False) -> None:
        """`gone`: it was not there or said nothing in all the time there is, which needs no second witness. Requests
        that fail while it is ejected began before that and do not make it longer."""
        self.failures += 1
        if (gone or self.on_trial or self.failures >= MAX_FAILURES) and now >= self.until:
            self._pause = min(2 * self._pause, self.longest_s) if self._pause else self.first_s
            self.until = now + self._pause
            self.on_trial = True
            self.ejections += 1

    def undo_failure(self) -> None:
        """The last failure was its input's fault."""
        self.failures = max(0, self.failures - 1)

    def pause(self, now: float, seconds: float | None) -> None:
        """It asked to be left alone for so long."""
        if seconds:
            self.until = max(self.until, now + min(seconds, self.longest_s))

    def status(self, name: str, now: float, *, present: bool) -> ReplicaStatus:
        """For people; `present`: its server is there."""
        state: ReplicaState = "on_trial" if self.on_trial else "in_service"
        if not present:
            state = "out_of_service"
        elif now < self.until:
            state = "ejected"
        return ReplicaStatus(name, state, self.ejections)
