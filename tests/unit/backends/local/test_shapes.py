"""Shape buckets, warm-up order and the fitted cost model."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.local.shapes import Shape, WarmUp, fit_cost, is_probe, ladder, length_buckets, shapes, size_buckets
from shoal.core.protocols import CostModel


def test_the_buckets_of_the_default_limits() -> None:
    """Buckets match the documentation: lengths grow by at most an eighth, sizes by a quarter."""
    short = (8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64)
    assert length_buckets(144) == (*short, 72, 80, 88, 96, 104, 112, 120, 128, 144)
    assert size_buckets(64) == (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)


@given(first=st.integers(1, 64), step=st.integers(1, 8), last=st.integers(1, 10_000), parts=st.sampled_from([4, 8]))
def test_a_ladder_ends_at_its_last_and_wastes_little(first: int, step: int, last: int, parts: int) -> None:
    """Rungs ascend to exactly `last`, and each step is at most the fraction or the minimum step."""
    rungs = ladder(first, step, last, parts)
    assert rungs[-1] == last
    assert rungs[0] == min(first, last)
    assert all(low < high <= max(low * (1 + 1 / parts), low + step) for low, high in pairwise(rungs))


def test_long_texts_are_padded_by_less_than_64_tokens() -> None:
    lengths = length_buckets(8192)
    assert lengths[-1] == 8192
    assert max(high - low for low, high in pairwise(lengths)) == 64
    assert len(lengths) < 170


def test_the_fit_counts_the_work_of_attention() -> None:
    """Times of an engine whose attention is quadratic are on one line."""
    warm = WarmUp([Shape(1, 8), Shape(1, 64), Shape(4, 512)], 10.0, 1 / 1000)
    while (shape := warm.next()) is not None:
        warm.record(shape, [1.0, 0.001 + 0.0001 * shape.tokens * (1 + shape.length / 1000)])
    assert warm.cost.fixed == pytest.approx(0.001)
    assert warm.cost.seconds(warm.cost.work(8192, 8192)) == pytest.approx(0.001 + 0.8192 * 9.192)


def test_shapes_come_cheapest_first_within_the_limit() -> None:
    """All pairs of size and length within the token limit are listed, fewest tokens first."""
    found = shapes((8, 16), (1, 2, 4), 32)
    assert found == [Shape(1, 8), Shape(1, 16), Shape(2, 8), Shape(2, 16), Shape(4, 8)]


@given(
    fixed=st.floats(0, 0.01),
    per_token=st.floats(1e-7, 1e-3),
    tokens=st.sets(st.integers(1, 4096), min_size=2, max_size=20),
)
def test_the_fit_finds_a_line(fixed: float, per_token: float, tokens: set[int]) -> None:
    """Linear times are fitted exactly."""
    fitted = fit_cost([(count, fixed + per_token * count) for count in tokens])
    for count in tokens:
        assert fitted.seconds(count) == pytest.approx(fixed + per_token * count, rel=1e-3)


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-6, 10)), min_size=1, max_size=20))
def test_the_fit_is_never_negative(samples: list[tuple[int, float]]) -> None:
    """For any times, neither coefficient is negative, and the cost of a batch is above zero."""
    fitted = fit_cost(samples)
    assert fitted.fixed >= 0
    assert fitted.per_token >= 0
    assert fitted.seconds(64) > 0


def test_small_batches_count_as_much_as_large_ones() -> None:
    """10% noise on large batches does not hide the cost of a small one."""
    fitted = fit_cost([(8, 0.0018), (16, 0.0026), (2048, 0.2058 * 0.9), (4096, 0.4106 * 1.1)])
    assert fitted.seconds(8) == pytest.approx(0.0018, rel=0.05)


def test_without_samples_the_cost_is_the_model_s_own_guess() -> None:
    """Without samples the cost model is the default."""
    assert fit_cost([]) == CostModel()


def run_all(warm: WarmUp, cost: CostModel) -> list[Shape]:
    order = []
    while (shape := warm.next()) is not None:
        order.append(shape)
        seconds = cost.seconds(shape.tokens)
        warm.record(shape, [seconds + 0.005] + [seconds, seconds * 1.5] * is_probe(shape))
    return order


def test_warming_probes_first_then_goes_from_cheap_to_dear() -> None:
    """Probes come first; probes and other shapes both ascend in cost; each shape is returned once."""
    plan = shapes(length_buckets(64), size_buckets(16), 1024)
    order = run_all(WarmUp(plan, 10.0), CostModel(0.001, 0.0001))
    probes = [shape for shape in order if is_probe(shape)]
    assert sorted(order) == sorted(plan)
    assert order[: len(probes)] == probes
    assert [s.tokens for s in probes] == sorted(s.tokens for s in probes)
    rest = [shape.tokens for shape in order[len(probes) :]]
    assert rest == sorted(rest)


def test_warming_stops_at_the_time_limit() -> None:
    """Only shapes with a predicted time over the limit are skipped."""
    plan = shapes(length_buckets(512), size_buckets(64), 16384)
    warm = WarmUp(plan, 0.040)
    order = run_all(warm, CostModel(0.001, 0.0001))
    assert {shape.tokens <= 390 for shape in order if not is_probe(shape)} == {True}
    assert set(order) >= {shape for shape in plan if shape.tokens < 380}
    assert warm.done == len(order)


def test_the_first_probe_of_a_huge_model_is_the_last() -> None:
    """If the smallest batch exceeds the limit, it is the only shape run."""
    plan = shapes(length_buckets(512), size_buckets(64), 16384)
    assert run_all(WarmUp(plan, 0.040), CostModel(0.0, 0.1)) == [Shape(1, 8)]


def test_the_first_run_of_a_shape_teaches_nothing() -> None:
    """The first run, which compiles kernels, does not count in the cost."""
    warm = WarmUp([Shape(1, 8), Shape(1, 16)], 10.0)
    warm.record(Shape(1, 8), [9.0, 0.002, 0.003])
    warm.record(Shape(1, 16), [9.0, 0.003])
    warm.record(Shape(3, 8), [9.0])
    assert warm.cost.seconds(24) == pytest.approx(0.004)
