"""The thresholds of glibc's allocator."""

import ctypes
import subprocess
import sys

import pytest

from shoal.server.memory_allocation import keep_freed_memory

FAULTS = """
import os, resource
from shoal.server.memory_allocation import keep_freed_memory
assert keep_freed_memory() == ("MALLOC_TRIM_THRESHOLD_" not in os.environ)
for size in (300_000, 1_000_000) * 3:  # glibc's threshold adapts to what was freed
    bytearray(size)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    blocks = [bytearray(400_000) for _ in range(4)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")


def count_faults(**variables: str) -> int:
    ran = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, env=variables)
    return int(ran.stdout)


@glibc
def test_memory_of_answers_is_used_again() -> None:
    """Page faults of the same work, with glibc's default threshold and with Shoal's."""
    assert count_faults() * 10 < count_faults(MALLOC_TRIM_THRESHOLD_="131072")


def test_the_environment_prevails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: object())
    assert not keep_freed_memory()
