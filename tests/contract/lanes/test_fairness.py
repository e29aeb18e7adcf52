"""The cost of bulk callers to interactive ones, and vice versa: the planner's promises, on a virtual clock.

Interactive callers send single texts at random times, whether or not earlier ones are answered; bulk callers send 2,048
inputs as soon as their last request is answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from shoal.backends.fake.model import FakeScript
from shoal.core.scheduling.fair_queue import WEIGHTS
from shoal.core.scheduling.planner import Limits
from tests.contract.lanes.traffic import Load, TrafficResult
from tests.unit.core.conftest import run_virtual
from tests.unit.core.lanes import make_lane

RATE = 30.0
SECONDS = 5.0
ALLOWED_RISE_MS = Limits().max_batch_ms + 10
BULK_KEEPS = 0.75

BULKS = {
    "one": ["bulk"],
    "32 of one client": ["bulk"] * 32,
    "32 clients": [f"bulk {number}" for number in range(32)],
    "one, behind the same proxy": ["people"],
    "32, behind the same proxy": ["people"] * 32,
}
ENGINES = {
    "small": FakeScript(delay_ms=1, token_us=60),
    "small, 2 slots": FakeScript(delay_ms=1, token_us=60, slots=2),
    "dear calls": FakeScript(delay_ms=4, token_us=40),
    "dear calls, 2 slots": FakeScript(delay_ms=5, token_us=40, slots=2),
    "2 slots, one computes": FakeScript(delay_ms=1, token_us=60, slots=2, parallel=1),
}
LENGTHS = {"alike": (16,), "mixed": (4, 16, 60, 100)}


def play(
    script: FakeScript, lengths: Sequence[int], *, rate: float = RATE, bulk: Sequence[str] = (), **limits: Any
) -> TrafficResult:
    async def main() -> TrafficResult:
        load = Load(make_lane(script, **limits), SECONDS, lengths).bulk(bulk)
        return await (load.interactive(rate) if rate else load).run()

    return run_virtual(main)


@cache
def alone(engine: str, lengths: str) -> tuple[TrafficResult, TrafficResult]:
    """(interactive traffic without bulk, one bulk caller without interactive traffic)."""
    script, spread = ENGINES[engine], LENGTHS[lengths]
    return play(script, spread), play(script, spread, rate=0, bulk=["bulk"])


@pytest.mark.parametrize(
    ("lengths", "bulk"), [("alike", "one"), ("alike", "32 of one client"), *(("mixed", bulk) for bulk in BULKS)]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_bulk_and_interactive_callers_share_a_lane(engine: str, lengths: str, bulk: str) -> None:
    """The p99 of single texts rises by at most max_batch_ms + 10 ms, none is rejected, and bulk keeps three quarters of
    the rate that it has alone, in batches as long as the engine is best at."""
    people, solo = alone(engine, lengths)
    both = play(ENGINES[engine], LENGTHS[lengths], bulk=BULKS[bulk])
    assert both.refused == 0
    assert len(both.waits) > 0.7 * RATE * SECONDS
    assert both.p99_ms - people.p99_ms <= ALLOWED_RISE_MS
    assert both.bulk_rate >= BULK_KEEPS * solo.bulk_rate


def test_a_shorter_batch_time_is_a_shorter_wait() -> None:
    """The promise follows the setting: with max_batch_ms at 10 the rise is at most 20 ms."""
    script = ENGINES["small"]
    people = play(script, (16,), max_batch_ms=10.0)
    both = play(script, (16,), bulk=["bulk"], max_batch_ms=10.0)
    assert both.p99_ms - people.p99_ms <= 20


def test_a_flood_of_single_texts_does_not_starve_bulk() -> None:
    """With twice as many single texts as the engine can process, bulk still gets its weight's share of it."""
    script = ENGINES["small"]
    _, solo = alone("small", "alike")
    flooded = play(script, (16,), rate=2000.0, bulk=["bulk"])
    share = 1 / (1 + WEIGHTS["interactive"])
    assert flooded.bulk_rate == pytest.approx(share * solo.bulk_rate, rel=0.3)


def test_a_full_queue_still_has_room_for_single_texts() -> None:
    """When bulk callers fill their part of the queue, single texts are still accepted."""
    both = play(ENGINES["small"], (16,), bulk=BULKS["32 clients"], max_items=4 * 2048)
    assert both.refused == 0
    assert both.bulk_items > 0
