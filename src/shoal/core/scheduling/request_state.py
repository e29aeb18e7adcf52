"""The state of a request inside a lane, and of its queued items."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf

import msgspec
import numpy as np

from shoal.core.protocols import Prepared, Row, VectorSet
from shoal.core.recording import BatchRecord, TaskRecord
from shoal.core.scheduling.fair_queue import Entry
from shoal.errors import DeadlineExceeded, InputRejected, NotFinite, RequestError, ShoalError
from shoal.types import (
    Array,
    BatchFacts,
    BatchTask,
    Context,
    Embed,
    Embedded,
    Result,
    Scored,
    TrafficClass,
)
from shoal.types import (
    Item as TaskItem,
)


class Item(Entry, eq=False, kw_only=True):
    """One unit of engine work. `waiters` are the (request, index) pairs that it answers; without any it is not needed.

    `dispatched`: the preparer has been notified that the item left the queue.
    """

    prepared: Prepared
    waiters: list[tuple[RequestState, int]] = msgspec.field(default_factory=list)
    attempts: int = 0
    dispatched: bool = False


def _create_future() -> asyncio.Future[Result]:
    return asyncio.get_running_loop().create_future()


class RequestState(msgspec.Struct, eq=False):
    """A request from admission to its answer: collects rows in any order and sets its future exactly once.

    `task_items` are the items of its task, `estimates` their token counts as estimated by `Pipeline.estimate`.
    The preparer owns three fields. `cursor`: number of items handed out for preparation. `ahead`: those of them that
    are not dispatched to an engine yet. `waiting`: whether the request is in a queue of the preparer, while it is not
    done. `record`: where its batches are noted.
    """

    task: BatchTask
    task_items: Sequence[TaskItem]
    ctx: Context
    traffic: TrafficClass
    arrived: float
    estimates: list[int]
    record: TaskRecord | None = None
    future: asyncio.Future[Result] = msgspec.field(default_factory=_create_future)
    items: dict[int, Item] = msgspec.field(default_factory=dict)
    tokens: list[int] = msgspec.field(default_factory=list)
    cursor: int = 0
    ahead: int = 0
    waiting: bool = False
    unfinished: int = 0
    truncated: int = 0
    prepare_seconds: float = 0.0
    cached: int = 0
    _array: Array | None = None
    _sets: list[VectorSet] = msgspec.field(default_factory=list)
    _batches: set[int] = msgspec.field(default_factory=set)
    _best: BatchRecord | None = None
    _queue: float = 0.0
    _infer: float = 0.0

    def __post_init__(self) -> None:
        self.unfinished = len(self.task_items)
        self.tokens = [0] * self.unfinished

    @property
    def done(self) -> bool:
        return self.future.done()

    @property
    def is_expired(self) -> bool:
        """Whether it was answered with DeadlineExceeded."""
        future = self.future
        return future.done() and not future.cancelled() and isinstance(future.exception(), DeadlineExceeded)

    def note(self, call: BatchRecord) -> None:
        """Note a call that failed for it, also if it has other rows of that batch, unless it is over."""
        record = self.record
        if record is not None and not record.outcome:
            record.attempts[:] = [*(each for each in record.attempts if each.id != call.id), call]

    def fail(self, error: ShoalError) -> None:
        """Fail the request with `error` unless it is already answered."""
        if not self.future.done():
            self.future.set_exception(error)

    def fail_at(self, index: int, error: ShoalError) -> None:
        """Fail the request with the error of one input; the error names the input if there are several."""
        if len(self.tokens) > 1 and isinstance(error, RequestError | InputRejected | NotFinite):
            error = error.at_input(index)
        self.fail(error)

    def expire(self, now: float = inf) -> None:
        """Fail the request with DeadlineExceeded: its deadline passed, or at `now` it is too close for a batch."""
        seconds = f"{round(self.ctx.deadline - self.arrived, 2):g} s"
        if now < self.ctx.deadline:
            error = DeadlineExceeded(
                f"the request waited too long in the queue to finish within {seconds}, so it was not started: try "
                "again later, or allow more time",
                retry_after=1.0,
            )
        else:
            error = DeadlineExceeded(f"no answer within {seconds}: send fewer inputs at once, or allow more time")
        self.fail(error)

    def put(self, index: int, row: Row, ran: BatchRecord, space: str) -> None:
        """Store one row; the last row answers the request."""
        item = self.items.pop(index, None)
        if item is None or self.future.done():
            return
        if ran.id not in self._batches:
            self._batches.add(ran.id)
            # The request may have joined a running batch: count its times from its own arrival.
            waited = max(0.0, ran.started - self.arrived)
            self._queue = max(self._queue, waited)
            self._infer = max(self._infer, ran.started + ran.seconds - self.arrived - waited)
            if self._best is None or ran.size > self._best.size:
                self._best = ran
            if self.record is not None and not self.record.outcome:
                self.record.attempts.append(ran)
        self._store_row(index, row, space)

    def put_cached(self, index: int, row: Row, space: str) -> None:
        """Like `put`, for a row from the cache."""
        if not self.future.done():
            self.cached += 1
            self._store_row(index, row, space)

    def _store_row(self, index: int, row: Row, space: str) -> None:
        if isinstance(row, VectorSet):
            if not self._sets:
                self._sets = [row] * len(self.tokens)
            self._sets[index] = row
        elif len(self.tokens) == 1:
            self._array = row.reshape(1, -1)  # no copy: most requests hold one input
        else:
            if self._array is None:
                self._array = np.empty((len(self.tokens), row.shape[0]), dtype=row.dtype)
            self._array[index] = row
        self.unfinished -= 1
        if not self.unfinished:
            self.future.set_result(self._build_result(space))

    def _build_result(self, space: str) -> Result:
        facts = self._build_facts()
        if not isinstance(self.task, Embed):
            assert self._array is not None
            return Scored(scores=self._array, tokens=self.tokens, truncated=self.truncated, facts=facts)
        if self._array is not None:
            return Embedded(vectors=self._array, tokens=self.tokens, truncated=self.truncated, facts=facts, space=space)
        sets = self._sets
        return Embedded(
            vectors=_stack_dense(sets),
            tokens=self.tokens,
            truncated=self.truncated,
            facts=facts,
            space=space,
            sparse=[each.sparse for each in sets if each.sparse is not None],
            token_vectors=[each.tokens for each in sets if each.tokens is not None],
            multi_vectors=[each.multi for each in sets if each.multi is not None],
        )

    def _build_facts(self) -> BatchFacts:
        prepare_ms = self.prepare_seconds * 1000
        if self._best is None:  # every item came from the cache
            return BatchFacts(prepare_ms=prepare_ms, cached=self.cached)
        best = self._best
        return BatchFacts(
            size=best.size,
            requests=best.requests,
            id=best.id,
            batches=len(self._batches),
            flush=best.flush,
            replica=best.replica,
            queue_ms=self._queue * 1000,
            prepare_ms=prepare_ms,
            infer_ms=self._infer * 1000,
            cached=self.cached,
        )


def _stack_dense(sets: Sequence[VectorSet]) -> Array:
    dense = [each.dense for each in sets if each.dense is not None]
    return np.stack(dense) if dense else np.empty((len(sets), 0), dtype=np.float32)
