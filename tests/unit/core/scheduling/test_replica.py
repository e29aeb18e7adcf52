from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.backends.fake.model import FakeEngine, FakeScript
from shoal.core.protocols import CostModel, EngineFacts
from shoal.core.scheduling.ejection import FIRST_PAUSE_S, LONGEST_PAUSE_S
from shoal.core.scheduling.planner import LOOK_AGAIN_S
from shoal.core.scheduling.replica import BUSY_PAUSE_S, Replica


def replica(slots: int = 1, parallel: int = 0) -> tuple[Replica, FakeEngine]:
    engine = FakeEngine(FakeScript(delay_ms=1, token_us=20, slots=slots, parallel=parallel))
    return Replica(engine), engine


def run(one: Replica, batches: int) -> None:
    """So many batches are in flight there."""
    while one.running > batches:
        one.end(one._leases[0], 0.0)
    while one.running < batches:
        one.start(0.0)


def test_free_means_a_slot_and_a_live_engine() -> None:
    """Every slot taken, a pause or an engine that is not ready keeps work away."""
    one, engine = replica(slots=2)
    assert one.is_free(0.0)
    run(one, 1)
    assert one.is_free(0.0)
    run(one, 2)
    assert not one.is_free(0.0)
    assert one.is_usable(0.0)
    run(one, 0)
    engine.online = False
    assert not one.is_free(0.0)


def test_pauses_grow_while_a_replica_is_lost_and_end_with_a_batch() -> None:
    """1 s, 2 s, 4 s ... at most 30 s; an answer makes the next pause short again."""
    one, _ = replica()
    now, pause = 50.0, FIRST_PAUSE_S
    for _ in range(8):
        one.mark_unreachable(now)
        assert not one.is_usable(now + pause - 0.001)
        assert one.is_usable(now + pause)
        now, pause = now + pause, min(2 * pause, LONGEST_PAUSE_S)
    assert pause == LONGEST_PAUSE_S
    one.record_batch(32, 0.001)
    one.mark_unreachable(now)
    assert one.is_usable(now + FIRST_PAUSE_S)


def test_batches_that_are_lost_together_are_one_loss() -> None:
    """Several slots fail in the same moment: the pause is not doubled for each."""
    one, _ = replica(slots=3)
    for late in (0.0, 0.0, 0.5):
        one.mark_unreachable(50.0 + late)
    assert one.is_usable(50.0 + FIRST_PAUSE_S)
    one.mark_unreachable(60.0)
    assert not one.is_usable(60.0 + 2 * FIRST_PAUSE_S - 0.001)
    assert one.is_usable(60.0 + 2 * FIRST_PAUSE_S)


def test_a_busy_replica_is_left_alone_but_not_given_up() -> None:
    """No batch goes there for as long as it said, else for 0.1 s; requests may still come in, and it is asked again
    when that is over."""
    one, engine = replica(slots=2)
    one.pause(50.0, None)
    assert (one.is_free(50.0), one.is_usable(50.0)) == (False, True)
    assert one.next_check_s(50.0) == pytest.approx(BUSY_PAUSE_S)
    assert one.is_free(50.0 + BUSY_PAUSE_S)
    one.pause(51.0, 2.0)
    one.pause(51.5, 0.5)
    assert not one.is_free(52.999)
    assert one.is_free(53.0)
    one.pause(60.0, 1.0)
    one.mark_unreachable(60.5)
    assert one.next_check_s(60.5) == FIRST_PAUSE_S
    engine.online = False
    assert one.next_check_s(62.0) == LOOK_AGAIN_S
    run(one, 2)
    assert one.next_check_s(60.5) is None


@pytest.mark.parametrize(("parallel", "idle"), [(0, [3, 1, 0]), (1, [1, 0, 0]), (2, [2, 0, 0])])
def test_idle_cores_are_those_that_compute_side_by_side(parallel: int, idle: list[int]) -> None:
    """Slots beyond the parallel ones only queue; never negative."""
    one, _ = replica(slots=3, parallel=parallel)
    seen = []
    for running in (0, 2, 3):
        run(one, running)
        seen.append(one.idle_cores())
    assert seen == idle


def test_load_orders_by_who_answers_first() -> None:
    """A slower replica or a busier one stands behind."""
    fast, _ = replica(slots=2)
    slow = Replica(FakeEngine(FakeScript(delay_ms=1, token_us=100)))
    assert fast.load() < slow.load()
    before = fast.load()
    run(fast, 1)
    assert fast.load() == pytest.approx(2 * before)


@pytest.mark.parametrize(("parallel", "began"), [(1, [0.0, 3.0, 5.0]), (2, [0.0, 1.0, 3.0]), (0, [0.0, 1.0, 2.0])])
def test_a_batch_begins_when_one_before_it_ends(parallel: int, began: list[float]) -> None:
    """Three batches on so many cores, the first ends at 3, the second at 5."""
    one, _ = replica(slots=3, parallel=parallel)
    turns = [one.start(now) for now in (0.0, 1.0, 2.0)]
    one.end(turns[0], 3.0)
    one.end(turns[1], 5.0)
    assert [turn.started for turn in turns] == began
    one.end(turns[2], 9.0)
    assert one.start(9.5).started == 9.5


def test_cost_is_learnt() -> None:
    """Facts carry what batches took, not what was stated, once there are some."""
    one, engine = replica()
    assert one.facts.cost == engine.facts.cost
    for _ in range(200):
        one.record_batch(32, 0.1)
        one.record_batch(1024, 0.2)
    assert one.facts.cost.seconds(1024) == pytest.approx(0.2, rel=0.05)


def test_memory_is_remembered_as_half_of_what_failed() -> None:
    """The smallest failure counts, a later larger one does not raise the limit, and one token is the least."""
    one, _ = replica()
    seen = []
    for tokens in (1000, 400, 10_000, 1, 1):
        one.shrink(tokens)
        seen.append(one.facts.max_batch_tokens)
    assert seen == [500, 200, 100, 1, 1]


def test_own_limit_stands_until_memory_runs_out() -> None:
    """What the engine states is the limit; a failure narrows it."""
    one, engine = replica()
    engine.facts = replace(engine.facts, max_batch_tokens=700)
    assert one.facts.max_batch_tokens == 700
    one.shrink(600)
    assert one.facts.max_batch_tokens == 300


def test_facts_that_an_engine_changes_are_taken_over() -> None:
    """More slots or a new warm-up replace what was known; the same cost model keeps what was learnt."""
    one, engine = replica()
    for _ in range(200):
        one.record_batch(32, 0.1)
    learnt = one.facts.cost
    engine.facts = replace(engine.facts, slots=4)
    assert (one.facts.slots, one.facts.cost) == (4, learnt)
    run(one, 3)
    assert one.is_free(0.0)
    engine.facts = replace(engine.facts, cost=CostModel(0.5, 0.5))
    assert one.facts.cost == CostModel(0.5, 0.5)


def test_facts_are_made_once_between_batches() -> None:
    """The planner asks often; equal facts are the same object."""
    one, _ = replica()
    first: EngineFacts = one.facts
    assert one.facts is first
    one.record_batch(32, 0.1)
    assert one.facts is not first
