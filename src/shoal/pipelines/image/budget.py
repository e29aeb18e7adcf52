"""How many bytes of decoded pictures may be in memory at once, over all threads."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

TOTAL = 256 * 1024 * 1024


class Budget:
    """`total` bytes, lent in the order in which they were asked for, so that a large picture is not overtaken for
    ever. Whoever waits blocks its thread; nobody may hold room while it asks for more."""

    def __init__(self, total: int = TOTAL) -> None:
        self.total = total
        self._free = total
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def room(self, size: int) -> Iterator[None]:
        """Lends `size` bytes for the body. Raises ValueError where there can never be as many."""
        if not 0 <= size <= self.total:
            raise ValueError(f"{size} bytes never fit in {self.total}")
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: self._waiting[0] is ticket and size <= self._free)
                self._free -= size
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


SHARED = Budget()
"""That of this process."""


def trim() -> None:
    """Gives free memory back to the system. glibc keeps it by thread, so that eight threads that decode 40 million
    pixels in turn would hold five times what is lent."""
    _malloc_trim()(0)


@cache
def _malloc_trim() -> Callable[[int], object]:
    """Nothing where the C library is another, or cannot be asked."""
    try:
        found: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return lambda pad: None
    return found
