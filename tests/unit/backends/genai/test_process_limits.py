"""Limits that a process sets itself, tested in processes that do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shoal.backends.genai import process_limits

if sys.platform != "linux":
    pytest.skip("reads /proc", allow_module_level=True)


def run(code: str) -> str:
    """Return the output of a process that runs the code."""
    lines = ["import resource", "from pathlib import Path", "from shoal.backends.genai import process_limits", code]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, timeout=30)
    return done.stdout.decode().strip()


def test_room_is_counted_from_now() -> None:
    """Allocations above the limit raise MemoryError, and the next limit starts at the current use."""
    code = """
kept = []
for _ in range(3):
    process_limits.limit_growth(64 * 2**20)
    kept.append(bytes(48 * 2**20))
    try:
        bytes(48 * 2**20)
    except MemoryError:
        print("full")
"""
    assert run(code).split() == ["full"] * 3


def test_a_limit_from_outside_stays() -> None:
    """An existing limit is not raised."""
    code = """
limit = process_limits.memory_sizes()[0] + 2**25
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
process_limits.limit_growth(2**30)
print(resource.getrlimit(resource.RLIMIT_AS) == (limit, limit))
"""
    assert run(code) == "True"


def test_first_to_go() -> None:
    """The kernel's OOM score of this process is the highest."""
    assert run('process_limits.prefer_oom_kill(); print(Path("/proc/self/oom_score_adj").read_text())') == "1000"


def test_sizes() -> None:
    """Used memory is within the address space."""
    space, resident = process_limits.memory_sizes()
    assert 2**20 < resident <= space
