from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.scheduling.admission import BULK_ABOVE, RATE_WINDOW_S, Admission, Permit, classify_traffic
from shoal.errors import Overloaded
from shoal.types import Context, TrafficClass


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def admission(max_items: int = 16) -> tuple[Admission, Clock]:
    clock = Clock()
    return Admission(max_items, clock, jitter=lambda: 0.0), clock


@pytest.mark.parametrize(
    ("items", "traffic", "expected"),
    [
        (BULK_ABOVE, None, "interactive"),
        (BULK_ABOVE + 1, None, "bulk"),
        (1, "bulk", "bulk"),
        (500, "interactive", "interactive"),
    ],
)
def test_size_decides_the_class_unless_set(items: int, traffic: TrafficClass | None, expected: str) -> None:
    """More than BULK_ABOVE inputs are bulk, unless the key or a header sets the class."""
    context = Context(id="r", deadline=0.0, traffic=traffic)
    assert classify_traffic(context, items) == expected


def test_generation_is_interactive() -> None:
    """A generation is interactive, whatever the length of its prompt."""
    assert classify_traffic(Context(id="r", deadline=0.0), 1) == "interactive"


def test_the_error_for_bulk_names_the_setting_and_the_reserve() -> None:
    """The error for bulk names the setting and the limit that applies to bulk."""
    gate, _ = admission(8)
    gate.admit("a", "bulk", 6, 60)
    with pytest.raises(Overloaded, match=r"limit of 8 \(max_queue_items\), 1 of them reserved for interactive"):
        gate.admit("b", "bulk", 2, 20)
    gate.admit("b", "interactive", 2, 20)
    with pytest.raises(Overloaded, match=r"1 more exceed the limit of 8 \(max_queue_items\):"):
        gate.admit("c", "interactive", 1, 10)


def test_full_queue_refuses_with_a_time_to_come_back() -> None:
    """The item that just fits is admitted, the next one is refused, and a refusal changes no count."""
    gate, _ = admission(16)
    gate.admit("a", "interactive", 8, 80)
    gate.admit("b", "interactive", 7, 70)
    with pytest.raises(Overloaded, match="max_queue_items") as caught:
        gate.admit("c", "interactive", 2, 20)
    assert caught.value.retry_after == 1.0
    assert (gate.items, gate.tokens) == (15, 150)
    gate.admit("c", "interactive", 1, 10)
    assert gate.items == 16


def test_one_client_holds_at_most_half_of_a_class() -> None:
    """One client may fill half of a class and no more; other clients, and its own other class, are admitted."""
    gate, _ = admission(16)
    gate.admit("a", "bulk", 5, 0)
    with pytest.raises(Overloaded, match="share of 8"):
        gate.admit("a", "bulk", 4, 0)
    gate.admit("a", "bulk", 3, 0)
    gate.admit("a", "interactive", 1, 0)
    gate.admit("b", "interactive", 7, 0)
    assert gate.items == 16


def test_bulk_leaves_room_for_single_texts() -> None:
    """An eighth of the queue is never available to bulk, however many bulk clients there are."""
    gate, _ = admission(16)
    for client in "abcdefg":
        gate.admit(client, "bulk", 2, 0)
    with pytest.raises(Overloaded, match=r"limit of 16 .* 2 of them reserved"):
        gate.admit("h", "bulk", 1, 0)
    gate.admit("h", "interactive", 2, 0)


@pytest.mark.parametrize("traffic", ["interactive", "bulk"])
def test_empty_queue_admits_any_size(traffic: TrafficClass) -> None:
    """A valid request is never refused for its size alone."""
    gate, _ = admission(16)
    permit = gate.admit("a", traffic, 2048, 0)
    gate.release(permit)
    gate.admit("a", traffic, 2048, 0)
    assert gate.items == 2048


def test_permit_is_released_once() -> None:
    """A second release has no effect, whatever it says."""
    gate, _ = admission(16)
    first = gate.admit("a", "interactive", 3, 30)
    second = gate.admit("a", "interactive", 2, 20)
    gate.release(second)
    gate.release(second, 500)
    assert (gate.items, gate.tokens) == (3, 30)
    gate.release(first)
    assert (gate.items, gate.tokens) == (0, 0)


@pytest.mark.parametrize("ratio", [2.0, 0.5])
def test_true_counts_correct_the_estimates_of_others(ratio: float) -> None:
    """After many answers with twice the estimated tokens, the queue is estimated at twice its tokens."""
    estimated: list[float] = []
    gate = Admission(16, Clock(), drain=lambda tokens, items: estimated.append(tokens), jitter=lambda: 0.0)
    for _ in range(500):
        gate.release(gate.admit("a", "interactive", 1, 100), round(100 * ratio))
    gate.admit("a", "interactive", 1, 100)
    gate.admit("b", "interactive", 1, 100)
    assert estimated == [pytest.approx(200 * ratio, rel=0.02)]
    assert gate.tokens == 200


def drained(seconds: float, items: int) -> Admission:
    """Return a full queue of 16 from which `items` left one by one, evenly over `seconds`, the last one just now."""
    gate, clock = admission(16)
    for _ in range(items):
        gate.release(gate.admit("past", "interactive", 1, 0))
        clock.now += seconds / items
    gate.admit("a", "interactive", 16, 0)
    return gate


@pytest.mark.parametrize(
    ("seconds", "items", "excess", "expected"), [(5, 10, 6, 3.0), (8, 4, 100, 30.0), (1, 90, 1, 1.0)]
)
def test_retry_after_follows_the_drain_rate(seconds: float, items: int, excess: int, expected: float) -> None:
    """Ten items in 5 s mean 3 s for six more; the result is between 1 s and 30 s."""
    with pytest.raises(Overloaded) as caught:
        drained(seconds, items).admit("b", "interactive", excess, 0)
    assert caught.value.retry_after == pytest.approx(expected)


def test_old_departures_are_forgotten() -> None:
    """Items that left before the window do not count."""
    gate, clock = admission(16)
    gate.release(gate.admit("a", "interactive", 1, 0))
    clock.now += RATE_WINDOW_S + 0.1
    gate.admit("a", "interactive", 16, 0)
    with pytest.raises(Overloaded) as caught:
        gate.admit("b", "interactive", 16, 0)
    assert caught.value.retry_after == 1.0


def test_share_refusals_have_a_retry_time() -> None:
    """The retry time of a client over its share is its own excess divided by the drain rate."""
    gate, clock = admission(16)
    for _ in range(4):
        gate.release(gate.admit("past", "interactive", 1, 0))
        clock.now += 1.0
    gate.admit("a", "interactive", 8, 0)
    with pytest.raises(Overloaded, match="share") as caught:
        gate.admit("a", "interactive", 3, 0)
    assert caught.value.retry_after == pytest.approx(3.0)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("abc"), st.sampled_from(["interactive", "bulk"]), st.integers(1, 20)),
            st.integers(0, 30),
        ),
        max_size=60,
    )
)
def test_counts_are_the_sum_of_the_permits(steps: list[tuple[str, TrafficClass, int] | int]) -> None:
    """The count is always the sum of the permits, and exceeds the limit only for a single oversized request."""
    gate, _ = admission(16)
    permits: list[Permit] = []
    for step in steps:
        if isinstance(step, int):
            if permits:
                gate.release(permits.pop(step % len(permits)))
        else:
            try:
                permits.append(gate.admit(*step, tokens=step[2] * 10))
            except Overloaded:
                assert permits
        assert gate.items == sum(permit.items for permit in permits)
        assert gate.tokens == 10 * gate.items
        assert gate.items <= 16 or max(permit.items for permit in permits) > 16 - 1 or len(permits) == 1
    for permit in permits:
        gate.release(permit)
    assert (gate.items, gate.tokens, dict(gate._flows)) == (0, 0, {})
