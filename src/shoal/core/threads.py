"""Threads for CPU work that must not hold the event loop: few, named, ended with their owner."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shoal.errors import Unavailable

T = TypeVar("T")


class Threads:
    """A small pool; `run` answers what the call answers or raises what it raises, and Unavailable where it gets no
    thread."""

    def __init__(self, name: str, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=f"shoal-{name}")

    async def run(self, call: Callable[[], T]) -> T:
        try:
            running = asyncio.get_running_loop().run_in_executor(self._pool, call)
        except RuntimeError as error:
            raise Unavailable(_no_thread(error)) from error
        return await running

    def close(self) -> None:
        """Start nothing new; calls under way finish on their own."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _no_thread(error: RuntimeError) -> str:
    if threading.main_thread().is_alive():
        return f"no thread can be had for the work ({error}): try again later"
    return "Python lends no threads once the main thread has ended: let it wait for the program's others (Thread.join)"
