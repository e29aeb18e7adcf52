from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.scheduling.retries import RetryState, Step, next_step
from shoal.errors import (
    BackendError,
    DeadlineExceeded,
    EngineFailed,
    InputRejected,
    InternalError,
    NotFinite,
    OutOfMemory,
    Overloaded,
    ShoalError,
    TransportFailed,
)


@pytest.mark.parametrize(
    ("error", "items", "calls", "ready", "expected"),
    [
        (InputRejected("x"), 8, 8, True, "halve"),
        (EngineFailed("x"), 8, 2, True, "halve"),
        (EngineFailed("x"), 8, 1, True, "singles"),
        (InputRejected("x"), 2, 0, True, "singles"),
        (InputRejected("x"), 8, 8, False, "halve"),
        (EngineFailed("x"), 8, 8, False, "retry"),
        (EngineFailed("x"), 1, 8, False, "retry"),
        (TransportFailed("x"), 8, 8, True, "retry"),
        (TransportFailed("x"), 1, 0, False, "retry"),
        (OutOfMemory("x"), 8, 0, True, "halve"),
        (OutOfMemory("x"), 1, 8, True, "fail"),
        (InputRejected("x"), 1, 8, True, "fail"),
        (EngineFailed("x"), 1, 8, True, "fail"),
        (DeadlineExceeded("x"), 8, 8, True, "fail"),
        (InternalError("x"), 8, 8, True, "fail"),
        (NotFinite("x"), 8, 8, True, "fail"),
        (BackendError("x"), 8, 8, True, "fail"),
        (Overloaded("x"), 8, 8, True, "again"),
        (Overloaded("x"), 1, 0, False, "again"),
    ],
)
def test_each_failure_has_its_step(error: ShoalError, items: int, calls: int, ready: bool, expected: Step) -> None:
    """Only errors that an item can cause start a search; transport errors are retried."""
    trial = RetryState(calls)
    assert next_step(error, items, trial, replica_ready=ready) == expected
    bounded = expected == "halve" and not isinstance(error, OutOfMemory)
    assert trial.calls == calls - 2 * bounded


@pytest.mark.parametrize(("items", "calls"), [(1, 0), (2, 4), (3, 6), (4, 6), (64, 14), (65, 16)])
def test_a_search_may_use_two_calls_per_halving_and_two_more(items: int, calls: int) -> None:
    """A search may use 2 log2(n) + 2 calls; one item needs none."""
    assert RetryState.of(items).calls == calls


def extra_calls(items: int, fails: Callable[[range], bool]) -> tuple[int, set[int], int]:
    """Run the search of a failed batch to its end; return (halving calls, failed items, single calls)."""
    trial, parts, calls, singles = RetryState.of(items), [range(items)], 0, 0
    failed: set[int] = set()
    while parts:
        part = parts.pop(0)
        if not fails(part):
            continue
        step = next_step(EngineFailed("x"), len(part), trial, replica_ready=True)
        if step == "halve":
            middle = len(part) // 2
            parts += [part[:middle], part[middle:]]
            calls += 2
        elif step == "singles":
            singles += len(part)
            failed.update(item for item in part if fails(range(item, item + 1)))
        else:
            assert len(part) == 1
            failed.update(part)
    return calls, failed, singles


@given(st.integers(2, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))))
def test_one_culprit_is_found_within_the_bound(case: tuple[int, int]) -> None:
    """One bad item is found by halving alone within 2 log2(n) + 2 extra calls, for any size and position."""
    items, culprit = case
    calls, failed, singles = extra_calls(items, lambda part: culprit in part)
    assert failed == {culprit}
    assert calls <= 2 * ceil(log2(items)) + 2
    assert singles == 0


@given(st.integers(2, 200).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_any_number_of_culprits_keeps_the_bound(case: tuple[int, set[int]]) -> None:
    """Exactly the bad items fail; halving stays within its bound, and no item runs alone more than once."""
    items, culprits = case
    calls, failed, singles = extra_calls(items, lambda part: not culprits.isdisjoint(part))
    assert failed == culprits
    assert calls <= 2 * ceil(log2(items)) + 2
    assert singles <= items
