from __future__ import annotations

import msgspec
import numpy as np
import pytest

from shoal.core.protocols import Prepared
from shoal.core.recording import BatchRecord
from shoal.core.scheduling.request_state import Item, RequestState
from shoal.errors import DeadlineExceeded, EngineFailed
from shoal.types import Embedded
from tests.unit.core.lanes import context, embed


def pending(count: int) -> RequestState:
    """Return a request of so many inputs that arrived and was queued at 10.0."""
    task = embed(*map(str, range(count)))
    made = RequestState(task, task.items, context(), traffic="interactive", arrived=10.0, estimates=[1] * count)
    for index in range(count):
        prepared = Prepared(tensors={}, cost=1, group=(), outputs=(), tokens=1)
        made.items[index] = Item(
            cost=1,
            group=(),
            traffic="interactive",
            client="c",
            request=1,
            arrived=10.0,
            deadline=99.0,
            prepared=prepared,
        )
    return made


def ran(number: int, size: int, *, seconds: float = 0.0, started: float = 10.0, flush: str = "idle") -> BatchRecord:
    return BatchRecord(number, size, 1, flush, f"replica-{number}", seconds, started)


async def test_facts_are_those_of_the_largest_batch() -> None:
    """Size, id, flush and replica come from the largest batch, times from the slowest item; each batch counts once."""
    request = pending(4)
    batches = [
        ran(1, 3, seconds=0.5, started=10.1),
        ran(2, 9, seconds=0.2, started=10.4, flush="full"),
        ran(3, 5, seconds=0.1, started=10.2, flush="age"),
    ]
    for index, batch in enumerate([*batches, batches[0]]):
        request.put(index, np.zeros(2, np.float32), batch, "s")
    facts = (await request.future).facts
    assert (facts.size, facts.id, facts.flush, facts.replica) == (9, 2, "full", "replica-2")
    assert facts.batches == 3
    assert facts.queue_ms == pytest.approx(400)
    assert facts.infer_ms == pytest.approx(500)


async def test_a_short_wait_is_not_rounded() -> None:
    """A short wait is not rounded."""
    request = pending(1)
    request.ctx = msgspec.structs.replace(request.ctx, deadline=10.2504)
    request.expire()
    with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.25 s: "):
        await request.future


async def test_a_row_counts_once_and_only_before_the_answer() -> None:
    """A second answer for an input, or one after a failure, has no effect."""
    request = pending(2)
    for value in (1.0, 2.0):
        request.put(1, np.full(2, value, np.float32), ran(1, 1), "s")
    assert not request.done
    request.put(0, np.full(2, 3.0, np.float32), ran(1, 1), "s")
    answer = await request.future
    assert isinstance(answer, Embedded)
    assert answer.vectors.tolist() == [[3.0, 3.0], [1.0, 1.0]]


async def test_a_row_from_the_cache_counts_only_before_the_answer() -> None:
    """A cached row counts like any other, and only before the answer."""
    request = pending(2)
    request.put_cached(0, np.ones(2, np.float32), "s")
    assert (request.cached, request.done) == (1, False)
    request.fail(EngineFailed("no"))
    request.put_cached(1, np.ones(2, np.float32), "s")
    assert (request.cached, request.unfinished) == (1, 1)
    with pytest.raises(EngineFailed):
        await request.future
