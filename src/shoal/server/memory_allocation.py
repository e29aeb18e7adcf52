"""Let the C library keep the memory that it will need again for the next answer."""

from __future__ import annotations

import os

from shoal.c_library import find_function

MMAP_THRESHOLD = 1 << 20
"""Blocks from this many bytes on are mapped and unmapped one by one, as the weights of models are."""

TRIM_THRESHOLD = 4 << 20
"""Free bytes that each heap keeps at its end; threads have heaps of their own."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Set glibc's thresholds, unless the environment does; return whether they were set.

    By default glibc returns the memory of each large answer to the system, and the next answer is written to new pages,
    which the kernel clears first: a fifth of the processor time of 32 vectors of 1,024 numbers as JSON (400 KB).
    Source: mallopt(3).
    """
    if any(name in os.environ for name in _VARIABLES):
        return False
    mallopt = find_function("mallopt")
    if mallopt is None:  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD)) and bool(mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD))
