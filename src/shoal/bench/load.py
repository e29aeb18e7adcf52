"""Closed and open loop: who sends what when. A closed loop waits for each answer; an open loop keeps to its clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from shoal.bench.client import ConnectionLost, Reply
from shoal.bench.stats import Record

RequestFactory = Callable[[], bytes]
"""Answers the next request, with texts that no earlier one had."""

MAX_PAUSE_S = 1.0
"""The longest wait after a refusal, whatever the server asks for."""


class RequestPool(Protocol):
    """What a run needs of a pool of connections."""

    async def ask(self, request: bytes) -> Reply: ...


async def run_closed_loop(
    pool: RequestPool, make: RequestFactory, *, clients: int, seconds: float, texts: int = 1
) -> Record:
    """`clients` callers, each with one request in flight, until `seconds` have passed.

    Answers after that are waited for and not counted. A refused caller (429, 503) waits as long as `Retry-After` says
    and then sends the same request again: nobody has computed its texts yet.
    """
    record, start = Record(), time.perf_counter()
    end = start + seconds

    async def caller() -> None:
        request = b""
        while (due := time.perf_counter()) < end:
            request = request or make()
            pause = await _send_one(pool, request, record, due=due, start=start, end=end, texts=texts)
            if pause:
                await asyncio.sleep(pause)
            else:
                request = b""

    await asyncio.gather(*(caller() for _ in range(clients)))
    record.seconds = seconds
    return record


async def run_open_loop(
    pool: RequestPool, make: RequestFactory, *, rate: float, seconds: float, texts: int = 1
) -> Record:
    """One request every 1 / `rate` seconds whatever the answers do; each latency counts from when it was due."""
    record, start = Record(), time.perf_counter()
    total = max(1, round(rate * seconds))
    waiting: set[asyncio.Task[float]] = set()
    for number in range(total):
        due = start + number / rate
        if (ahead := due - time.perf_counter()) > 0:
            await asyncio.sleep(ahead)
        task = asyncio.create_task(_send_one(pool, make(), record, due=due, start=start, end=None, texts=texts))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
    if waiting:
        await asyncio.wait(waiting)
    record.seconds = time.perf_counter() - start
    return record


async def run_burst(pool: RequestPool, requests: list[bytes]) -> Record:
    """All requests at once; the run lasts until the last answer."""
    record, start = Record(), time.perf_counter()
    await asyncio.gather(
        *(_send_one(pool, body, record, due=start, start=start, end=None, texts=1) for body in requests)
    )
    record.seconds = time.perf_counter() - start
    return record


async def _send_one(
    pool: RequestPool, request: bytes, record: Record, *, due: float, start: float, end: float | None, texts: int
) -> float:
    """Send, wait, write down; answers how long a refused caller should wait."""
    try:
        reply = await pool.ask(request)
    except ConnectionLost:
        record.errors["connection lost"] += 1
        return 0.05
    except OSError as error:
        record.errors[f"connect: {error.strerror or type(error).__name__}"] += 1
        return 0.05
    now = time.perf_counter()
    if reply.status != 200:
        record.errors[str(reply.status)] += 1
        return min(reply.retry_after or 0.05, MAX_PAUSE_S) if reply.status in {429, 503} else 0.0
    if end is None or now <= end:
        record.latency.append(now - due)
        record.finished.append(now - start)
        record.texts += texts
        if reply.batch_size:
            record.batch_sizes.append(reply.batch_size)
        if reply.queue_ms >= 0:
            record.queue_ms.append(reply.queue_ms)
    return 0.0
