"""Threads for CPU work that must not hold the event loop: few, named, ended with their owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Threads:
    """A small pool; `run` answers what the call answers or raises what it raises."""

    def __init__(self, name: str, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=f"shoal-{name}")

    async def run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def close(self) -> None:
        """Start nothing new; calls under way finish on their own."""
        self._pool.shutdown(wait=False, cancel_futures=True)
