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
    ever. Whoever waits blocks its thread, and may hold no room meanwhile that it alone would give back."""

    def __init__(self, total: int = TOTAL) -> None:
        self.total = total
        self._free = total
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Lends `size` bytes for the body. Raises ValueError where there can never be as many."""
        self.take(size)
        try:
            yield
        finally:
            self.give(size)

    def take(self, size: int) -> None:
        """Lends `size` bytes until `give`. Raises as `reserve` does."""
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

    def give(self, size: int) -> None:
        """So many bytes that were lent are free again."""
        with self._changed:
            self._free += size
            self._changed.notify_all()


class PictureBudget(Budget):
    """The room of one picture: what is lent to its decoder comes with `kept` bytes more, in one go, for what becomes of
    it. Those stay lent until they are given back to `budget`; `held` says whether they are."""

    def __init__(self, budget: Budget, kept: int) -> None:
        super().__init__(budget.total - kept)
        self.held = False
        self._budget = budget
        self._kept = kept

    def take(self, size: int) -> None:
        self._budget.take(size + self._kept)
        self.held = True

    def give(self, size: int) -> None:
        self._budget.give(size)


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
