"""When a replica is ejected, and how it is readmitted."""

from __future__ import annotations

import pytest

from shoal.core.scheduling.ejection import FIRST_PAUSE_S, LONGEST_PAUSE_S, MAX_FAILURES, Ejection


def fail(one: Ejection, now: float, times: int = MAX_FAILURES) -> None:
    for _ in range(times):
        one.record_failure(now)


def test_failures_in_a_row_eject_and_a_success_between_does_not() -> None:
    one = Ejection()
    fail(one, 10.0, MAX_FAILURES - 1)
    assert one.is_healthy(10.0)
    one.record_success()
    fail(one, 10.0, MAX_FAILURES - 1)
    assert (one.is_healthy(10.0), one.ejections) == (True, 0)
    one.record_failure(10.0)
    assert (one.is_healthy(10.0), one.can_take(10.0, 0), one.ejections) == (False, False, 1)


def test_each_ejection_in_a_row_is_twice_as_long() -> None:
    """Ejections take 1, 2, 4 ... 30 s; one failed trial is enough to eject again; a success resets."""
    one, now, pause = Ejection(), 10.0, FIRST_PAUSE_S
    fail(one, now)
    for _ in range(8):
        assert not one.can_take(now + pause - 0.001, 0)
        assert one.can_take(now + pause, 0)
        now, pause = now + pause, min(2 * pause, LONGEST_PAUSE_S)
        one.record_failure(now)
    one.record_success()
    fail(one, now)
    assert one.can_take(now + FIRST_PAUSE_S, 0)


def test_a_trial_is_one_request_at_a_time_until_one_answers() -> None:
    one = Ejection()
    fail(one, 10.0)
    back = 10.0 + FIRST_PAUSE_S
    assert (one.can_take(back, 0), one.can_take(back, 1), one.is_healthy(back)) == (True, False, False)
    one.end_trial()
    assert (one.can_take(back, 1), one.failures) == (True, MAX_FAILURES)
    one.record_success()
    assert (one.is_healthy(back), one.failures) == (True, 0)


def test_absence_needs_no_second_witness_and_what_fails_together_is_one_time() -> None:
    one = Ejection(first_s=5.0, longest_s=8.0)
    for _ in range(7):
        one.record_failure(10.0, unreachable=True)
    assert (one.can_take(14.999, 0), one.can_take(15.0, 0), one.ejections) == (False, True, 1)
    one.record_failure(15.0, unreachable=True)
    assert (one.can_take(22.999, 0), one.can_take(23.0, 0)) == (False, True)


def test_what_an_input_caused_is_taken_back() -> None:
    one = Ejection()
    fail(one, 10.0, MAX_FAILURES - 1)
    one.undo_failure()
    one.record_failure(10.0)
    assert one.is_healthy(10.0)
    for _ in range(20):
        one.undo_failure()
    assert one.failures == 0


@pytest.mark.parametrize(("seconds", "until"), [(None, 0.0), (3.0, 13.0), (3600.0, 10.0 + LONGEST_PAUSE_S)])
def test_a_rest_is_no_ejection(seconds: float | None, until: float) -> None:
    one = Ejection()
    one.pause(10.0, seconds)
    assert (one.ejected_until, one.ejections, one.on_trial) == (until, 0, False)


def test_states_for_people() -> None:
    one = Ejection()
    seen = [one.status("a", 10.0, present=True), one.status("a", 10.0, present=False)]
    fail(one, 10.0)
    seen += [one.status("a", now, present=True) for now in (10.5, 11.5)]
    assert [(each.state, each.ejections) for each in seen] == [
        ("in_service", 0),
        ("out_of_service", 0),
        ("ejected", 1),
        ("on_trial", 1),
    ]
