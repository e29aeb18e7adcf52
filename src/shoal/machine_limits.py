"""The processors and the memory that this process may use: the machine's, within the limits of its control groups.

Control groups are Linux's, of version 2 or 1. The limits of all groups above the process's own hold, too: systemd's
slices, Kubernetes' pods.
"""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_V1_UNLIMITED = 1 << 60
"""Version 1 has a number for no limit, the largest multiple of a page."""


def usable_cores() -> int:
    """Return the cores that this process may use: its CPU affinity, limited by quotas. Half a core counts as one."""
    quotas = [_read_quota(folder) for folder in _find_folders("cpu")]
    return max(1, min([cores_in_affinity(), *(math.ceil(quota) for quota in quotas if quota is not None)]))


def cores_in_affinity() -> int:
    """Return the cores on which the system may run this process."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def available_bytes() -> int:
    """Return the free memory, capped by what the limits leave; 0 if the kernel does not tell."""
    free = _read_free()
    left = [limit - max(0, used) for limit, used in map(_read_memory, _find_folders("memory")) if limit is not None]
    return max(0, min([free, *left]))


def total_bytes() -> int:
    """Return the memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_limit() -> int | None:
    """Return the smallest limit in bytes, None without one."""
    limits = [limit for limit, _ in map(_read_memory, _find_folders("memory")) if limit is not None]
    return min(limits, default=None)


def _find_folders(controller: str) -> list[Path]:
    """Return the folders that may hold limits: of the process's own groups and of those above them."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:  # not on macOS
        return []
    found: list[Path] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number != "0" and controller not in controllers.split(","):
            continue
        mount = _GROUPS if number == "0" else _GROUPS / controller
        own = PurePosixPath(path).parts[1:]
        own = () if ".." in own else own  # outside of what this container sees
        found += [mount.joinpath(*own[:depth]) for depth in range(len(own), -1, -1)]
    return found


def _read_quota(folder: Path) -> float | None:
    """Return the group's quota in cores, None without one."""
    words = _read(folder / "cpu.max").split()
    if not words:
        words = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
    quota, period = [int(word) if word.isdigit() else 0 for word in [*words, ""][:2]]
    return quota / (period or 100_000) if quota else None


def _read_memory(folder: Path) -> tuple[int | None, int]:
    """Return the group's limit in bytes and what is used of it, without files that the kernel may drop from memory."""
    limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
    names = {"inactive_file", "active_file"}
    if not limit:
        limit, used = _read(folder / "memory.limit_in_bytes"), _read(folder / "memory.usage_in_bytes")
        names = {f"total_{name}" for name in names}
    if not limit.isdigit() or int(limit) >= _V1_UNLIMITED:
        return None, 0
    facts = dict(line.partition(" ")[::2] for line in _read(folder / "memory.stat").splitlines())
    return int(limit), int(used or 0) - sum(int(facts.get(name, 0)) for name in names)


def _read_free() -> int:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:  # not on macOS
        return total_bytes()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
