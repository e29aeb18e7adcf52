"""Eject failing replicas and try them again later: one state machine for every kind of replica."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.core.protocols import ReplicaState, ReplicaStatus

MAX_FAILURES = 5
"""Consecutive failures that eject a replica which still answers (Envoy's consecutive_5xx)."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""Model fleets are small, so losing one replica hurts: retry it sooner than Envoy's 30 to 300 s."""


@dataclass(slots=True, eq=False, kw_only=True)
class Ejection:
    """The state of one replica: in service, ejected `ejected_until` a time, or on trial.

    MAX_FAILURES consecutive failures eject it; so does a single one with `unreachable`. Each consecutive ejection lasts
    twice as long as the one before. Afterwards the replica is on trial: it gets one request at a time until one
    succeeds. `ejections` counts the ejections.
    """

    first_s: float = FIRST_PAUSE_S
    longest_s: float = LONGEST_PAUSE_S
    failures: int = 0
    ejections: int = 0
    ejected_until: float = 0.0
    on_trial: bool = False
    _pause: float = field(default=0.0, init=False)

    def is_healthy(self, now: float) -> bool:
        """Whether the replica is neither ejected nor on trial."""
        return now >= self.ejected_until and not self.on_trial

    def can_take(self, now: float, in_flight: int) -> bool:
        """Whether the replica may get another request in addition to its `in_flight` ones."""
        return now >= self.ejected_until and not (self.on_trial and in_flight)

    def end_trial(self) -> None:
        """End the trial because the replica started to answer, even though the answer may still fail."""
        self.on_trial = False

    def record_success(self) -> None:
        self.failures = 0
        self._pause = 0.0
        self.on_trial = False
        self.ejected_until = 0.0

    def record_failure(self, now: float, *, unreachable: bool = False) -> None:
        """Count a failure. `unreachable`: the replica could not be reached or timed out, which ejects it at once.

        Requests that fail during an ejection started before it and do not extend it.
        """
        self.failures += 1
        if (unreachable or self.on_trial or self.failures >= MAX_FAILURES) and now >= self.ejected_until:
            self._pause = min(2 * self._pause, self.longest_s) if self._pause else self.first_s
            self.ejected_until = now + self._pause
            self.on_trial = True
            self.ejections += 1

    def undo_failure(self) -> None:
        """Take back the last failure, which its input caused."""
        self.failures = max(0, self.failures - 1)

    def pause(self, now: float, seconds: float | None) -> None:
        """Pause for `seconds`, at most `longest_s`, because the replica asked for it."""
        if seconds:
            self.ejected_until = max(self.ejected_until, now + min(seconds, self.longest_s))

    def status(self, name: str, now: float, *, present: bool) -> ReplicaStatus:
        """Return the status to display. `present`: the replica's server is reachable."""
        state: ReplicaState = "on_trial" if self.on_trial else "in_service"
        if not present:
            state = "out_of_service"
        elif now < self.ejected_until:
            state = "ejected"
        return ReplicaStatus(name, state, self.ejections)
