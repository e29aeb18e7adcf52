from __future__ import annotations

import pytest

from shoal.core.generation.replica_selection import LONGEST_PAUSE_S, PAUSE_S, ReplicaSelector


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def spend(selector: ReplicaSelector, clock: Clock, at: int, seconds: float, *, answered: bool) -> None:
    start = selector.begin(at)
    clock.now += seconds
    if answered:
        selector.record_first_piece(at)
    selector.end(at, start, answered=answered)


def test_the_fewest_in_flight_and_ties_in_turn(clock: Clock) -> None:
    selector = ReplicaSelector(["a", "b", "c"], 10, clock)
    assert [selector.pick([0, 1, 2]) for _ in range(4)] == [0, 1, 2, 0]
    selector.begin(1)
    assert [selector.pick([0, 1, 2]) for _ in range(3)] == [2, 0, 2]
    assert selector.pick([1]) == 1


def test_a_silent_replica_is_paused_and_tried_again(clock: Clock) -> None:
    """A silent replica is tried with one request at a time after growing pauses; a first chunk restores it."""
    selector = ReplicaSelector(["a", "b"], 10, clock)
    spend(selector, clock, 0, 9, answered=False)
    assert selector.pick([0, 1]) == 0
    spend(selector, clock, 0, 10, answered=False)
    assert [selector.pick([0, 1]) for _ in range(3)] == [1, 1, 1]
    clock.now += PAUSE_S
    assert selector.pick([0, 1]) == 0
    trial = selector.begin(0)
    assert selector.pick([0, 1]) == 1
    clock.now += 10
    selector.end(0, trial, answered=False)
    clock.now += PAUSE_S
    assert selector.pick([0, 1]) == 1
    clock.now += PAUSE_S
    spend(selector, clock, 0, 60, answered=True)
    first = selector.begin(1)
    assert [selector.pick([0, 1]) for _ in range(2)] == [0, 0]
    selector.end(1, first, answered=True)


def test_pauses_have_an_end(clock: Clock) -> None:
    selector = ReplicaSelector(["a", "b"], 1, clock)
    for _ in range(50):
        spend(selector, clock, 0, 1, answered=False)
    clock.now += LONGEST_PAUSE_S
    assert selector.pick([0, 1]) == 0


def test_the_last_replica_is_always_used(clock: Clock) -> None:
    """The last replica is always used: an error is better than no answer."""
    selector = ReplicaSelector(["a", "b"], 1, clock)
    for at in (0, 1):
        spend(selector, clock, at, 1, answered=False)
    assert selector.pick([0]) == 0
    assert {selector.pick([0, 1]) for _ in range(2)} == {0, 1}
