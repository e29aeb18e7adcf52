from __future__ import annotations

import msgspec
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
    """Start so many batches on the replica."""
    while one.running > batches:
        one.end(one._leases[0], 0.0)
    while one.running < batches:
        one.start(0.0)


def test_free_means_a_slot_and_a_live_engine() -> None:
    """A replica is not free if all slots are taken, it is paused, or its engine is not ready."""
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
    """Pauses are 1 s, 2 s, 4 s ... 30 s; a success makes the next one short again."""
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
    """Several slots that fail at the same time do not double the pause."""
    one, _ = replica(slots=3)
    for late in (0.0, 0.0, 0.5):
        one.mark_unreachable(50.0 + late)
    assert one.is_usable(50.0 + FIRST_PAUSE_S)
    one.mark_unreachable(60.0)
    assert not one.is_usable(60.0 + 2 * FIRST_PAUSE_S - 0.001)
    assert one.is_usable(60.0 + 2 * FIRST_PAUSE_S)


def test_a_busy_replica_is_paused_but_not_lost() -> None:
    """A busy replica pauses for the time it named, else 0.1 s; requests are still admitted, and it is tried again
    afterwards."""
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
def test_idle_cores_count_parallel_slots(parallel: int, idle: list[int]) -> None:
    """Slots beyond the parallel ones only queue; the result is never negative."""
    one, _ = replica(slots=3, parallel=parallel)
    seen = []
    for running in (0, 2, 3):
        run(one, running)
        seen.append(one.idle_cores())
    assert seen == idle


def test_load_orders_by_the_first_answer() -> None:
    """A slower or busier replica comes later."""
    fast, _ = replica(slots=2)
    slow = Replica(FakeEngine(FakeScript(delay_ms=1, token_us=100)))
    assert fast.load() < slow.load()
    before = fast.load()
    run(fast, 1)
    assert fast.load() == pytest.approx(2 * before)


@pytest.mark.parametrize(("parallel", "starts"), [(1, [0.0, 3.0, 5.0]), (2, [0.0, 1.0, 3.0]), (0, [0.0, 1.0, 2.0])])
def test_a_batch_begins_when_one_before_it_ends(parallel: int, starts: list[float]) -> None:
    """Three batches on so many cores; the first ends at 3, the second at 5."""
    one, _ = replica(slots=3, parallel=parallel)
    turns = [one.start(now) for now in (0.0, 1.0, 2.0)]
    one.end(turns[0], 3.0)
    one.end(turns[1], 5.0)
    assert [turn.started for turn in turns] == starts
    one.end(turns[2], 9.0)
    assert one.start(9.5).started == 9.5


def test_cost_is_learned() -> None:
    """Facts state the learned cost instead of the engine's own once batches ran."""
    one, engine = replica()
    assert one.facts.cost == engine.facts.cost
    for _ in range(200):
        one.record_batch(32, 0.1)
        one.record_batch(1024, 0.2)
    assert one.facts.cost.seconds(1024) == pytest.approx(0.2, rel=0.05)


def test_memory_is_remembered_as_half_of_what_failed() -> None:
    """The smallest failure counts, a later larger one does not raise the limit, and the minimum is one token."""
    one, _ = replica()
    seen = []
    for tokens in (1000, 400, 10_000, 1, 1):
        one.shrink(tokens)
        seen.append(one.facts.max_batch_tokens)
    assert seen == [500, 200, 100, 1, 1]


def test_the_stated_limit_applies_until_memory_runs_out() -> None:
    """The engine's stated limit applies until a failure lowers it."""
    one, engine = replica()
    engine.facts = msgspec.structs.replace(engine.facts, max_batch_tokens=700)
    assert one.facts.max_batch_tokens == 700
    one.shrink(600)
    assert one.facts.max_batch_tokens == 300


def test_facts_that_an_engine_changes_are_taken_over() -> None:
    """New slots or a new warm-up replace the known facts; an equal cost model keeps what was learned."""
    one, engine = replica()
    for _ in range(200):
        one.record_batch(32, 0.1)
    learnt = one.facts.cost
    engine.facts = msgspec.structs.replace(engine.facts, slots=4)
    assert (one.facts.slots, one.facts.cost) == (4, learnt)
    run(one, 3)
    assert one.is_free(0.0)
    engine.facts = msgspec.structs.replace(engine.facts, cost=CostModel(0.5, 0.5))
    assert one.facts.cost == CostModel(0.5, 0.5)


def test_facts_are_made_once_between_batches() -> None:
    """The planner asks often; equal facts are the same object."""
    one, _ = replica()
    first: EngineFacts = one.facts
    assert one.facts is first
    one.record_batch(32, 0.1)
    assert one.facts is not first
