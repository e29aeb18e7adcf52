"""The replicas of a lane: which may get a batch, and whose fault a failure was. Pure; every method is told `now`."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.protocols import Engine, ReplicaStatus
from shoal.core.scheduling.isolation import RetryBudget, RetryState
from shoal.core.scheduling.replica import Replica
from shoal.errors import EngineFailed, ShoalError


class ReplicaPool(list[Replica]):
    """`retries` bounds the calls that are spent on trying batches again."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__(map(Replica, engines))
        self.retries = RetryBudget(len(engines))

    def status(self, now: float) -> list[ReplicaStatus]:
        return [replica.status(now) for replica in self]

    def is_usable(self, now: float) -> bool:
        return any(replica.is_usable(now) for replica in self)

    def free_replicas(self, now: float) -> list[Replica]:
        """Those that a batch may go to now. An ejected one gets none, unless all that are there are ejected."""
        free = [replica for replica in self if replica.is_free(now)]
        if len(self) == 1 or not any(replica.is_healthy(now) for replica in self):
            return free
        return [replica for replica in free if replica.ejection.can_take(now, replica.running)]

    def serving_replicas(self, now: float) -> list[Replica]:
        """Those that get work, busy or not."""
        there = [replica for replica in self if replica.is_usable(now)]
        if len(there) <= 1:
            return there
        return [replica for replica in there if replica.ejection.is_healthy(now)] or there

    def next_check_s(self, now: float) -> float | None:
        """In how many seconds to ask again for a free one, where none is; None: the end of a batch will tell."""
        return min([again for each in self if (again := each.next_check_s(now)) is not None], default=None)

    def pick(self, free: Sequence[Replica], trial: RetryState, now: float) -> Replica | None:
        """Where a part of a failed batch goes: not back to the replica that it failed on, as long as a healthy one may
        take it. None: it waits for that one."""
        others = [replica for replica in free if replica is not trial.first] if not trial.judged else free
        if not others and trial.first is not None and self._has_other(trial.first, now):
            return None
        return min(others or free, key=Replica.load)

    def blame(self, replica: Replica, trial: RetryState, error: ShoalError, now: float) -> bool:
        """Count an unexplained failure against its replica, where another one is there to compare with; whether the
        batch is to be tried on that one. If it fails there too, and that one answered its last batch, an input was at
        fault."""
        if not isinstance(error, EngineFailed) or trial.judged:
            return False
        if trial.first is None:
            if not self._has_other(replica, now):
                return False
            replica.ejection.record_failure(now)
            trial.first = replica
            return self.retries.spend()
        trial.judged = True
        if isinstance(trial.first, Replica) and trial.first is not replica:
            if not replica.ejection.failures:
                trial.first.ejection.undo_failure()
            replica.ejection.record_failure(now)
        return False

    def _has_other(self, first: object, now: float) -> bool:
        return any(replica is not first and replica.is_healthy(now) for replica in self)
