"""The lane when engines, pipelines or the event loop misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shoal.backends.fake.model import FakeEngine, FakePipeline, FakeScript, tokenize_item
from shoal.core.protocols import CountedRow, Prepared, Row, Tensors
from shoal.core.scheduling.lane import Lane
from shoal.errors import DeadlineExceeded, EngineFailed, InternalError, ShoalError, Unavailable
from shoal.types import Array, BatchTask
from shoal.types import Item as AnyItem
from tests.unit.core.conftest import Run, VirtualLoop, gathered, run_virtual, until
from tests.unit.core.lanes import Reports, context, embed, engine, make_lane, right
from tests.unit.core.scheduling.test_lane import idle

SLOW = FakeScript(delay_ms=10)


def test_item_past_its_deadline_does_not_run_after_a_stall(virtual: Run[None]) -> None:
    """After the loop stalls past the deadline, the item gets a 504 and no engine call."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        lane = make_lane(SLOW)
        before = asyncio.create_task(lane.run(embed("before"), context(9.0)))
        await until(lambda: engine(lane).running == 1)
        late = asyncio.create_task(lane.run(embed("late"), context(1.0)))
        fine = asyncio.create_task(lane.run(embed("fine"), context(9.0)))
        await until(lambda: lane.queue_size[0] == 2)
        loop._virtual.now += 2
        assert right(await before, ["before"])
        assert right(await fine, ["fine"])
        with pytest.raises(DeadlineExceeded):
            await late
        assert list(engine(lane).batches) == [(1, 1), (1, 1)]
        assert idle(lane)

    virtual(main)


def test_follower_with_more_time_outlives_its_leaders_deadline(virtual: Run[None]) -> None:
    """The running call ends at the first caller's deadline; the one that joined with more time is retried."""

    async def main() -> None:
        lane = make_lane(FakeScript(delay_ms=1000))
        leader = asyncio.create_task(lane.run(embed("same"), context(0.5)))
        await until(lambda: bool(engine(lane).running))
        follower = asyncio.create_task(lane.run(embed("same"), context(10)))
        outcomes = await gathered(leader, follower)
        assert isinstance(outcomes[0], DeadlineExceeded)
        assert right(outcomes[1], ["same"])
        assert len(engine(lane).batches) == 2
        assert idle(lane)

    virtual(main)


def test_engine_that_always_reports_lateness_is_not_tried_for_ever(virtual: Run[None]) -> None:
    """An engine that reports the deadline too early gets two attempts, then the error is final."""

    async def main() -> None:
        lane = make_lane(SLOW)

        async def late(
            inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
        ) -> dict[str, Array]:
            engine(lane).batches.append((1, 1))
            raise DeadlineExceeded("so it says")

        engine(lane).infer = late  # type: ignore[method-assign]
        with pytest.raises(DeadlineExceeded, match="so it says"):
            await lane.run(embed("a"), context())
        assert len(engine(lane).batches) == 2
        await until(lambda: idle(lane))

    virtual(main)


@pytest.mark.parametrize("count", [-1, 1])
def test_wrong_number_of_rows_is_the_engines_failure(
    virtual: Run[None], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that returns a row too few or too many fails those items, and never returns rows of others or hangs."""

    async def main() -> None:
        reports = Reports()
        lane = make_lane(SLOW, observer=reports)
        finish = lane.pipeline.finish

        def wrong(outputs: Tensors, batch: Sequence[Prepared]) -> list[Row | CountedRow | ShoalError]:
            rows = finish(outputs, batch)
            return [*rows, rows[0]][: len(rows) + count]

        with monkeypatch.context() as patch:
            patch.setattr(lane.pipeline, "finish", wrong)
            outcomes = await gathered(lane.run(embed("a"), context()), lane.run(embed("b"), context()))
        assert all(isinstance(outcome, EngineFailed) for outcome in outcomes)
        assert all(report.error for report in reports.batches)
        assert len(reports.batches) == len(engine(lane).batches)
        assert right(await lane.run(embed("a"), context()), ["a"])
        await until(lambda: reports.batches[-1].error is None)
        assert idle(lane)

    virtual(main)


def test_rows_that_do_not_fit_together_fail_their_batch(virtual: Run[None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different dimensions within a request are an InternalError, and the lane keeps working."""

    async def main() -> None:
        lane = make_lane(SLOW)
        finish = lane.pipeline.finish

        def ragged(outputs: Tensors, batch: Sequence[Prepared]) -> list[Row | CountedRow | ShoalError]:
            rows = finish(outputs, batch)
            return [row[: 10 + number] if isinstance(row, np.ndarray) else row for number, row in enumerate(rows)]

        with monkeypatch.context() as patch:
            patch.setattr(lane.pipeline, "finish", ragged)
            outcomes = await gathered(lane.run(embed("a", "b"), context()))
        assert isinstance(outcomes[0], InternalError)
        assert right(await lane.run(embed("c", "d"), context()), ["c", "d"])
        assert idle(lane)

    virtual(main)


def test_engine_that_turns_cancellation_into_an_error_has_no_effect(virtual: Run[None]) -> None:
    """When every caller has left, an error of the cancelled call has no effect and its slot is free."""

    async def main() -> None:
        lane = make_lane(SLOW)
        infer = engine(lane).infer

        async def grumbling(
            inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
        ) -> dict[str, Array]:
            try:
                return await infer(inputs, outputs, params, deadline)
            except asyncio.CancelledError:
                raise EngineFailed("interrupted") from None

        engine(lane).infer = grumbling  # type: ignore[method-assign]
        call = asyncio.create_task(lane.run(embed("a"), context()))
        await until(lambda: bool(engine(lane).running))
        call.cancel()
        assert isinstance((await gathered(call))[0], asyncio.CancelledError)
        await until(lambda: idle(lane))
        assert right(await lane.run(embed("b"), context()), ["b"])

    virtual(main)


def test_parts_of_a_failed_batch_keep_each_replicas_limit(virtual: Run[None]) -> None:
    """A batch that failed on a large replica is searched on a small one in batches that fit."""

    async def main() -> None:
        lane = make_lane(FakeScript(delay_ms=1, max_batch_size=32), FakeScript(delay_ms=40, max_batch_size=3))
        texts = [f"text {number}" for number in range(31)]
        texts.insert(20, "poison-item")
        large, small = engine(lane, 0), engine(lane, 1)
        small.online = False
        calls = [asyncio.create_task(lane.run(embed(text), context())) for text in texts]
        await until(lambda: bool(large.running))
        lane.replicas[1].ejection.record_success()
        lane.replicas[1]._unreachable_until = 0.0
        small.online = True
        outcomes = await gathered(*calls)
        for text, outcome in zip(texts, outcomes, strict=True):
            assert isinstance(outcome, EngineFailed) if text == "poison-item" else right(outcome, [text])
        assert small.batches
        assert max(size for size, _ in small.batches) <= 3
        assert max(size for size, _ in large.batches) == 32
        assert idle(lane)

    virtual(main)


class ByWord(FakePipeline):
    """Items that begin with "pooled" need a second output."""

    def prepare(self, items: Sequence[tuple[BatchTask, AnyItem]]) -> list[Prepared | ShoalError]:
        return [
            replace(one, outputs=("pooled", "embedding"))
            if isinstance(one, Prepared) and str(item).startswith("pooled")
            else one
            for one, (_, item) in zip(super().prepare(items), items, strict=True)
        ]


class RecordingEngine(FakeEngine):
    """Records the requested outputs."""

    def __init__(self) -> None:
        super().__init__(SLOW)
        self.wanted: list[tuple[str, ...]] = []

    async def infer(
        self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        self.wanted.append(tuple(outputs))
        return await super().infer(inputs, outputs, params, deadline)


def test_a_batch_requests_the_union_of_outputs(virtual: Run[None]) -> None:
    """A batch requests the union of its items' outputs, each once."""

    async def main() -> None:
        shown = make_lane(SLOW)
        lane = Lane(
            ByWord(SLOW),
            [recording := RecordingEngine()],
            shown.options,
            threads=shown._preparer._threads,
            clock=asyncio.get_running_loop().time,
        )
        texts = ["pooled a", "b", "pooled c"]
        await lane.run(embed("alone"), context())
        answers = await asyncio.gather(*(lane.run(embed(text), context()) for text in texts))
        assert all(right(answer, [text]) for answer, text in zip(answers, texts, strict=True))
        assert recording.wanted == [("embedding",), ("embedding", "pooled")]

    virtual(main)


def test_close_cancels_the_timer(virtual: Run[None]) -> None:
    """Closing a lane that lingers cancels its timer."""

    async def main() -> None:
        lane = make_lane(SLOW, max_wait_time_ms=1000)
        call = asyncio.create_task(lane.run(embed("a"), context()))
        await until(lambda: lane._timer is not None)
        timer = lane._timer
        assert timer is not None
        await lane.aclose()
        assert timer.cancelled()
        assert isinstance((await gathered(call))[0], Unavailable)
        assert not engine(lane).batches

    virtual(main)


def test_hundreds_of_cancelled_items_do_not_stall_the_lane(virtual: Run[None]) -> None:
    """When hundreds leave the queue, the next item runs as soon as the slot is free."""

    async def main() -> None:
        lane = make_lane(FakeScript(delay_ms=500, max_batch_size=1))
        blocker = asyncio.create_task(lane.run(embed("blocker"), context()))
        await asyncio.sleep(0.05)
        abandoned = [asyncio.create_task(lane.run(embed(f"gone {number}"), context())) for number in range(600)]
        await asyncio.sleep(0.05)
        stays = asyncio.create_task(lane.run(embed("stays"), context()))
        await asyncio.sleep(0.05)
        for each in abandoned:
            each.cancel()
        await blocker
        begun = asyncio.get_running_loop().time()
        assert right(await stays, ["stays"])
        assert asyncio.get_running_loop().time() - begun == pytest.approx(0.5, abs=0.01)

    virtual(main)


def test_a_replica_is_tried_again_while_another_one_works(virtual: Run[None]) -> None:
    """The pause ends by itself: queued items do not wait for a long batch on another replica."""

    async def main() -> None:
        lane = make_lane(FakeScript(delay_ms=60_000), FakeScript(delay_ms=10))
        loop = asyncio.get_running_loop()
        lane.replicas[1].mark_unreachable(loop.time())
        long = asyncio.create_task(lane.run(embed("long"), context(120)))
        await asyncio.sleep(0.1)
        begun = loop.time()
        assert right(await lane.run(embed("short"), context()), ["short"])
        assert loop.time() - begun == pytest.approx(0.91, abs=0.01)
        engine(lane, 1).online = False
        waiting = asyncio.create_task(lane.run(embed("back"), context()))
        await asyncio.sleep(5)
        engine(lane, 1).online = True
        begun = loop.time()
        assert right(await waiting, ["back"])
        assert loop.time() - begun < 0.07
        await long

    virtual(main)


@pytest.mark.parametrize("parallel", [0, 1])
def test_expensive_calls_do_not_make_batches_of_one(parallel: int) -> None:
    """Two hundred texts run in a few batches, whether a call costs less or more than max_batch_ms (40)."""

    async def main() -> float:
        lane = make_lane(FakeScript(delay_ms=delay, slots=2, parallel=parallel))
        begun = asyncio.get_running_loop().time()
        await asyncio.gather(*(lane.run(embed(f"a {number}"), context()) for number in range(200)))
        return asyncio.get_running_loop().time() - begun

    seconds = {}
    for delay in (10, 38, 42, 200):
        seconds[delay] = run_virtual(main)
    assert all(elapsed <= 7 * delay / 1000 for delay, elapsed in seconds.items())


def test_waiting_for_a_core_is_not_the_cost_of_a_call(virtual: Run[None]) -> None:
    """Batches that wait for each other on one core are not learned as expensive calls."""

    async def main() -> None:
        lane = make_lane(FakeScript(delay_ms=1, token_us=100, slots=2, parallel=1))
        texts = [" ".join(f"w{number}" for _ in range(1 + number % 40)) for number in range(2048)]
        await lane.run(embed(*texts), context(client="bulk"))
        cost = lane.replicas[0].facts.cost
        assert cost.fixed == pytest.approx(0.001, rel=0.05)
        assert cost.per_token == pytest.approx(0.0001, rel=0.05)

    virtual(main)


class Finishing(FakePipeline):
    """Fails in finish for a batch that holds `bad`; `calls` are the batch sizes."""

    def __init__(self, error: Exception, bad: str) -> None:
        super().__init__(FakeScript())
        self.error, self.bad = error, tokenize_item(bad)
        self.calls: list[int] = []

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> list[Row | ShoalError]:
        self.calls.append(len(batch))
        if any(item.tensors["ids"].tolist() == self.bad for item in batch):
            raise self.error
        return super().finish(outputs, batch)


def test_a_bug_in_finish_fails_only_its_item(virtual: Run[None]) -> None:
    """A bug in finish fails only its item; the others of the batch get their rows without another call."""

    async def main() -> None:
        lane = make_lane(FakeScript(delay_ms=10))
        lane.pipeline = pipeline = Finishing(ZeroDivisionError("oh"), "bad")
        good, bad, more = await gathered(
            lane.run(embed("good", "fine"), context()),
            lane.run(embed("bad"), context()),
            lane.run(embed("c"), context()),
        )
        assert right(good, ["good", "fine"])
        assert right(more, ["c"])
        assert isinstance(bad, InternalError)
        assert "ZeroDivisionError" in bad.message
        assert pipeline.calls == [4, 1, 1, 1, 1]
        assert list(engine(lane).batches) == [(4, 1)]
        with pytest.raises(InternalError, match="oh"):
            await lane.run(embed("bad"), context())
        assert idle(lane)

    virtual(main)


def test_an_error_raised_in_finish_is_searched(virtual: Run[None]) -> None:
    """An error that the pipeline raises on purpose fails the batch, which is halved."""

    async def main() -> None:
        lane = make_lane(FakeScript(delay_ms=10))
        lane.pipeline = pipeline = Finishing(EngineFailed("no such output"), "bad")
        good, bad = await gathered(lane.run(embed("good"), context()), lane.run(embed("bad"), context()))
        assert right(good, ["good"])
        assert isinstance(bad, EngineFailed)
        assert pipeline.calls == [2, 1, 1]

    virtual(main)
