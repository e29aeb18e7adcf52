"""Drive one lane: requests in, batches to replicas, and exactly one answer to every accepted request.

The decisions are pure and live elsewhere: the next batch in `planner`, the step after a failure in `retries`,
admission in `admission`. This module moves items and does the bookkeeping.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from typing import overload

import msgspec

from shoal.core.closing import close_all
from shoal.core.protocols import (
    BatchReport,
    Cache,
    CountedRow,
    Engine,
    EngineFacts,
    Observer,
    Pipeline,
    Prepared,
    ReplicaStatus,
    Row,
    SharesTokenizer,
    Tensors,
)
from shoal.core.recording import RECORD, BatchRecord, TaskRecord, Tracer
from shoal.core.scheduling.admission import Admission, classify_traffic
from shoal.core.scheduling.coalescing import Coalescer
from shoal.core.scheduling.drain_rate import DrainRate, DrainTime, FinishedBatch
from shoal.core.scheduling.planner import LOOK_AGAIN_S, Limits, Planner, Wait
from shoal.core.scheduling.preparation import Outcome, Preparer
from shoal.core.scheduling.replica import Replica, SlotLease
from shoal.core.scheduling.replica_pool import ReplicaPool
from shoal.core.scheduling.request_state import Item, RequestState
from shoal.core.scheduling.retries import MAX_ATTEMPTS, RetryState, Step, next_step
from shoal.core.threads import Threads
from shoal.errors import (
    Crashed,
    DeadlineExceeded,
    EngineFailed,
    InternalError,
    OutOfMemory,
    Overloaded,
    ShoalError,
    TransportFailed,
    Unavailable,
)
from shoal.types import BatchTask, Classify, Context, Embed, Embedded, Rerank, Result, Scored, TokenizedTexts

logger = logging.getLogger("shoal.core")

_batch_ids = count(1)

MOST_ATTENTION = 1.5
"""Ratio of a batch's work to its tokens above which it does not count for the efficient size of batches."""

_NOTHING = Prepared(tensors={}, cost=0, group=(), outputs=(), tokens=0)


class _InFlightBatch(msgspec.Struct, eq=False):
    """One batch on one replica; `facts` are the replica's when the batch started, `retries` those of the failed batch
    that it is a part of (None: of none).

    `padded_tokens`, `work` and `called`, the time, are set when the engine is called. Set when the call returns:
    `seconds`, its duration; `own_seconds`, that duration without the wait behind another batch. `error`: the kind of
    the error that it ended with.
    """

    id: int
    items: list[Item]
    replica: Replica
    flush: str
    retries: RetryState | None
    started: float
    lease: SlotLease
    facts: EngineFacts
    task: asyncio.Task[None] | None = None
    padded_tokens: int = 0
    work: float = 0.0
    seconds: float = 0.0
    own_seconds: float = 0.0
    finish_seconds: float = 0.0
    called: float = 0.0
    error: str = ""


class _BatchPart(msgspec.Struct, eq=False):
    """A part of a failed batch, which runs before anything in the queue."""

    items: list[Item]
    retries: RetryState


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOptions:
    """Settings of one lane.

    `space` is part of every answer. `max_items` and `max_queue_s` (0: unlimited) bound the queue (see Admission).
    `cache` holds rows.
    """

    model: str
    limits: Limits = field(default_factory=Limits)
    max_items: int = 16384
    max_queue_s: float = 0.0
    space: str = ""
    cache: Cache | None = None


class Lane:
    """One stream of similar items of a model: a pipeline, a planner and engine replicas.

    `run` raises the errors of `Pipeline.check` and `prepare`, and Overloaded, Unavailable, DeadlineExceeded,
    BackendError and InternalError. Cancelling it removes the request's items from the queue and cancels engine calls
    that have no other waiters.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        engines: Sequence[Engine],
        options: LaneOptions,
        *,
        threads: Threads,
        observer: Observer | None = None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pipeline = pipeline
        self._shared = pipeline if isinstance(pipeline, SharesTokenizer) else None
        self.replicas = ReplicaPool(engines)
        self.options = options
        self._drain = DrainRate(options.limits)
        self.admission = Admission(options.max_items, clock, drain=self._predict_drain, max_queue_s=options.max_queue_s)
        self.failure: InternalError | None = None
        self._observer = observer or Observer()
        self._tracer = tracer
        self._clock = clock
        facts = engines[0].facts
        self._cost = facts.cost  # only for its `work`, which depends on the model alone
        self._planner: Planner[Item] = Planner(options.limits, facts.length_buckets, facts.cost.attention)
        self._preparer = Preparer(
            pipeline,
            threads,
            deliver=self._accept_prepared,
            count_held=self._count_held_items,
            max_age_ms=options.limits.max_age_ms,
            clock=clock,
        )
        self._parts: deque[_BatchPart] = deque()
        self._coalescer = Coalescer()
        self._requests: set[RequestState] = set()
        self._in_flight: set[_InFlightBatch] = set()
        self._pump_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._next_expiry = inf
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._on_broken: Callable[[ShoalError], None] | None = None

    @property
    def queue_size(self) -> tuple[int, int]:
        """Items and tokens in the queue."""
        return self._planner.items, self._planner.tokens

    def ready(self) -> bool:
        if self.failure is not None or self._closed:
            return False
        return self.replicas.is_usable(self._clock())

    def status(self) -> list[ReplicaStatus]:
        """Return the status of each replica."""
        return self.replicas.status(self._clock())

    def when_broken(self, call: Callable[[ShoalError], None]) -> None:
        """Register `call` for the error that stops the lane for good (see Breakable)."""
        self._on_broken = call

    @overload
    async def run(self, task: Embed, ctx: Context) -> Embedded: ...

    @overload
    async def run(self, task: Rerank | Classify, ctx: Context) -> Scored: ...

    @overload
    async def run(self, task: BatchTask, ctx: Context) -> Result: ...

    async def run(self, task: BatchTask, ctx: Context) -> Result:
        self.pipeline.check(task)
        if self.failure is not None:
            raise copy(self.failure)
        if self._closed or not self.replicas.is_usable(self._clock()):
            raise Unavailable(f"no replica of {self.options.model!r} is available: try again soon", retry_after=1.0)
        items = task.items
        traffic = classify_traffic(ctx, len(items))
        estimates = [self.pipeline.estimate(item) for item in items]
        work = self._count_work(estimates) if self._cost.attention else sum(estimates)
        permit = self.admission.admit(ctx.client, traffic, len(items), work, ctx.deadline)
        request = RequestState(task, items, ctx, traffic, self._clock(), estimates, RECORD.get())
        true_work: int | None = None
        try:
            if task.tokenized is not None:
                self._take_tokens(request, task.tokenized)
            self._requests.add(request)
            if ctx.deadline < self._next_expiry:
                self._schedule_expiry(ctx.deadline)
            self._preparer.add(request)
            result = await request.future
            true_work = self._count_work(result.tokens) if self._cost.attention else sum(result.tokens)
            return result
        finally:
            self._requests.discard(request)
            if request.waiting:
                self._preparer.discard(request)
            if request.items:
                self._withdraw(request)
            self.admission.release(permit, true_work)
            del request  # its error references this frame: together they would form a cycle

    def _take_tokens(self, request: RequestState, tokenized: TokenizedTexts) -> None:
        """Spare the request its tokenizing, unless the tokens are those of another tokenizer."""
        shared = self._shared
        if shared is not None and shared.tokenizer_id == tokenized.tokenizer:
            request.task_items = items = shared.unpack_tokens(tokenized.items, request.task_items)
            request.estimates = [self.pipeline.estimate(item) for item in items]
            request.prepare_seconds = tokenized.seconds

    def _count_work(self, lengths: Sequence[int]) -> int:
        """Return the work of texts of these lengths. Those that will be cut or rejected may be estimated at millions of
        tokens, whose square says nothing."""
        longest = self.options.limits.max_batch_tokens
        return round(sum([self._cost.work(length, min(length, longest)) for length in lengths]))

    async def aclose(self) -> None:
        """Fail waiting requests, cancel engine calls and close the engines; a second call has no effect."""
        self._closed = True
        for request in list(self._requests):
            request.fail(Unavailable("the server is shutting down: send the request again", retry_after=1.0))
        tasks = [run.task for run in self._in_flight if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for timer in (self._timer, self._expiry_timer):
            if timer is not None:
                timer.cancel()
        await close_all(*(replica.engine.aclose for replica in self.replicas))

    def _accept_prepared(self, outcomes: list[Outcome]) -> None:
        try:
            self._enqueue(outcomes)
        except Exception as error:  # as in `_pump`
            self._fail_lane(error)
        self._pump()

    def _enqueue(self, outcomes: list[Outcome]) -> None:
        now, cache = self._clock(), self.options.cache
        new: list[Item] = []
        for request, index, outcome in outcomes:
            if isinstance(outcome, ShoalError):
                request.fail_at(index, outcome)
            if isinstance(outcome, ShoalError) or request.future.done():
                continue
            request.tokens[index] = outcome.tokens
            request.truncated += outcome.truncated
            if cache is not None and self._answer_from_cache(cache, request, index, outcome):
                continue
            leader = self._coalescer.find_leader(outcome.key, id(request))
            if leader is not None:
                leader.deadline = max(leader.deadline, request.ctx.deadline)
                leader.waiters.append((request, index))
                request.items[index] = leader
                self._preparer.record_dispatched(request, 1)
                continue
            item = Item(
                cost=outcome.cost,
                group=outcome.group,
                traffic=request.traffic,
                client=request.ctx.client,
                request=id(request),
                arrived=request.arrived,
                deadline=request.ctx.deadline,
                prepared=outcome,
                waiters=[(request, index)],
            )
            request.items[index] = item
            self._coalescer.add(item)
            if new and new[0].request != item.request:
                self._planner.add(new, now)
                new = []
            new.append(item)
        if new:
            self._planner.add(new, now)

    def _schedule_expiry(self, deadline: float) -> None:
        """Look for expired requests at `deadline`, the first one of all: one timer for a lane, since a timer a request
        costs as much as admitting it."""
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
        self._next_expiry = deadline
        seconds = max(deadline - self._clock(), 0.0)
        self._expiry_timer = asyncio.get_running_loop().call_later(seconds, self._expire_requests)

    def _expire_requests(self) -> None:
        now = self._clock()
        self._expiry_timer, self._next_expiry = None, inf
        for request in self._requests:
            if request.ctx.deadline <= now:
                request.expire()
        waiting = [request.ctx.deadline for request in self._requests if request.ctx.deadline > now]
        if waiting and not self._closed:
            self._schedule_expiry(min(waiting))

    def _count_held_items(self) -> int:
        """Count the items that are prepared and not answered."""
        running = sum(len(run.items) for run in self._in_flight)
        return self._planner.items + running + sum(len(part.items) for part in self._parts)

    def _answer_from_cache(self, cache: Cache, request: RequestState, index: int, prepared: Prepared) -> bool:
        if prepared.key is None or (found := cache.get(prepared.key)) is None:
            return False
        request.tokens[index] = found.tokens
        self._preparer.record_dispatched(request, 1)
        request.put_cached(index, found.row, self.options.space)
        return True

    def _withdraw(self, request: RequestState) -> None:
        """Drop the items that only this request waits for: it is answered, or its caller left."""
        if request.record is not None:
            self._note_left_batches(request)
        for item in request.items.values():
            item.waiters = [waiter for waiter in item.waiters if waiter[0] is not request]
            if not item.waiters:
                self._coalescer.forget(item)
                self._discard(item)
        request.items.clear()
        for run in self._in_flight:
            if run.task is not None and not any(item.waiters for item in run.items):
                run.task.cancel()

    def _note_left_batches(self, request: RequestState) -> None:
        """Note the calls in progress that carry the request, which does not wait for their end."""
        mine = {id(item) for item in request.items.values()}
        kind = "deadline" if request.is_expired else "cancelled"
        for run in self._in_flight:
            if run.called and not run.error and any(id(item) in mine for item in run.items):
                request.note(_record(run, self._clock() - run.started, kind))

    def _discard(self, item: Item) -> None:
        """Remove the item from the queue if it is queued.

        The planner may keep a reference until the next arrival, so the prepared tensors are dropped here: other items
        may wait for their room.
        """
        if item.queued:
            self._planner.discard(item)
            item.prepared = _NOTHING
            self._preparer.resume()

    def _wake(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Give work to every free slot; the only place that starts engine calls."""
        self._pump_scheduled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            while (self._planner.items or self._parts) and self._launch_next():
                pass
        except Exception as error:  # any error stops the driver, and its requests must not hang
            self._fail_lane(error)
        self._preparer.resume()

    def _launch_next(self) -> bool:
        now = self._clock()
        free = self.replicas.free_replicas(now)
        if not free:
            # The end of a batch wakes the lane. The end of a pause, or a replica that comes back, does not.
            again = self.replicas.next_check_s(now)
            if again is not None:
                self._schedule_pump(again)
            return False
        if self._parts and self._launch_part(free, now):
            return True
        if not self._planner.items:
            if self._parts:  # they wait for another replica, which sends no signal when it is usable
                self._schedule_pump(LOOK_AGAIN_S)
            return False
        replica = free[0] if len(free) == 1 else self.replicas.choose(free, now)
        share = max(1, sum(map(Replica.idle_cores, free))) if self._planner.items > 1 else 1
        facts = replica.facts
        decision, late = self._planner.take(
            facts,
            now,
            share=share,
            behind=replica.backlog_s(now),
            replicas=len(self.replicas),
            last_slot=bool(self._in_flight) and len(free) == 1 and self._is_last_slot(replica),
        )
        for item in late:
            self._coalescer.forget(item)
            for request, _ in item.waiters:
                request.expire(now)
        if isinstance(decision, Wait):
            if decision.until is not None:
                self._schedule_pump(decision.until - now)
            return False
        items, answered = self._coalescer.dequeue(decision.entries)
        for duplicate, item in answered:
            self._merge_duplicate(item, duplicate)
        self._launch(replica, facts, items, decision.flush)
        return True

    def _is_last_slot(self, replica: Replica) -> bool:
        """Whether the only free replica has one free slot, and all batches in flight are long."""
        longest = self.options.limits.max_batch_ms / 1000
        return replica.free_slots() == 1 and all(run.lease.seconds > longest for run in self._in_flight)

    def _launch_part(self, free: Sequence[Replica], now: float) -> bool:
        """Run the first part of a failed batch that a free replica may take; returns whether there was one."""
        for part in self._parts:
            replica = self.replicas.pick(free, part.retries, now)
            if replica is not None:
                self._parts.remove(part)
                items = [item for item in part.items if item.waiters]
                facts = replica.facts
                limit = facts.max_batch_size  # replicas differ: the batch may have failed on a larger one
                if items[limit:]:
                    self._parts.appendleft(_BatchPart(items[limit:], part.retries))
                if items:
                    self._launch(replica, facts, items[:limit], "full", part.retries)
                return True
        return False

    def _schedule_pump(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(max(seconds, 0.0), self._pump)

    def _merge_duplicate(self, item: Item, duplicate: Item) -> None:
        """Move the waiters of `duplicate` to `item`, which has the same key and left the queue first."""
        self._mark_dispatched(duplicate)
        self._discard(duplicate)
        item.deadline = max(item.deadline, duplicate.deadline)
        item.attempts = max(item.attempts, duplicate.attempts)
        for request, index in duplicate.waiters:
            request.items[index] = item
        item.waiters += duplicate.waiters

    def _mark_dispatched(self, item: Item) -> None:
        """Record that the item left the queue, once even if it is retried: its request may prepare another one."""
        if not item.dispatched:
            item.dispatched = True
            self._preparer.record_dispatched(item.waiters[0][0], 1)

    def _launch(
        self, replica: Replica, facts: EngineFacts, items: list[Item], flush: str, retries: RetryState | None = None
    ) -> None:
        now = self._clock()
        lease = replica.start(now, facts.cost.seconds(sum([item.work for item in items])))
        run = _InFlightBatch(next(_batch_ids), items, replica, flush, retries, now, lease, facts)
        for item in items:
            self._mark_dispatched(item)
        self._in_flight.add(run)
        running = self._execute(run) if self._tracer is None else self._trace(run, self._tracer)
        run.task = asyncio.get_running_loop().create_task(running)
        run.task.add_done_callback(partial(self._ensure_released, run))

    def _ensure_released(self, run: _InFlightBatch, _: asyncio.Task[None]) -> None:
        """Release the slot if it is still held. A done callback, because a task cancelled before its first step runs no
        `finally`."""
        if run in self._in_flight:
            self._release(run)
            self._drain.interrupt()
            self._wake()

    def _release(self, run: _InFlightBatch) -> None:
        self._in_flight.discard(run)
        run.replica.end(run.lease, self._clock())

    async def _trace(self, run: _InFlightBatch, tracer: Tracer) -> None:
        """Run a batch inside a span, of which calls to other servers are a part."""
        records = [request.record for item in run.items for request, _ in item.waiters]
        model = self.options.model
        span = tracer.begin_batch(model, [record.trace for record in records if record is not None])
        RECORD.set(TaskRecord("", model, "embed", len(run.items), run.started, span.trace))
        try:
            await self._execute(run)
        finally:
            span.end(_record(run, self._clock() - run.started, run.error), run.called)

    async def _execute(self, run: _InFlightBatch) -> None:
        error: ShoalError
        try:
            self._deliver(run, await self._infer(run))
            # Scheduled behind the waiters of the rows, which do not need the statistics.
            asyncio.get_running_loop().call_soon(self._learn, run)
            return
        except asyncio.CancelledError:
            run.error = "cancelled"
            return
        except ShoalError as failure:
            error = failure
        except Exception as failure:  # a bug in a pipeline or an engine must fail this batch, not hang it
            logger.exception("a batch failed unexpectedly")
            error = InternalError(f"running the batch failed: {failure!r}")
        try:
            self._process_failure(run, error)
        finally:
            del error  # it references this frame and so the batch, which must be freed

    async def _infer(self, run: _InFlightBatch) -> Sequence[Row | CountedRow | ShoalError]:
        prepared = [item.prepared for item in run.items]
        engine, facts = run.replica.engine, run.facts
        output_names = prepared[0].outputs
        if len(prepared) > 1 and any(item.outputs != output_names for item in prepared):
            output_names = tuple(sorted({name for item in prepared for name in item.outputs}))
        inputs = self.pipeline.collate(prepared, facts)
        run.padded_tokens = (
            max([array.size for array in inputs.values()])
            if facts.pads_batches
            else sum([item.cost for item in prepared])
        )
        run.work = run.padded_tokens
        if facts.cost.attention:
            run.work = facts.cost.work(run.padded_tokens, max([item.cost for item in prepared]))
        started = run.called = self._clock()
        outputs = await engine.infer(
            inputs, output_names, prepared[0].params, max([item.deadline for item in run.items])
        )
        run.seconds = self._clock() - started
        run.own_seconds = started + run.seconds - max(started, run.lease.started)
        # Start the slot's next batch before writing this one's answers: that occupies the event loop, and the engine
        # would idle meanwhile.
        self._pass_slot_on(run)
        finishing = self._clock()
        rows = self._finish_rows(outputs, prepared)
        run.finish_seconds = self._clock() - finishing
        if len(rows) != len(prepared):
            raise EngineFailed(f"the model returned {len(rows)} rows for {len(prepared)} inputs")
        return rows

    def _pass_slot_on(self, run: _InFlightBatch) -> None:
        """Release the slot of a batch that ended, start the next one, and record how fast the queue drains."""
        self._release(run)
        self._pump()
        now, items = self._clock(), run.items
        work = sum([item.work for item in items])
        batch = FinishedBatch(run.facts, len(items), work, run.work, run.padded_tokens, run.flush == "full")
        serving = self.replicas.serving_replicas(now)
        cores = sum([replica.cores for replica in serving])
        self._drain.record_batch(now, batch, cores, saturated=not any(map(Replica.idle_cores, serving)))

    def _predict_drain(self, work: float, items: float) -> DrainTime | None:
        if not self._drain.is_known:
            return None
        replicas = [each.facts for each in self.replicas.serving_replicas(self._clock())]
        return self._drain.predict(work, items, replicas)

    def _finish_rows(self, outputs: Tensors, prepared: list[Prepared]) -> Sequence[Row | CountedRow | ShoalError]:
        try:
            return self.pipeline.finish(outputs, prepared)
        except ShoalError:
            raise
        except Exception:  # a bug triggered by one item must not fail the others
            if len(prepared) == 1:
                raise
            logger.exception("finishing a batch failed: finishing each of its %d items separately", len(prepared))
        rows: list[Row | CountedRow | ShoalError] = []
        for place, item in enumerate(prepared):
            own = {name: array[place : place + 1] for name, array in outputs.items()}
            try:
                rows += self.pipeline.finish(own, [item])
            except Exception as failure:  # as above
                rows.append(InternalError(f"building the answer failed: {failure!r}"))
        return rows

    def _learn(self, run: _InFlightBatch) -> None:
        # The curve compares sizes of batches, which long texts would blur: their work is less exact.
        comparable = run.work <= MOST_ATTENTION * run.padded_tokens
        run.replica.record_batch(run.work, run.own_seconds, saturated=run.lease.saturated and comparable)
        self.replicas.retry_budget.earn()
        self._report(run, run.padded_tokens, run.seconds, None)

    def _report(self, run: _InFlightBatch, padded: int, seconds: float, error: str | None) -> None:
        self._observer.batched(
            BatchReport(
                model=self.options.model,
                replica=run.facts.name,
                items=len(run.items),
                tokens=sum([item.cost for item in run.items]),
                padded_tokens=padded,
                flush=run.flush,
                seconds=seconds,
                error=error,
                finish_seconds=run.finish_seconds if error is None else None,
            )
        )

    def _deliver(self, run: _InFlightBatch, rows: Sequence[Row | CountedRow | ShoalError]) -> None:
        requests = len({id(request) for item in run.items for request, _ in item.waiters})
        took, facts = self._clock() - run.started, run.facts
        ran = BatchRecord(run.id, len(run.items), requests, run.flush, facts.name, took, run.started, run.padded_tokens)
        for item, row in zip(run.items, rows, strict=True):
            self._coalescer.forget(item)
            if isinstance(row, ShoalError):
                for request, index in item.waiters:
                    if not request.done:
                        request.note(msgspec.structs.replace(ran, error=row.kind, step="fail"))
                    request.fail_at(index, row)
                continue
            counted = row if isinstance(row, CountedRow) else CountedRow(row, item.prepared.tokens)
            if self.options.cache is not None and item.prepared.key is not None:
                self.options.cache.put(item.prepared.key, counted)
            for request, index in item.waiters:
                request.tokens[index] = counted.tokens
                request.put(index, counted.row, ran, self.options.space)

    def _process_failure(self, run: _InFlightBatch, error: ShoalError) -> None:
        run.error = error.kind
        self._report(run, sum(item.cost for item in run.items), self._clock() - run.started, error.kind)
        items = [item for item in run.items if item.waiters]
        if isinstance(error, TransportFailed):
            run.replica.mark_unreachable(self._clock())
        if isinstance(error, Crashed):
            run.replica.record_crash(len(run.items))
        if isinstance(error, Overloaded):
            run.replica.pause(self._clock(), error.retry_after)
        if isinstance(error, OutOfMemory):
            run.replica.shrink(sum(item.cost for item in run.items))
        if isinstance(error, DeadlineExceeded):
            run.replica.record_timeout(run.work, self._clock() - max(run.started, run.lease.started))
            self._pass_slot_on(run)
        if not items:
            return
        # Count all items that ran together: the bad one may be an item whose caller has left since.
        ready, shared, merges = run.replica.engine.ready(), run.lease.shared, run.facts.merges
        retries = run.retries or RetryState.of(len(run.items))
        elsewhere = self.replicas.blame(run.replica, retries, error, self._clock())
        step = next_step(
            error, len(run.items), retries, replica_ready=ready, shared=shared, merges=merges, elsewhere=elsewhere
        )
        logger.warning("a batch of %d items on %s failed (%s): %s", len(items), run.facts.name, step, error.message)
        failed = _record(run, self._clock() - run.started, error.kind, step)
        for request in {id(request): request for item in items for request, _ in item.waiters}.values():
            request.note(failed)
        waiting = len(self._parts)
        self._apply_step(step, items, retries, error)
        if merges and step in ("apart", "halve"):
            # The parts run next, alone: a bad item among them would fail other batches in flight too.
            run.replica.isolate_batches(len(self._parts) - waiting)
        self._wake()

    def _apply_step(self, step: Step, items: list[Item], retries: RetryState, error: ShoalError) -> None:
        if step in ("again", "apart", "elsewhere"):
            # Keep the batch's turn and the state of its halving instead of going through the planner again.
            self._parts.appendleft(_BatchPart(items, retries))
            return
        if step == "halve":
            middle = len(items) // 2
            self._parts.extend(_BatchPart(part, retries) for part in (items[:middle], items[middle:]) if part)
            return
        now = self._clock()
        for item in items:
            item.attempts += 1
            # A request that joined the item while it ran may have a later deadline than the engine call had.
            retried = step == "retry" or (isinstance(error, DeadlineExceeded) and item.deadline > now)
            if item.attempts >= MAX_ATTEMPTS if retried else step == "fail":
                self._coalescer.forget(item)
                for request, index in item.waiters:
                    request.fail_at(index, error)
                continue
            if step == "singles":
                item.runs_alone, item.traffic = True, "bulk"
            self._coalescer.add(item)
            self._planner.add([item], now)

    def _fail_lane(self, error: Exception) -> None:
        logger.critical("the batcher of %s stopped", self.options.model, exc_info=error)
        self.failure = InternalError(
            f"the batcher of {self.options.model!r} stopped: reload the model or restart the server, and report this "
            "bug"
        )
        for request in list(self._requests):
            request.fail(copy(self.failure))
        if self._on_broken is not None:
            self._on_broken(self.failure)


def _record(run: _InFlightBatch, seconds: float, error: str, step: str = "") -> BatchRecord:
    requests = len({id(request) for item in run.items for request, _ in item.waiters})
    facts, tokens = run.facts, run.padded_tokens
    return BatchRecord(
        run.id, len(run.items), requests, run.flush, facts.name, seconds, run.started, tokens, error, step
    )
