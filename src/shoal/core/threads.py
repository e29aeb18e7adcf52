"""Small thread pools for CPU work that must not block the event loop, and the number of usable cores."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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


def usable_cores() -> int:
    """Return the cores that this process may use: its CPU affinity, limited by the cgroup's quota."""
    quota = Path("/sys/fs/cgroup/cpu.max")
    return cores_within(cores_in_affinity(), quota.read_text() if quota.is_file() else "max")


def cores_in_affinity() -> int:
    """Return the cores on which the system may run this process."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def cores_within(affinity: int, cpu_max: str) -> int:
    """Return the cores under a quota in the format of cgroup v2's `cpu.max`: "max" or "<quota us> <period us>"."""
    quota, _, period = cpu_max.strip().partition(" ")
    if quota == "max":
        return affinity
    return max(1, min(affinity, math.ceil(int(quota) / int(period or 100_000))))
