"""Decide how to retry a failed batch, so that one bad item never fails its neighbors. Pure."""

from __future__ import annotations

from math import ceil, log2
from typing import Literal

import msgspec

from shoal.errors import (
    BackendError,
    Crashed,
    DeadlineExceeded,
    EngineFailed,
    InputRejected,
    OutOfMemory,
    Overloaded,
    ShoalError,
    TransportFailed,
)

Step = Literal["again", "apart", "elsewhere", "fail", "halve", "singles", "retry"]

MAX_ATTEMPTS = 2
"""Attempts per item on transport faults; more would only add load to a fleet that is already in trouble."""


RETRY_RATIO = 0.2
"""Retries earned by each successful call (Envoy's retry budget)."""

RETRY_RESERVE = 10.0
"""Retries per replica available without earlier successes: twice what ejecting a replica takes."""


class RetryBudget:
    """Bounds engine calls that are retries: when everything fails, retries only add load."""

    def __init__(self, replicas: int) -> None:
        self._capacity = self._remaining = RETRY_RESERVE * replicas

    def earn(self) -> None:
        """Record a successful call."""
        self._remaining = min(self._capacity, self._remaining + RETRY_RATIO)

    def spend(self) -> bool:
        """Count one retry if the budget allows it; returns whether it does."""
        if self._remaining < 1:
            return False
        self._remaining -= 1
        return True


class RetryState(msgspec.Struct):
    """The retries of one failed batch and all its parts.

    `calls`: extra engine calls left; 2 log2(n) + 2 suffice to find one bad item. `first`: the replica on which the
    batch failed before it was tried on another one. `failed_twice`: it failed on both.
    """

    calls: int
    first: object | None = None
    failed_twice: bool = False

    @classmethod
    def of(cls, items: int) -> RetryState:
        return cls(2 * ceil(log2(items)) + 2 if items > 1 else 0)


def next_step(
    error: ShoalError,
    items: int,
    retries: RetryState,
    *,
    replica_ready: bool,
    shared: bool = False,
    merges: bool = False,
    elsewhere: bool = False,
) -> Step:
    """Return the next step after `items` items failed together with `error`.

    - Input errors and unexplained errors of a live replica may be caused by one item, so the batch is halved (Triton's
      python and onnxruntime backends report bad inputs as INTERNAL). When `retries` has no calls left, the rest runs
      singly.
    - An unexplained error may also be the replica's own. If another replica can take the batch (`elsewhere`), the
      whole batch goes there first.
    - A batch that ran out of memory is halved without that limit: smaller parts are the remedy.
    - Transport faults, and any engine error of a replica that is going down, are retried up to MAX_ATTEMPTS per item.
    - A replica that was too busy has not tried the batch: it runs again unchanged, until the deadlines of its items.
    - A replica that `merges` may have failed because of another batch in flight, so the batch runs apart from the
      others before it is judged.
    - An item that crashes a replica's process is not retried once it is identified: when it ran alone, on a replica
      that it `shared` with no other batch.
    """
    if isinstance(error, Overloaded):
        return "again"
    if isinstance(error, Crashed):
        return "fail" if items == 1 and not shared else "singles"
    if isinstance(error, TransportFailed) or (isinstance(error, EngineFailed) and not replica_ready):
        return "retry"
    if isinstance(error, EngineFailed) and elsewhere:
        return "elsewhere"
    if isinstance(error, EngineFailed) and merges and shared:
        return "apart"
    if isinstance(error, DeadlineExceeded) or not isinstance(error, BackendError) or items == 1:
        return "fail"
    if isinstance(error, OutOfMemory):
        return "halve"
    if isinstance(error, InputRejected | EngineFailed):
        if retries.calls >= 2:
            retries.calls -= 2
            return "halve"
        return "singles"
    return "fail"
