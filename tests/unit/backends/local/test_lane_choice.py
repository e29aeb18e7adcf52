"""Where lone batches run, by measured times."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.local import compile as compile_module
from shoal.backends.local.lane_choice import COST, ENOUGH, LONGEST_WAIT, RECENT, RUNS, LaneChoice

CORRECTED = ENOUGH * (RECENT + 1)
"""Lone batches within which a clearly faster lane is found that nothing spoke against."""


def run(choice: LaneChoice, batches: int, wide: float, narrow: float, tokens: int = 16) -> list[bool]:
    """Run lone batches that take so long on the two lanes; return which of them ran wide."""
    return run_noisy(choice, batches, lambda: wide, lambda: narrow, tokens)


def run_noisy(
    choice: LaneChoice, batches: int, wide: Callable[[], float], narrow: Callable[[], float], tokens: int = 16
) -> list[bool]:
    lanes = []
    for _ in range(batches):
        is_wide = choice.find(tokens).choose()
        choice.find(tokens).record(is_wide, wide() if is_wide else narrow())
        lanes.append(is_wide)
    return lanes


def compare(choice: LaneChoice, wide: float, narrow: float, tokens: int = 16) -> None:
    """Record the comparison of the idle lanes."""
    for _ in range(RUNS):
        choice.find(tokens).record(True, wide)
        choice.find(tokens).record(False, narrow)


def switches(lanes: Sequence[bool]) -> int:
    """Count changes of the present lane; trials, which are single, are none."""
    present = [lane for lane, after in pairwise(lanes) if lane == after]
    return sum(lane != after for lane, after in pairwise(present))


def test_lone_batches_run_wide_until_measured() -> None:
    choice = LaneChoice()
    assert all(choice.find(tokens).choose() for tokens in (1, 8, 100, 512, 4096))


def test_a_length_decides_for_sizes_that_have_not_run() -> None:
    """Short texts run narrow and long ones wide if that is what was measured."""
    choice = LaneChoice()
    compare(choice, 2.0, 1.0, 16)
    compare(choice, 1.0, 2.0, 64)
    compare(choice, 1.0, 2.0, 256)
    assert [choice.find(tokens).choose() for tokens in (1, 8, 16, 31, 64, 100, 256, 4096)] == [False] * 4 + [True] * 4


@pytest.mark.parametrize("is_wide_faster", [True, False])
def test_a_wrong_comparison_is_corrected_by_lone_batches(is_wide_faster: bool) -> None:
    """Within few trials, the first of which waits as long as the comparison justifies."""
    choice = LaneChoice()
    times = (1.0, 1.6) if is_wide_faster else (1.6, 1.0)
    compare(choice, *times[::-1])
    assert choice.find(16).choose() != is_wide_faster
    run(choice, round(0.6 / COST) + CORRECTED, *times)
    assert run(choice, RECENT, *times).count(is_wide_faster) >= RECENT - 1


def test_without_a_comparison_lone_batches_find_the_lane() -> None:
    choice = LaneChoice()
    lanes = run(choice, CORRECTED + 5, 1.6, 1.0)
    assert lanes[CORRECTED:] == [False] * 5


@given(st.floats(1.2, 20.0))
def test_the_lane_follows_when_the_machine_changes(slower: float) -> None:
    """However much slower the other lane was, the next trial comes after LONGEST_WAIT batches at the latest."""
    choice = LaneChoice()
    run(choice, 1000, slower, 1.0)
    run(choice, LONGEST_WAIT + CORRECTED, 1.0, slower)
    assert run(choice, RECENT, 1.0, slower).count(False) <= 1


@given(st.floats(1.2, 3.5), st.integers(1, 2000))
def test_trials_of_a_slower_lane_add_little_time(slower: float, batches: int) -> None:
    """After a first trial they stay within COST, from both sides."""
    for wide, narrow in ((1.0, slower), (slower, 1.0)):
        choice = LaneChoice()
        compare(choice, wide, narrow)
        lanes = run(choice, batches, wide, narrow)
        spent = sum(wide if lane else narrow for lane in lanes)
        assert spent <= batches * (1.0 + COST) + slower


@pytest.mark.parametrize("slower", [1.0, 1.05, 1.4, 1.7])
def test_noise_changes_little(slower: float) -> None:
    """Times that scatter by 15 %, of which each tenth takes three times as long: a lane that is clearly better stays,
    and about equal ones rarely change places. Trials cost less than 2 % of the time."""
    random_source = random.Random(7)

    def scatter(time: float) -> float:
        return time * random_source.lognormvariate(0.0, 0.15) * (3.0 if random_source.random() < 0.1 else 1.0)

    choice = LaneChoice()
    compare(choice, 1.0, slower)
    lanes = run_noisy(choice, 20_000, lambda: scatter(1.0), lambda: scatter(slower))
    assert switches(lanes) <= (0 if slower >= 1.4 else 200)
    assert sum(1.0 if lane else slower for lane in lanes) < 1.02 * len(lanes) * (1.0 if slower >= 1.4 else slower)


def test_single_outliers_decide_nothing() -> None:
    """Two trials that seem much faster, among slower ones, change nothing."""
    choice = LaneChoice()
    compare(choice, 1.0, 1.6)
    for time in (0.1, 0.1, 1.6, 1.6):
        choice.find(16).record(True, 1.0)
        choice.find(16).record(False, time)
        assert choice.find(16).choose()


def test_sizes_decide_for_themselves() -> None:
    """Long texts stay wide while short ones go narrow."""
    choice = LaneChoice()
    for _ in range(CORRECTED):
        run(choice, 1, 1.6, 1.0, 16)
        run(choice, 1, 1.0, 1.6, 256)
    assert (choice.find(16).choose(), choice.find(256).choose()) == (False, True)


def test_failed_trials_are_not_repeated_at_once() -> None:
    """A trial that fails is not recorded, and the next one comes as late as after any other."""
    choice = LaneChoice()
    lanes = []
    for _ in range(10 * (RECENT + 1)):
        lanes.append(choice.find(16).choose())
        if lanes[-1]:
            choice.find(16).record(True, 1.0)
    assert lanes.count(False) == 10


def test_large_graphs_have_a_wide_lane_where_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wide lane's copy of the weights takes at most a sixteenth of the free memory, or 256 MB."""
    monkeypatch.setattr(compile_module, "available_bytes", lambda: 16 * 2**30)
    assert compile_module.fits_wide(2**30)
    assert not compile_module.fits_wide(2**30 + 1)
    monkeypatch.setattr(compile_module, "available_bytes", lambda: 0)
    assert compile_module.fits_wide(256 * 2**20)
    assert not compile_module.fits_wide(256 * 2**20 + 1)
