"""Work that is done side by side, and ends together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_concurrently(*work: Coroutine[Any, Any, T]) -> list[T]:
    """The results of all; when one fails, or this is cancelled, the others are cancelled and have ended before it is
    raised."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
