"""Memory lent to decoders: never more than the total, in the order of the requests."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from shoal.pipelines.image.budget import TOTAL, Budget, ImageBudget


def test_the_total_is_256_mib() -> None:
    """The limit for the whole process."""
    assert TOTAL == Budget().total == 256 * 1024 * 1024


@pytest.mark.parametrize("size", [-1, 101])
def test_sizes_over_the_total_are_refused(size: int) -> None:
    """Such a request never waits."""
    with pytest.raises(ValueError, match="never fit"), Budget(100).reserve(size):
        pass


def test_room_is_given_back_by_errors_too() -> None:
    """The whole budget is available again."""
    budget = Budget(100)
    for _ in range(3):
        with pytest.raises(KeyError), budget.reserve(100):
            raise KeyError


def test_never_more_than_the_total_is_lent() -> None:
    """For any sizes requested by twelve threads."""
    budget, guard = Budget(100), threading.Lock()
    lent, peak, finished = 0, 0, 0

    def work(size: int) -> None:
        nonlocal lent, peak, finished
        for _ in range(50):
            with budget.reserve(size):
                with guard:
                    lent += size
                    peak = max(peak, lent)
                with guard:
                    lent -= size
        with guard:
            finished += 1

    threads = [threading.Thread(target=work, args=(size,)) for size in (1, 7, 30, 50, 60, 100) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert finished == 12
    assert 0 < peak <= 100


def test_a_large_image_is_not_overtaken() -> None:
    """A later small request waits behind it, although it would fit."""
    budget, order, requested = Budget(100), list[str](), threading.Semaphore(0)

    class Noted(deque[object]):
        def append(self, ticket: object) -> None:
            super().append(ticket)
            requested.release()

    budget._tickets = Noted()

    def work(name: str, size: int) -> None:
        with budget.reserve(size):
            order.append(name)

    large = threading.Thread(target=work, args=("large", 90))
    small = threading.Thread(target=work, args=("small", 11))
    with budget.reserve(20):
        assert requested.acquire(timeout=30)
        for thread in (large, small):
            thread.start()
            assert requested.acquire(timeout=30)
        assert order == []
    large.join(30)
    small.join(30)
    assert order == ["large", "small"]


def test_pixels_and_decoding_are_lent_together() -> None:
    """Both are lent at once, so that no request waits for the second part while it holds the first; the rest stays
    lent."""
    budget = Budget(100)
    keeping = ImageBudget(budget, 30)
    assert keeping.total == 70
    with keeping.reserve(70):
        assert keeping.is_held
        assert not _free(budget, 1)
    assert keeping.is_held
    assert _free(budget, 70)
    assert not _free(budget, 71)
    budget.give(30)
    assert _free(budget, 100)


def test_an_image_that_never_fits_keeps_nothing() -> None:
    """Nor does an image that is refused before decoding."""
    budget = Budget(100)
    keeping = ImageBudget(budget, 30)
    with pytest.raises(ValueError, match="never fit"), keeping.reserve(71):
        pass
    assert not keeping.is_held
    assert _free(budget, 100)


def _free(budget: Budget, size: int) -> bool:
    return budget._free >= size
