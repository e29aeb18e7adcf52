"""Small thread pools for CPU work that must not block the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shoal.errors import Unavailable

T = TypeVar("T")


class Threads:
    """A small thread pool. `run` returns or raises the result of the call, and raises Unavailable if no thread can be
    started."""

    def __init__(self, name: str, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=f"shoal-{name}")

    async def run(self, call: Callable[[], T]) -> T:
        try:
            running = asyncio.get_running_loop().run_in_executor(self._pool, call)
        except RuntimeError as error:
            raise Unavailable(_no_thread_message(error)) from error
        return await running

    def close(self) -> None:
        """Cancel queued calls; running ones finish."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _no_thread_message(error: RuntimeError) -> str:
    if threading.main_thread().is_alive():
        return f"cannot start a thread ({error}): try again later"
    return "Python starts no threads after the main thread ends: let the main thread wait for the others (Thread.join)"
