"""The memory that this process may still allocate."""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes() -> int:
    """Return the free memory, capped by the cgroup's limit; 0 if the kernel does not tell."""
    free = _meminfo(Path("/proc/meminfo"))
    group = Path("/sys/fs/cgroup")
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    return free if limit is None else max(0, min(free, limit - (used or 0)))


def _meminfo(path: Path) -> int:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:  # not on macOS
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
