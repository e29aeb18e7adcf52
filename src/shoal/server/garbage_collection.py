"""Configure the garbage collector for a server, so that it does not traverse objects that live as long as a model.

Reference counting frees nearly everything; the collector only finds cycles. With CPython's default thresholds it
traversed the whole heap (some 400,000 objects of code and models: 50 to 100 ms, in which nothing else runs) about once
in 800 requests: a third of the CPU time of a server that only forwards texts. `gc.freeze` excludes the objects that
exist once the models are loaded, and the thresholds suit thousands of requests in flight.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager, suppress

CHECK_INTERVAL_S = 1.0
"""Interval of checks whether models were loaded or unloaded."""

THRESHOLDS = (200_000, 10, 10)
"""Arguments of `gc.set_threshold`: live allocations before a collection of the youngest generation, and collections of
each generation before one of the next. A request in flight is about 100 objects: at CPython's default of 700, seven of
them trigger a collection, and traversing the objects of a thousand takes 0.03 s. No request, failed or not, leaves a
cycle (tests/unit/core/test_cycles.py), so collections can wait."""


def collect_and_freeze() -> None:
    """Collect everything, then freeze what is left; takes 0.1 s.

    Frozen objects are unfrozen first, so that an unloaded model is freed even if it is part of a cycle.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@asynccontextmanager
async def keep_frozen(standing: Callable[[], Hashable]) -> AsyncIterator[None]:
    """Within the block, call `collect_and_freeze` whenever the value of `standing` changes.

    `standing` returns an identity of the long-lived objects, such as the loaded models.
    """
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
