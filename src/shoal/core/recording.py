"""What happened to each of the last requests: for `shoal explain`, and for traces.

The surfaces record a request, the gateway its tasks, lanes and generation runners their calls of engines. One record
serves both readers. It never holds inputs, outputs or keys.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Protocol

import msgspec

from shoal.errors import ShoalError
from shoal.types import BatchFacts, Task, TaskKind


class BatchRecord(msgspec.Struct, frozen=True):
    """One engine call, for the requests that it carried, or the call that generated an answer (`id` 0).

    `size`: items; `tokens`: padded tokens, 0 if unknown. `started` is in seconds of the monotonic clock. `error`: the
    kind of the error that it ended with, `step`: what the lane did then (see scheduling.retries).
    """

    id: int
    size: int
    requests: int
    flush: str
    replica: str
    seconds: float
    started: float
    tokens: int = 0
    error: str = ""
    step: str = ""


class TaskRecord(msgspec.Struct):
    """A task of a request in the gateway. `outcome` is "" until it ends. `trace`: as in Context, of its own span if
    there is one. `arrived`: as in Context, the `started` of its request. `first_seconds`: from `started` to the
    first chunk."""

    request_id: str
    model: str
    task: TaskKind
    items: int
    started: float
    trace: str = ""
    arrived: float = 0.0
    seconds: float = 0.0
    outcome: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    first_seconds: float | None = None
    facts: BatchFacts | None = None
    attempts: list[BatchRecord] = []


class RequestRecord(msgspec.Struct, frozen=True):
    """A request at its surface. `at` is Unix time, `started` of the monotonic clock. `client`: the identity for fair
    sharing, which has a key's hash. `error`: its kind, of a request that failed."""

    id: str
    surface: str
    method: str
    path: str
    status: int
    at: float
    started: float
    seconds: float
    client: str
    model: str
    error: str


class Found(msgspec.Struct, frozen=True):
    """What is known of a request."""

    request: RequestRecord | None = None
    tasks: list[TaskRecord] = []


class RequestSpan(Protocol):
    """The span of a request in progress; `trace` as in Context."""

    @property
    def trace(self) -> str: ...

    def end(self, record: RequestRecord) -> None: ...


class BatchSpan(Protocol):
    """The span of a batch in progress; `trace` as in Context. `called`: when its engine was called, in seconds of the
    monotonic clock (0: never)."""

    @property
    def trace(self) -> str: ...

    def end(self, record: BatchRecord, called: float) -> None: ...


class Tracer(Protocol):
    """Makes spans of what is recorded. Its methods are fast and never raise.

    `begin_request` reads the context of the caller from `headers`; `route` is the path without its parameter. The trace
    of a caller that is not trusted is not continued but linked: its flag would decide what is recorded.
    `begin_task` sets the record's `trace`; `end_task` follows. `begin_batch`: `traces` are those of the tasks in it.
    """

    def begin_request(
        self,
        method: str,
        route: str,
        headers: Mapping[bytes, bytes],
        started: float,
        *,
        grpc: bool = False,
        trusted: bool = True,
    ) -> RequestSpan: ...

    def begin_task(self, record: TaskRecord, task: Task) -> None: ...

    def end_task(self, record: TaskRecord) -> None: ...

    def begin_batch(self, model: str, traces: Sequence[str]) -> BatchSpan: ...


CLOCK_ERROR_S = 1e-6
"""Largest error of a sum of times."""

RECORD: ContextVar[TaskRecord | None] = ContextVar("record", default=None)
"""The task, or with a tracer the batch, that this asyncio task works for."""


def current_trace() -> str:
    """Return the trace of the task in progress, as in Context.

    A background task that was created during a request inherits its record: what it does later is no part of it.
    """
    record = RECORD.get()
    return "" if record is None or record.outcome else record.trace


def outgoing_trace() -> tuple[tuple[str, str], ...]:
    """Return the W3C headers of that trace for a call to another server, empty without traces:
    https://www.w3.org/TR/trace-context/."""
    trace = current_trace()
    if not trace:
        return ()
    parent, _, state = trace.partition(" ")
    return (("traceparent", parent), ("tracestate", state)) if state else (("traceparent", parent),)


def name_error(error: BaseException | None) -> str:
    """Return what a call that ended with `error` has in its record; "" for none."""
    if isinstance(error, ShoalError):
        return error.kind
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    return "" if error is None else "internal"


def count_retries(attempts: Sequence[BatchRecord]) -> int:
    """Return how many of the failed calls were followed by another one. Choices of one answer run side by side."""
    last = max((each.started for each in attempts), default=0.0) + CLOCK_ERROR_S
    return sum(bool(each.error) and each.step != "fail" and each.started + each.seconds <= last for each in attempts)


def record_attempt(replica: str, started: float, ended: float, error: str = "") -> None:
    """Note a call that generated an answer, with times of the monotonic clock, in the task in progress."""
    record = RECORD.get()
    if record is not None and not record.outcome:
        record.attempts.append(BatchRecord(0, 1, 1, "", replica, ended - started, started, error=error))


class RequestLog:
    """The last `size` requests and tasks of this process, the oldest first (0: none). `tracer`: makes spans of them.

    `others` asks the other processes of the server for a request; see `connect`.
    """

    def __init__(self, size: int, tracer: Tracer | None = None) -> None:
        self.size = size
        self.tracer = tracer
        self.requests: deque[RequestRecord] = deque(maxlen=size)
        self.tasks: deque[TaskRecord] = deque(maxlen=size)
        self._ask_others: Callable[[str], Awaitable[Sequence[Found]]] | None = None

    def begin(self, record: TaskRecord, task: Task) -> TaskRecord:
        """Make `record` that of this asyncio task and of those that it creates, and return it."""
        RECORD.set(record)
        if self.tracer is not None:
            self.tracer.begin_task(record, task)
        return record

    def end(self, record: TaskRecord, outcome: str, seconds: float) -> None:
        record.outcome, record.seconds = outcome, seconds
        self.tasks.append(record)
        if self.tracer is not None:
            self.tracer.end_task(record)

    def connect(self, ask_others: Callable[[str], Awaitable[Sequence[Found]]]) -> None:
        """Have `find` also ask the other processes of this server."""
        self._ask_others = ask_others

    def look_up(self, request_id: str) -> Found:
        """Return what this process knows of a request: of several with the same id, the last one."""
        request = next((each for each in reversed(self.requests) if each.id == request_id), None)
        return Found(request, [each for each in self.tasks if each.request_id == request_id])

    async def find(self, request_id: str) -> Found | None:
        """Return what is known of a request; None for one that is unknown, too old, or not finished."""
        found = [self.look_up(request_id)]
        if self._ask_others is not None:
            found += await self._ask_others(request_id)
        request = max((each.request for each in found if each.request), key=lambda each: each.started, default=None)
        tasks = sorted((task for each in found for task in each.tasks), key=lambda task: task.started)
        if request is not None or tasks:  # clients choose ids, and two may choose the same
            arrived = request.started if request is not None else tasks[-1].arrived
            tasks = [task for task in tasks if task.arrived == arrived]
        return Found(request, tasks) if request is not None or tasks else None
