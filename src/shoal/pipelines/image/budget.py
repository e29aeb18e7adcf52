"""Limit the bytes of decoded images in memory across all threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from shoal.c_library import find_function

TOTAL = 256 * 1024 * 1024


class Budget:
    """Lends `total` bytes in request order (FIFO), so that small requests cannot starve a large image. Waiting blocks
    the thread. A waiting thread must not hold bytes that only it would give back."""

    def __init__(self, total: int = TOTAL) -> None:
        self.total = total
        self._free = total
        self._tickets: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Reserve `size` bytes for the body. Raises ValueError if `size` exceeds the total."""
        self.take(size)
        try:
            yield
        finally:
            self.give(size)

    def take(self, size: int) -> None:
        """Reserve `size` bytes until `give`. Raises as `reserve` does."""
        if not 0 <= size <= self.total:
            raise ValueError(f"{size} bytes never fit in {self.total}")
        ticket = object()
        with self._changed:
            self._tickets.append(ticket)
            try:
                self._changed.wait_for(lambda: self._tickets[0] is ticket and size <= self._free)
                self._free -= size
            finally:
                self._tickets.remove(ticket)
                self._changed.notify_all()

    def give(self, size: int) -> None:
        """Return `size` reserved bytes."""
        with self._changed:
            self._free += size
            self._changed.notify_all()


class ImageBudget(Budget):
    """The budget of one image. `take` reserves `kept` extra bytes, in one step, for what the decoded image becomes.
    `give` does not return those; the caller returns them to `budget`. `is_held` says whether they are still to be
    returned."""

    def __init__(self, budget: Budget, output_bytes: int) -> None:
        super().__init__(budget.total - output_bytes)
        self.is_held = False
        self._budget = budget
        self._output_bytes = output_bytes

    def take(self, size: int) -> None:
        self._budget.take(size + self._output_bytes)
        self.is_held = True

    def give(self, size: int) -> None:
        self._budget.give(size)


SHARED = Budget()
"""The budget of this process."""


def trim() -> None:
    """Return free memory to the system. glibc keeps it per thread: eight threads that take turns decoding 40 million
    pixels would hold five times the reserved amount."""
    _malloc_trim()(0)


@cache
def _malloc_trim() -> Callable[[int], object]:
    """Return a no-op if the C library is not glibc."""
    return find_function("malloc_trim") or (lambda pad: None)
