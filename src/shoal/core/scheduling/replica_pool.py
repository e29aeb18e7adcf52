"""The replicas of a lane: which may get a batch, and which caused a failure. Pure; the caller passes the time."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.protocols import Engine, ReplicaStatus
from shoal.core.scheduling.replica import Replica
from shoal.core.scheduling.retries import RetryBudget, RetryState
from shoal.errors import EngineFailed, ShoalError


class ReplicaPool(list[Replica]):
    """The replicas of a lane. `retry_budget` bounds the calls spent on retrying batches."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__(map(Replica, engines))
        self.retry_budget = RetryBudget(len(engines))

    def status(self, now: float) -> list[ReplicaStatus]:
        return [replica.status(now) for replica in self]

    def is_usable(self, now: float) -> bool:
        for replica in self:  # noqa: SIM110 - asked for every request, and a generator costs three times as much
            if replica.is_usable(now):
                return True
        return False

    def free_replicas(self, now: float) -> list[Replica]:
        """Replicas that can take a batch now. Ejected ones are left out unless no usable replica is healthy."""
        free = [replica for replica in self if replica.is_free(now)]
        if len(self) == 1 or not any(replica.is_healthy(now) for replica in self):
            return free
        return [replica for replica in free if replica.ejection.can_take(now, replica.running)]

    def serving_replicas(self, now: float) -> list[Replica]:
        """Replicas that get work, busy or not. A single one always does: nothing can take its place."""
        if len(self) == 1:
            return self
        there = [replica for replica in self if replica.is_usable(now)]
        if len(there) <= 1:
            return there
        return [replica for replica in there if replica.ejection.is_healthy(now)] or there

    def next_check_s(self, now: float) -> float | None:
        """Seconds until to check again when no replica is free; None if the end of a batch triggers the check."""
        return min([again for each in self if (again := each.next_check_s(now)) is not None], default=None)

    def choose(self, free: Sequence[Replica], now: float) -> Replica:
        """Choose one of several free replicas for a new batch: the one that answers soonest.

        One on trial goes first: under little load the others are always free, so it would never be tried again, and
        would be missing when they fail. Without a healthy replica they take turns, to find one that is well again.
        """
        if not any(replica.is_healthy(now) for replica in self):
            return min(free, key=lambda replica: (replica.running, replica.last_start))
        return min(free, key=lambda replica: (not replica.ejection.on_trial, replica.load()))

    def pick(self, free: Sequence[Replica], retries: RetryState, now: float) -> Replica | None:
        """Pick the replica for a part of a failed batch.

        Avoids the replica on which the batch failed as long as another healthy one exists. Returns None if that one is
        busy: the part waits for it.
        """
        others = [replica for replica in free if replica is not retries.first] if not retries.failed_twice else free
        if not others and retries.first is not None and self._has_other(retries.first, now):
            return None
        return min(others or free, key=Replica.load)

    def blame(self, replica: Replica, retries: RetryState, error: ShoalError, now: float) -> bool:
        """Count an unexplained failure against its replica if there is another one to compare with.

        Returns whether to try the batch on the other one. If it fails there too, and that replica answered its last
        batch, an input is at fault and the first replica's failure is taken back.
        """
        if not isinstance(error, EngineFailed) or retries.failed_twice:
            return False
        if retries.first is None:
            if not self._has_other(replica, now):
                return False
            replica.ejection.record_failure(now)
            retries.first = replica
            return self.retry_budget.spend()
        retries.failed_twice = True
        if isinstance(retries.first, Replica) and retries.first is not replica:
            if not replica.ejection.failures:
                retries.first.ejection.undo_failure()
            replica.ejection.record_failure(now)
        return False

    def _has_other(self, first: object, now: float) -> bool:
        return any(replica is not first and replica.is_healthy(now) for replica in self)
