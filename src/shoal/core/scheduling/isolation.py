"""What to do with a batch that failed: pure decisions, so that one bad item never costs its neighbours their answer."""

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
"""Tries of an item over transport faults: more would only multiply load on a fleet that is already in trouble."""


RETRY_RATIO = 0.2
"""Retries that each call which succeeds pays for: Envoy's retry budget."""

RETRY_RESERVE = 10.0
"""Retries a replica that need no success before them: what ejecting it takes, twice."""


class RetryBudget:
    """Bounds engine calls beyond the first ones of their items: where everything fails, trying again is only load."""

    def __init__(self, replicas: int) -> None:
        self._most = self._left = RETRY_RESERVE * replicas

    def earn(self) -> None:
        """A call succeeded."""
        self._left = min(self._most, self._left + RETRY_RATIO)

    def spend(self) -> bool:
        """Whether one more retry may be made, which is then counted."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


class RetryState(msgspec.Struct):
    """Extra engine calls that one failed batch and all its parts may still cost: 2 log2(n) + 2 finds one culprit.
    `first`: the replica on which it failed before it was tried on another one; `judged`: it failed on both."""

    calls: int
    first: object | None = None
    judged: bool = False

    @classmethod
    def of(cls, items: int) -> RetryState:
        return cls(2 * ceil(log2(items)) + 2 if items > 1 else 0)


def next_step(
    error: ShoalError,
    items: int,
    trial: RetryState,
    *,
    replica_ready: bool,
    shared: bool = False,
    merges: bool = False,
    elsewhere: bool = False,
) -> Step:
    """The step after `items` items failed together with `error`.

    Input errors and unexplained errors of a live replica may be one item's fault, so the batch is halved (Triton's
    python and onnxruntime backends report bad inputs as INTERNAL); when the trial is used up the rest runs singly. An
    unexplained error may as well be the replica's own: where another can take the batch (`elsewhere`), it goes there
    first, as it is. Memory that ran out is halved without that bound: smaller parts are the cure. Transport faults, and
    whatever a replica says while it goes down, are retried, each item up to MAX_ATTEMPTS. A replica that was too busy
    to take the batch has not tried it: it runs again as it is, until its items' deadlines. A replica that `merges` may
    have failed for another batch of those in flight, so the batch is tried apart from them before it is judged. What
    killed a replica's process is not tried again once it is known: that is when it ran alone, on a replica that it
    `shared` with no other batch.
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
        if trial.calls >= 2:
            trial.calls -= 2
            return "halve"
        return "singles"
    return "fail"
