"""Identical texts of several requests are computed once, and no request waits in another client's queue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal.backends.fake.model import FakeEngine, FakeScript
from shoal.errors import TransportFailed
from shoal.types import Array
from tests.unit.core.conftest import Run, gathered, until
from tests.unit.core.lanes import Reports, context, embed, engine, make_lane, right
from tests.unit.core.scheduling.test_lane import idle

SLOW = FakeScript(delay_ms=20, max_batch_size=8)


def test_no_request_waits_in_another_clients_queue(virtual: Run[None]) -> None:
    """A text deep in another client's backlog is answered as soon as one that is not."""

    async def main() -> None:
        lane = make_lane(SLOW)
        backlog = [
            asyncio.create_task(lane.run(embed(*(f"t{row} {at}" for at in range(8))), context(client="a")))
            for row in range(100)
        ]
        await asyncio.sleep(0.1)
        loop, waits = asyncio.get_running_loop(), []
        for text in ("fresh", "t99 7"):
            begun = loop.time()
            assert right(await lane.run(embed(text), context(client="b")), [text])
            waits.append(loop.time() - begun)
        assert max(waits) < 0.061
        answers = await asyncio.gather(*backlog)
        assert all(right(answer, [f"t{row} {at}" for at in range(8)]) for row, answer in enumerate(answers))
        assert sum(size for size, _ in engine(lane).batches) == 801  # t99 7 was not computed again
        assert idle(lane)

    virtual(main)


def test_the_first_to_leave_the_queue_answers_them_all(virtual: Run[None]) -> None:
    """Identical texts of many callers take one row per batch, and every caller is answered."""

    async def main() -> None:
        lane = make_lane(SLOW)
        first = asyncio.create_task(lane.run(embed("blocker"), context()))
        await until(lambda: bool(engine(lane).running))
        calls = [
            asyncio.create_task(lane.run(embed("same", f"own {number}"), context(client=f"c{number}")))
            for number in range(20)
        ]
        answers = await asyncio.gather(*calls)
        assert all(right(answer, ["same", f"own {number}"]) for number, answer in enumerate(answers))
        await first
        assert sum(size for size, _ in engine(lane).batches) == 22
        assert idle(lane)

    virtual(main)


def test_joined_requests_survive_the_first_one(virtual: Run[None]) -> None:
    """The first caller may leave before or after the item left the queue."""

    async def main() -> None:
        lane = make_lane(SLOW)
        blocker = asyncio.create_task(lane.run(embed("blocker"), context()))
        await until(lambda: bool(engine(lane).running))
        first, goes, stays = (asyncio.create_task(lane.run(embed("same"), context(client=c))) for c in "abc")
        await until(lambda: lane.queue_size[0] == 3)
        first.cancel()
        await blocker
        await until(lambda: bool(engine(lane).running))
        goes.cancel()
        assert right(await stays, ["same"])
        assert [size for size, _ in engine(lane).batches] == [1, 1]
        assert idle(lane)

    virtual(main)


class Fails(FakeEngine):
    """An engine whose first calls raise these errors; None is a success."""

    def __init__(self, script: FakeScript, errors: list[Exception | None]) -> None:
        super().__init__(script)
        self.errors = errors
        self.calls = 0

    async def infer(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        self.calls += 1
        rows = await super().infer(*args, **kwargs)
        if self.errors and (error := self.errors.pop(0)):
            raise error
        return rows


def test_a_retried_item_shares_again(virtual: Run[None]) -> None:
    """A retried item cannot be joined while queued; the next identical item that leaves takes over its waiters and its
    attempts."""

    async def main() -> None:
        lane = make_lane(SLOW, SLOW)
        for replica in lane.replicas:
            replica.engine = Fails(SLOW, [TransportFailed("gone")])
        first = asyncio.create_task(lane.run(embed("same"), context(client="a")))
        await until(lambda: lane.replicas[0].running == 1)
        joined = asyncio.create_task(lane.run(embed("same"), context(client="b")))
        other = asyncio.create_task(lane.run(embed("other"), context(client="b")))
        await until(lambda: lane.replicas[1].running == 1)
        await asyncio.sleep(0.021)
        assert lane.queue_size[0] == 2  # both replicas have lost their batch
        late = asyncio.create_task(lane.run(embed("same"), context(client="a")))
        outcomes = await gathered(first, joined, other)
        assert not any(isinstance(outcome, BaseException) for outcome in outcomes)
        with pytest.raises(Exception, match="no replica"):
            await late
        assert idle(lane)

    virtual(main)


def test_attempts_are_counted_together(virtual: Run[None]) -> None:
    """An item that takes over a failed one does not get two more attempts."""

    async def main() -> None:
        lane = make_lane(SLOW)
        lane.replicas[0].engine = failing = Fails(SLOW, [None, *[TransportFailed("gone")] * 9])
        blocker = asyncio.create_task(lane.run(embed("blocker"), context()))
        await until(lambda: bool(engine(lane).running))
        calls = [asyncio.create_task(lane.run(embed("same"), context(client=c))) for c in "ab"]
        await until(lambda: lane.queue_size[0] == 2)
        list(lane._planner._arrivals)[1].attempts = 1
        await blocker
        outcomes = await gathered(*calls)
        assert all(isinstance(outcome, TransportFailed) for outcome in outcomes)
        assert failing.calls == 2
        assert idle(lane)

    virtual(main)


def test_times_are_those_of_each_request(virtual: Run[None]) -> None:
    """A request that joins a running batch has no queue time, and its engine time starts when it arrives."""

    async def main() -> None:
        reports = Reports()
        lane = make_lane(FakeScript(delay_ms=100), observer=reports)
        first = asyncio.create_task(lane.run(embed("same"), context()))
        await asyncio.sleep(0.07)
        joined = await lane.run(embed("same"), context(client="b"))
        assert joined.facts.queue_ms == 0.0
        assert joined.facts.infer_ms == pytest.approx(30.0, abs=0.5)
        assert (await first).facts.infer_ms == pytest.approx(100.0, abs=0.5)
        blocker = asyncio.create_task(lane.run(embed("blocker"), context()))
        await asyncio.sleep(0.01)
        early = asyncio.create_task(lane.run(embed("late"), context(client="a")))
        await asyncio.sleep(0.06)
        late = await lane.run(embed("late"), context(client="b"))
        assert late.facts.queue_ms == pytest.approx(30.0, abs=0.5)
        assert (await early).facts.queue_ms == pytest.approx(90.0, abs=0.5)
        await blocker

    virtual(main)
