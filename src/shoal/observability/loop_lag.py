"""How late the event loop wakes a timer, which shows its stalls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def measure_loop_lag(
    record: Callable[[float], None],
    interval: float = 0.1,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] = time.perf_counter,
) -> AsyncIterator[None]:
    """Inside the block, measure how late the event loop wakes a timer of `interval` seconds, which shows its stalls."""

    async def sample() -> None:
        while True:
            start = clock()
            await sleep(interval)
            record(max(0.0, clock() - start - interval))

    task = asyncio.create_task(sample(), name="loop-lag")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
