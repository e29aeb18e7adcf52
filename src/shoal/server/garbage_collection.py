"""The garbage collector of a server: it is not to walk through what lives as long as a model.

Reference counting frees nearly everything; the collector only looks for cycles. With the thresholds that CPython starts
with it walked the whole heap (some 400,000 objects of code and models: 50 to 100 ms, in which nothing else runs) about
once in 800 requests: a third of the processor time of a server that only passes texts on. `gc.freeze` takes what is
there once the models are loaded out of its sight, and the thresholds suit thousands of requests in flight.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager, suppress

CHECK_INTERVAL_S = 1.0
"""Between looks whether models came or went."""

THRESHOLDS = (200_000, 10, 10)
"""Objects made and not freed, before the youngest are looked at; how often that is, before the older ones are. A
request in flight is about 100 objects: with 700, as CPython starts, seven of them start the collector, and to look at a
thousand takes 0.03 s. No request, failed or not, leaves a cycle (tests/unit/core/test_cycles.py), so this can wait."""


def collect_and_freeze() -> None:
    """Collect everything, then take what is left out of the collector's sight: 0.1 s. What was out of its sight comes
    back first, so that a model which is gone is freed even where it is part of a cycle."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@asynccontextmanager
async def keep_frozen(standing: Callable[[], Hashable]) -> AsyncIterator[None]:
    """While inside, `collect_and_freeze` whenever `standing`, which tells what lives long, has changed."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    task = asyncio.create_task(_refreeze_on_change(standing), name="garbage")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        gc.unfreeze()
        gc.set_threshold(*before)


async def _refreeze_on_change(standing: Callable[[], Hashable]) -> None:
    last: Hashable = None
    while True:
        now = standing()
        if now != last:
            last = now
            collect_and_freeze()
        await asyncio.sleep(CHECK_INTERVAL_S)
