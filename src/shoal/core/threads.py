"""Threads for CPU work that must not hold the event loop: few, named, ended with their owner; and
the cores for them."""

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
    """A small pool; `run` answers what the call answers or raises what it raises, and Unavailable where it gets no
    thread."""

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
        """Start nothing new; calls under way finish on their own."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _no_thread_message(error: RuntimeError) -> str:
    if threading.main_thread().is_alive():
        return f"no thread can be had for the work ({error}): try again later"
    return "Python lends no threads once the main thread has ended: let it wait for the program's others (Thread.join)"


def usable_cores() -> int:
    """Cores that this process may use: its affinity, narrowed by the control group's quota."""
    try:
        affinity = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        affinity = os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    return cores_within(affinity, quota.read_text() if quota.is_file() else "max")


def cores_within(affinity: int, cpu_max: str) -> int:
    """Cores under a quota written as in cgroup v2's `cpu.max`: "max" or "<quota us> <period us>"."""
    quota, _, period = cpu_max.strip().partition(" ")
    if quota == "max":
        return affinity
    return max(1, min(affinity, math.ceil(int(quota) / int(period or 100_000))))
