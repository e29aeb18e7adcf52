"""A lane with a replica that fails fast, which would attract nearly all the work."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from shoal.backends.fake.model import FakeEngine, FakeScript
from shoal.core.protocols import Tensors
from shoal.core.scheduling.ejection import FIRST_PAUSE_S, MAX_FAILURES
from shoal.core.scheduling.lane import Lane
from shoal.core.scheduling.retries import RETRY_RESERVE, RetryBudget
from shoal.errors import EngineFailed, InputRejected, ShoalError, UpstreamFailed
from shoal.types import Array
from tests.unit.core.conftest import Run, gathered, until
from tests.unit.core.lanes import Reports, context, embed, engine, make_lane, right
from tests.unit.core.scheduling.test_lane import idle

SLOW = FakeScript(delay_ms=20, max_batch_size=4)


def breaks(one: FakeEngine, error: ShoalError | None = None) -> list[int]:
    """Make every call fail within a millisecond; return the list that records the calls."""
    calls: list[int] = []

    async def infer(
        inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        calls.append(len(next(iter(inputs.values()))))
        await asyncio.sleep(0.001)
        raise error or UpstreamFailed("status 500")

    one.infer = infer  # type: ignore[method-assign]
    return calls


def mend(one: FakeEngine) -> None:
    del one.infer


def states(lane: Lane) -> list[str]:
    return [each.state for each in lane.status()]


async def load(lane: Lane, requests: int, every_s: float = 0.004) -> list[Any]:
    """Send requests of one text at a fixed interval."""
    calls = []
    for number in range(requests):
        calls.append(asyncio.create_task(lane.run(embed(f"text {number}"), context())))
        await asyncio.sleep(every_s)
    return await gathered(*calls)


def test_one_of_two_that_fails_fast_is_ejected_and_nobody_notices(virtual: Run[None]) -> None:
    """In a second of load no request fails, and the broken replica gets only the calls that show that it is broken."""

    async def main() -> None:
        reports = Reports()
        lane = make_lane(SLOW, SLOW, observer=reports)
        broken = breaks(engine(lane, 0))
        outcomes = await load(lane, 240)
        for number, outcome in enumerate(outcomes):
            assert right(outcome, [f"text {number}"])
        assert len(broken) <= MAX_FAILURES + 2
        assert states(lane)[1] == "in_service"
        assert lane.status()[0].ejections >= 1
        await until(lambda: idle(lane))

    virtual(main)


def test_it_is_tried_again_with_one_batch_at_a_time_and_comes_back(virtual: Run[None]) -> None:
    async def main() -> None:
        lane = make_lane(SLOW, SLOW)
        broken = breaks(engine(lane, 0))
        await load(lane, 30)
        assert states(lane) == ["ejected", "in_service"]
        before = len(broken)
        await asyncio.sleep(FIRST_PAUSE_S)
        assert states(lane) == ["on_trial", "in_service"]
        outcomes = await load(lane, 30)
        assert len(broken) == before + 1
        assert not [each for each in outcomes if isinstance(each, Exception)]
        mend(engine(lane, 0))
        await asyncio.sleep(2 * FIRST_PAUSE_S)
        await load(lane, 30)
        assert states(lane) == ["in_service", "in_service"]
        assert engine(lane, 0).batches

    virtual(main)


def test_it_comes_back_under_little_load_too(virtual: Run[None]) -> None:
    """With one request at a time and a faster replica free, the ejected one is tried nevertheless, and answers when the
    other one fails."""

    async def main() -> None:
        lane = make_lane(SLOW, FakeScript(delay_ms=5, max_batch_size=4))
        breaks(engine(lane, 0))
        await load(lane, 60)
        assert states(lane) == ["ejected", "in_service"]
        mend(engine(lane, 0))
        await asyncio.sleep(FIRST_PAUSE_S)
        assert right(await lane.run(embed("a"), context()), ["a"])
        await until(lambda: states(lane) == ["in_service", "in_service"])
        broken = breaks(engine(lane, 1))
        for number in range(4 * MAX_FAILURES):
            assert right(await lane.run(embed(f"b {number}"), context()), [f"b {number}"])
        assert len(broken) == MAX_FAILURES

    virtual(main)


def test_a_replica_that_fails_its_trial_loses_no_request(virtual: Run[None]) -> None:
    """The trial request is answered by the other replica, and the pauses grow."""

    async def main() -> None:
        lane = make_lane(SLOW, FakeScript(delay_ms=5, max_batch_size=4))
        broken = breaks(engine(lane, 0))
        await load(lane, 60)
        before = len(broken)
        for number in range(80):
            assert right(await lane.run(embed(f"text {number}"), context()), [f"text {number}"])
            await asyncio.sleep(FIRST_PAUSE_S / 8)
        assert len(broken) == before + 3  # after about 1, 3 and 7 s

    virtual(main)


def test_all_ejected_take_turns(virtual: Run[None]) -> None:
    """When the slower replica recovers, it answers at least one of two requests, and then all."""

    async def main() -> None:
        lane = make_lane(SLOW, FakeScript(delay_ms=5, max_batch_size=4))
        for number in (0, 1):
            breaks(engine(lane, number))
            for _ in range(MAX_FAILURES):
                lane.replicas[number].ejection.record_failure(asyncio.get_running_loop().time())
        assert states(lane) == ["ejected", "ejected"]
        mend(engine(lane, 0))
        first = await gathered(*[lane.run(embed("a"), context())])
        second = await gathered(*[lane.run(embed("b"), context())])
        assert [isinstance(each, Exception) for each in (*first, *second)].count(True) <= 1
        for number in range(10):
            assert right(await lane.run(embed(f"text {number}"), context()), [f"text {number}"])

    virtual(main)


def test_all_bad_means_all_are_used(virtual: Run[None]) -> None:
    """No ejection is final: as soon as the replicas answer, so do the requests."""

    async def main() -> None:
        lane = make_lane(SLOW, SLOW)
        for number in (0, 1):
            breaks(engine(lane, number))
        assert all(isinstance(each, UpstreamFailed) for each in await load(lane, 60))
        assert lane.ready()
        for number in (0, 1):
            mend(engine(lane, number))
        assert right(await lane.run(embed("a"), context()), ["a"])

    virtual(main)


def test_two_of_three_bad(virtual: Run[None]) -> None:
    """An item that failed on two replicas is answered by the third once both are known to fail."""

    async def main() -> None:
        lane = make_lane(SLOW, SLOW, SLOW)
        for number in (0, 1):
            breaks(engine(lane, number))
        outcomes = await load(lane, 200, 0.008)
        failed = [number for number, each in enumerate(outcomes) if isinstance(each, Exception)]
        assert len(failed) <= 4 * MAX_FAILURES
        assert not failed or max(failed) < 60
        assert states(lane)[2] == "in_service"

    virtual(main)


def test_a_bad_item_ejects_nobody(virtual: Run[None]) -> None:
    """A bad item that is sent again and again fails alone, and both replicas stay in service."""

    async def main() -> None:
        lane = make_lane(SLOW, SLOW)
        texts = [f"text {number}" if number % 4 else f"poison-item {number}" for number in range(200)]
        calls = []
        for text in texts:
            calls.append(asyncio.create_task(lane.run(embed(text), context())))
            await asyncio.sleep(0.01)
        for text, outcome in zip(texts, await gathered(*calls), strict=True):
            assert isinstance(outcome, EngineFailed) if text.startswith("poison") else right(outcome, [text])
        assert [each.ejections for each in lane.status()] == [0, 0]

    virtual(main)


@pytest.mark.parametrize("inputs", [1, 3])
def test_an_input_error_is_not_tried_elsewhere(virtual: Run[None], inputs: int) -> None:
    """An input that a server refuses by name costs one call, and is no failure of the replica."""

    async def main() -> None:
        lane = make_lane(SLOW, SLOW)
        refused = [breaks(engine(lane, number), InputRejected("no")) for number in (0, 1)]
        for _ in range(8):
            with pytest.raises(InputRejected):
                await lane.run(embed("a"), context())
        assert sum(map(len, refused)) == 8
        assert [each.ejections for each in lane.status()] == [0, 0]

    virtual(main)


def test_a_retry_waits_for_the_other_replica_and_not_past_the_deadline(virtual: Run[None]) -> None:
    """The failed item waits for the other replica, busy with a long batch, and ends with 504 at its deadline."""

    async def main() -> None:
        lane = make_lane(SLOW, FakeScript(delay_ms=500))
        lane.replicas[0].mark_unreachable(asyncio.get_running_loop().time())
        long = asyncio.create_task(lane.run(embed("long"), context()))
        await asyncio.sleep(0.01)
        lane.replicas[0].record_batch(1, 0.02)
        broken = breaks(engine(lane, 0))
        patient, hasty = (asyncio.create_task(lane.run(embed(text), context(s))) for text, s in (("a", 9), ("b", 0.1)))
        begun = asyncio.get_running_loop().time()
        outcome = (await gathered(hasty))[0]
        assert getattr(outcome, "kind", "") == "deadline"
        assert right(await patient, ["a"])
        assert asyncio.get_running_loop().time() - begun == pytest.approx(0.99, abs=0.02)
        assert len(broken) == 1
        await long

    virtual(main)


def test_a_lone_replica_is_never_ejected(virtual: Run[None]) -> None:
    async def main() -> None:
        lane = make_lane(SLOW)
        breaks(engine(lane))
        for _ in range(3 * MAX_FAILURES):
            assert isinstance((await gathered(lane.run(embed("a"), context())))[0], UpstreamFailed)
        mend(engine(lane))
        assert right(await lane.run(embed("a"), context()), ["a"])
        assert lane.status()[0].ejections == 0

    virtual(main)


def test_the_budget_of_retries() -> None:
    """The budget starts full, gains one retry per five successful calls, and never exceeds its start."""
    budget = RetryBudget(2)
    assert [budget.spend() for _ in range(2 * int(RETRY_RESERVE) + 1)].count(True) == 2 * int(RETRY_RESERVE)
    for _ in range(5):
        budget.earn()
    assert (budget.spend(), budget.spend()) == (True, False)
    for _ in range(1000):
        budget.earn()
    assert [budget.spend() for _ in range(100)].count(True) == 2 * int(RETRY_RESERVE)
