"""The predicted time of queued work."""

from __future__ import annotations

import pytest

from shoal.core.protocols import CostModel, EngineFacts
from shoal.core.scheduling.drain_rate import LEAST_BATCHES, DrainRate, FinishedBatch
from shoal.core.scheduling.planner import Limits

COST = CostModel(0.01, 0.0001, efficient_tokens=300)
FACTS = EngineFacts(name="a", inputs=(), outputs=(), cost=COST, max_batch_size=16)


def drained(rate: DrainRate, seconds: float, *, items: int = 4, padding: float = 1.0, full: bool = False) -> None:
    """Run batches of texts of 50 tokens one after the other, each ending after so many seconds."""
    padded = round(50 * items * padding)
    batch = FinishedBatch(FACTS, items, 50 * items, padded, padded, full)
    for number in range(60):
        rate.record_batch(seconds * number, batch, 1, saturated=True)


def test_nothing_is_known_before_some_batches_ended_under_load() -> None:
    rate = DrainRate(Limits())
    batch = FinishedBatch(FACTS, 1, 50, 50, 50, False)
    for number in range(10):
        rate.record_batch(float(number), batch, 1, saturated=False)
    assert not rate.is_known
    for number in range(LEAST_BATCHES + 1):
        assert not rate.is_known
        rate.record_batch(10.0 + number, batch, 1, saturated=True)
    assert rate.is_known


def test_the_cost_of_full_batches() -> None:
    """40 ms hold 300 tokens, or 6 texts of 50: 80 items take 13.3 batches."""
    rate = DrainRate(Limits())
    drained(rate, COST.seconds(200))
    assert rate.pace == pytest.approx(1.0)
    assert rate.predict(4000, 80, [FACTS]).seconds == pytest.approx(4000 / 300 * 0.04)
    assert rate.predict(50, 1, [FACTS]).seconds == pytest.approx(COST.seconds(50))
    assert rate.predict(4000, 80, [FACTS, FACTS]).seconds == pytest.approx(4000 / 600 * 0.04)
    assert rate.predict(4000, 80, []).seconds == 0.0


def test_lone_requests_do_not_make_the_lane_look_slow() -> None:
    """Batches of one are a quarter as efficient as full ones, but queued items run in full batches."""
    rate = DrainRate(Limits())
    drained(rate, COST.seconds(50), items=1)
    assert rate.predict(4000, 80, [FACTS]).seconds == pytest.approx(4000 / 300 * 0.04)


def test_slower_batches_raise_the_prediction() -> None:
    """Batches that take half as long again raise the prediction by half; full batches of fewer items count."""
    rate = DrainRate(Limits())
    drained(rate, 1.5 * COST.seconds(200))
    assert rate.predict(4000, 80, [FACTS]).seconds == pytest.approx(1.5 * 4000 / 300 * 0.04)
    rate = DrainRate(Limits())
    drained(rate, COST.seconds(100), items=2, full=True)
    assert rate.predict(4000, 80, [FACTS]).seconds == pytest.approx(40 * COST.seconds(100))


def test_padding_is_work() -> None:
    rate = DrainRate(Limits())
    drained(rate, COST.seconds(400), padding=2.0)
    assert rate.predict(4000, 80, [FACTS]).seconds == pytest.approx(8000 / 300 * 0.04, rel=0.01)


def test_items_and_tokens_bound_a_batch() -> None:
    """A call of 10 ms holds 16 short texts, or 100 tokens."""
    rate = DrainRate(Limits())
    assert rate.predict(320, 320, [FACTS]).seconds == pytest.approx(20 * COST.seconds(16))
    rate = DrainRate(Limits(max_batch_tokens=100))
    assert rate.predict(4000, 80, [FACTS]).seconds == pytest.approx(40 * COST.seconds(100))
