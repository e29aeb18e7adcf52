from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.protocols import EFFICIENCY, CostModel
from shoal.core.scheduling.cost import BATCHES_BETWEEN, LARGEST, OnlineCost, RateCurve

fixeds = st.floats(0.0001, 0.02)
slopes = st.floats(1e-6, 1e-3)


def test_begins_with_the_prior() -> None:
    """Before any batch the warm-up's model applies."""
    prior = CostModel(0.002, 0.00003)
    assert OnlineCost(prior).model is prior


@given(fixed=fixeds, slope=slopes, noise=st.floats(0, 0.1), seed=st.integers(0, 1000))
def test_fits_a_line_through_noise(fixed: float, slope: float, noise: float, seed: int) -> None:
    """After 300 batches of mixed sizes, predictions are within twice the noise, whatever the prior was."""
    chance = random.Random(seed)
    cost = OnlineCost(CostModel())
    for _ in range(300):
        tokens = chance.choice([16, 64, 256, 1024, 4096])
        cost.observe(tokens, (fixed + slope * tokens) * (1 + chance.uniform(-noise, noise)))
    for tokens in (64, 1024, 4096):
        assert cost.model.seconds(tokens) == pytest.approx(
            fixed + slope * tokens, rel=2 * noise + 0.05, abs=noise * slope * 4096
        )


@given(
    batches=st.lists(st.tuples(st.integers(1, 20000), st.floats(1e-6, 100.0)), max_size=60),
    fixed=fixeds,
    slope=slopes,
)
def test_never_negative(batches: list[tuple[int, float]], fixed: float, slope: float) -> None:
    """More tokens never cost less, and no cost is negative."""
    cost = OnlineCost(CostModel(fixed, slope))
    for tokens, seconds in batches:
        cost.observe(tokens, seconds)
        assert cost.model.fixed >= 0
        assert cost.model.per_token > 0
        assert cost.model.seconds(1) > 0


@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_follows_a_change_of_scale(factor: float) -> None:
    """A machine that becomes slower or faster is learned within about a hundred batches."""
    chance, truth = random.Random(1), CostModel(0.002, 0.00002)
    cost = OnlineCost(truth)
    for scale in (1.0, factor):
        for _ in range(150):
            tokens = chance.choice([32, 256, 2048])
            cost.observe(tokens, truth.seconds(tokens) * scale)
        for tokens in (32, 2048):
            assert cost.model.seconds(tokens) == pytest.approx(truth.seconds(tokens) * scale, rel=0.3)


def test_one_slow_batch_does_not_decide() -> None:
    """One batch of ten times the usual time moves predictions by less than half."""
    chance, truth = random.Random(1), CostModel(0.002, 0.00002)
    cost = OnlineCost(truth)
    for _ in range(200):
        tokens = chance.choice([32, 256, 2048])
        cost.observe(tokens, truth.seconds(tokens))
    cost.observe(256, truth.seconds(256) * 10)
    assert cost.model.seconds(256) == pytest.approx(truth.seconds(256), rel=0.5)


@pytest.mark.parametrize("factor", [3.0, 0.5])
def test_batches_of_one_size_move_the_scale_not_the_shape(factor: float) -> None:
    """Slope and offset cannot be separated, so both scale alike."""
    prior = CostModel(0.002, 0.00002)
    cost = OnlineCost(prior)
    for _ in range(600):
        cost.observe(512, prior.seconds(512) * factor)
    assert cost.model.seconds(512) == pytest.approx(prior.seconds(512) * factor, rel=0.05)
    before = cost.model.fixed / cost.model.per_token
    cost.observe(512, prior.seconds(512) * factor * 2)
    assert cost.model.fixed / cost.model.per_token == pytest.approx(before)
    assert cost.model.seconds(512) > prior.seconds(512) * factor


def test_a_cost_that_bends_upwards_keeps_its_mean() -> None:
    """If long batches cost more than in proportion, the offset is not negative and the line still meets the mean."""
    cost = OnlineCost(CostModel())
    for _ in range(300):
        cost.observe(64, 0.001)
        cost.observe(1024, 0.1)
    assert cost.model.fixed == pytest.approx(0, abs=1e-9)
    assert cost.model.seconds(544) == pytest.approx(0.0505, rel=0.05)


def curve_of(batches: dict[int, float], times: int = 8) -> RateCurve:
    """The curve after so many batches of each number of tokens, in seconds."""
    curve = RateCurve()
    for _ in range(times):
        for tokens, seconds in batches.items():
            curve.observe(tokens, seconds)
    return curve


def test_the_efficient_size_is_where_the_rate_stops_to_grow() -> None:
    """A call of 3 ms up to 1,024 tokens, in proportion beyond: 1,024 tokens are as good as more, and fewer are not."""
    curve = curve_of({tokens: 0.003 * max(1.0, tokens / 1024) for tokens in (64, 256, 512, 1024, 2048, 4096)})
    assert curve.efficient_tokens(CostModel(0.003, 0.003 / 1024)) == 1024


def test_sizes_that_never_ran_count_as_the_line_says() -> None:
    """Small batches only: the line promises more of larger ones, so they are tried."""
    line = CostModel(0.003, 0.00001)
    curve = curve_of({64: line.seconds(64)})
    promised = curve.efficient_tokens(line)
    assert promised >= EFFICIENCY / (1 - EFFICIENCY) * line.fixed / line.per_token / 1.5
    for _ in range(8):
        curve.observe(promised, promised * line.seconds(64) / 64)
    assert curve.efficient_tokens(line) != promised, "it kept no promise"


@given(
    batches=st.lists(st.tuples(st.integers(1, 100_000), st.floats(1e-6, 100.0)), max_size=60),
    fixed=fixeds,
    slope=slopes,
)
def test_the_efficient_size_is_one_of_the_sizes(batches: list[tuple[int, float]], fixed: float, slope: float) -> None:
    curve = RateCurve()
    for tokens, seconds in batches:
        curve.observe(tokens, seconds)
    assert curve.efficient_tokens(CostModel(fixed, slope)) in LARGEST


def test_only_batches_that_leave_no_core_idle_shape_the_curve() -> None:
    """A lone batch on an idle machine is faster than one beside others."""
    cost = OnlineCost(CostModel(0.001, 0.00001))
    for _ in range(4 * BATCHES_BETWEEN):
        cost.observe(64, 0.002)
    assert cost.model.efficient_tokens == 0
    for _ in range(BATCHES_BETWEEN):
        cost.observe(64, 0.002, saturated=True)
    assert cost.model.efficient_tokens > 0
