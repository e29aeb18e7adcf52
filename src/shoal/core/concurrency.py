"""Run coroutines concurrently, with no task outliving the call."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_concurrently(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Return the results of all coroutines. If one fails or this call is cancelled, cancel the others and wait for them
    to end before raising."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
