"""Keeps a process from taking the memory of others."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

PAGE = resource.getpagesize()


def prefer_oom_kill() -> None:
    """Let the kernel end this process before others when memory runs out, where that may be said."""
    with contextlib.suppress(OSError):  # not Linux, or /proc is read only: the kernel chooses by itself
        Path("/proc/self/oom_score_adj").write_text("1000")


def memory_sizes() -> tuple[int, int]:
    """Bytes of this process: its address space, and what of it lies in memory. Zeros where that is not told."""
    try:
        space, resident, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:  # not Linux
        return 0, 0
    return int(space) * PAGE, int(resident) * PAGE


def limit_growth(size: int) -> None:
    """Let this process grow by so many bytes from now on: what asks for more gets MemoryError."""
    space, _ = memory_sizes()
    if space:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = space + size
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
