"""The JSON of one request's record. Times in milliseconds; `start_ms` counts from the arrival of the request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.core.recording import BatchRecord, Found, TaskRecord, count_retries
from shoal.types import TaskKind


class Attempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call of an engine. `batch`, `items`, `tokens` (padded), `requests` and `flush` are those of the batch; a
    generation has none. `error`: the kind of the error it ended with, `step`: what followed."""

    replica: str
    start_ms: float
    ms: float
    batch: int = 0
    items: int = 0
    tokens: int = 0
    requests: int = 0
    flush: str = ""
    error: str = ""
    step: str = ""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One task of the request. `queue_ms`, `infer_ms`: of its slowest item. `cached`: items from the cache.
    `first_token_ms`: null if it generated nothing. `retries`: failed calls that another one followed."""

    model: str
    task: TaskKind
    outcome: str
    items: int
    input_tokens: int
    output_tokens: int
    cached: int
    start_ms: float
    ms: float
    prepare_ms: float
    queue_ms: float
    infer_ms: float
    first_token_ms: float | None
    retries: int
    attempts: list[Attempt]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """`status` 0: the answer is not over, its record was displaced, or its process has ended. `error`: the kind of the
    error that it got. `time`: its arrival, in Unix seconds."""

    id: str
    surface: str
    method: str
    path: str
    status: int
    error: str
    time: float
    ms: float
    client: str
    model: str
    tasks: list[Work]


def explain(request_id: str, found: Found) -> Explanation:
    """Return the record of a request for clients."""
    request = found.request
    arrived = request.started if request is not None else found.tasks[0].started
    return Explanation(
        id=request_id,
        surface=request.surface if request is not None else "",
        method=request.method if request is not None else "",
        path=request.path if request is not None else "",
        status=request.status if request is not None else 0,
        error=request.error if request is not None else "",
        time=request.at - request.seconds if request is not None else 0.0,
        ms=_ms(request.seconds) if request is not None else 0.0,
        client=request.client if request is not None else "",
        model=(request.model if request is not None else "") or (found.tasks[0].model if found.tasks else ""),
        tasks=[_work(task, arrived) for task in found.tasks],
    )


def _work(task: TaskRecord, arrived: float) -> Work:
    facts, first = task.facts, task.first_seconds
    queue_ms = facts.queue_ms if facts is not None else _queue_ms(task)
    return Work(
        model=task.model,
        task=task.task,
        outcome=task.outcome,
        items=task.items,
        input_tokens=task.input_tokens,
        output_tokens=task.output_tokens,
        cached=facts.cached if facts is not None else 0,
        start_ms=_ms(task.started - arrived),
        ms=_ms(task.seconds),
        prepare_ms=round(facts.prepare_ms, 3) if facts is not None else 0.0,
        queue_ms=round(queue_ms, 3),
        infer_ms=round(facts.infer_ms if facts is not None else _infer_ms(task.attempts), 3),
        first_token_ms=_ms(first) if first is not None else None,
        retries=count_retries(task.attempts),
        attempts=[_attempt(one, arrived) for one in task.attempts],
    )


def _attempt(one: BatchRecord, arrived: float) -> Attempt:
    start, took = _ms(one.started - arrived), _ms(one.seconds)
    if not one.id:
        return Attempt(replica=one.replica, start_ms=start, ms=took, error=one.error)
    return Attempt(
        replica=one.replica,
        start_ms=start,
        ms=took,
        batch=one.id,
        items=one.size,
        tokens=one.tokens,
        requests=one.requests,
        flush=one.flush,
        error=one.error,
        step=one.step,
    )


def _queue_ms(task: TaskRecord) -> float:
    """Return how long a task waited for its first call; all of its time if there was none."""
    first = min((one.started for one in task.attempts), default=None)
    return 1000 * (task.seconds if first is None else first - task.started)


def _infer_ms(attempts: Sequence[BatchRecord]) -> float:
    """Return the time from the first call to the end of the last one: some run side by side."""
    if not attempts:
        return 0.0
    return 1000 * (max(one.started + one.seconds for one in attempts) - min(one.started for one in attempts))


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
