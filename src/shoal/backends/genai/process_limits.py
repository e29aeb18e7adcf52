"""Limits the memory of a process, to protect other processes."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

PAGE = resource.getpagesize()


def prefer_oom_kill() -> None:
    """Let the kernel kill this process before others when memory runs out, if the system allows the setting."""
    with contextlib.suppress(OSError):  # not Linux, or /proc is read-only: the kernel's default applies
        Path("/proc/self/oom_score_adj").write_text("1000")


def memory_sizes() -> tuple[int, int]:
    """Return the bytes of this process's address space and of its resident memory, zeros if unknown."""
    try:
        space, resident, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:  # not Linux
        return 0, 0
    return int(space) * PAGE, int(resident) * PAGE


def limit_growth(size: int) -> None:
    """Limit the growth of this process to `size` bytes from now on; larger allocations raise MemoryError."""
    space, _ = memory_sizes()
    if space:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = space + size
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
