"""What to do with a batch that failed: pure decisions, so that one bad item never costs its neighbours their answer."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Literal

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

Step = Literal["again", "apart", "fail", "halve", "singles", "retry"]

MAX_ATTEMPTS = 2
"""Tries of an item over transport faults: more would only multiply load on a fleet that is already in trouble."""


@dataclass(slots=True)
class Trial:
    """Extra engine calls that one failed batch and all its parts may still cost: 2 log2(n) + 2 finds one culprit."""

    calls: int

    @classmethod
    def of(cls, items: int) -> Trial:
        return cls(2 * ceil(log2(items)) + 2 if items > 1 else 0)


def next_step(
    error: ShoalError, items: int, trial: Trial, *, replica_ready: bool, shared: bool = False, merges: bool = False
) -> Step:
    """The step after `items` items failed together with `error`.

    Input errors and unexplained errors of a live replica may be one item's fault, so the batch is halved (Triton's
    python and onnxruntime backends report bad inputs as INTERNAL); when the trial is used up the rest runs singly.
    Memory that ran out is halved without that bound: smaller parts are the cure. Transport faults, and whatever a
    replica says while it goes down, are retried, each item up to MAX_ATTEMPTS. A replica that was too busy to take the
    batch has not tried it: it runs again as it is, until its items' deadlines. A replica that `merges` may have failed
    for another batch of those in flight, so the batch is tried apart from them before it is judged. What killed a
    replica's process is not tried again once it is known: that is when it ran alone, on a replica that it `shared` with
    no other batch.
    """
    if isinstance(error, Overloaded):
        return "again"
    if isinstance(error, Crashed):
        return "fail" if items == 1 and not shared else "singles"
    if isinstance(error, TransportFailed) or (isinstance(error, EngineFailed) and not replica_ready):
        return "retry"
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
