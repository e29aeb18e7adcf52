"""Times of a request's record as clients see them."""

from __future__ import annotations

from shoal.core.recording import BatchRecord, Found, TaskRecord
from shoal.surfaces.requests.wire import explain


def call(started: float, seconds: float, error: str = "") -> BatchRecord:
    return BatchRecord(0, 1, 1, "", "r", seconds, started, error=error)


def test_calls_side_by_side() -> None:
    """Choices of an answer end in any order: the queue ends with the first start, and the time is not summed up."""
    calls = [call(2.0, 1.0), call(1.5, 4.0), call(2.5, 1.0, "transport")]
    task = TaskRecord("r", "m", "generate", 3, 1.0, seconds=5.0, outcome="transport", attempts=calls)
    (work,) = explain("r", Found(None, [task])).tasks
    assert (work.queue_ms, work.infer_ms, work.retries) == (500.0, 4000.0, 0)


def test_a_task_without_a_call_only_waited() -> None:
    task = TaskRecord("r", "m", "embed", 1, 1.0, seconds=0.5, outcome="overloaded")
    (work,) = explain("r", Found(None, [task])).tasks
    assert (work.queue_ms, work.infer_ms) == (500.0, 0.0)
