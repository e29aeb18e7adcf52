"""The lane with engines whose own queue is full, pipelines that count late, and engines with parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from shoal.backends.fake.model import FakeEngine, FakePipeline, FakeScript
from shoal.core.protocols import CountedRow, Prepared, Tensors
from shoal.core.scheduling.lane import Lane
from shoal.errors import DeadlineExceeded, EngineFailed, Overloaded, ShoalError
from shoal.types import Array, BatchTask, Embed
from shoal.types import Item as AnyItem
from tests.unit.core.conftest import Run, gathered
from tests.unit.core.lanes import Reports, context, embed, engine, make_lane, right
from tests.unit.core.scheduling.test_lane import idle


class BusyEngine(FakeEngine):
    """Refuses the next `refusals` batches with `retry_after`; records the times and params of its calls."""

    def __init__(self, script: FakeScript, refusals: int = 0, retry_after: float | None = None) -> None:
        super().__init__(script)
        self.refusals = refusals
        self.retry_after = retry_after
        self.call_times: list[float] = []
        self.params: list[Mapping[str, Any]] = []

    async def infer(
        self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        self.call_times.append(asyncio.get_running_loop().time())
        self.params.append(params)
        if self.refusals:
            self.refusals -= 1
            raise Overloaded("the queue is full", retry_after=self.retry_after)
        return await super().infer(inputs, outputs, params, deadline)


SLOW = FakeScript(delay_ms=10)


def lane_of(*engines: FakeEngine, script: FakeScript = SLOW, reports: Reports | None = None) -> Lane:
    lane = make_lane(*[script] * len(engines), observer=reports)
    for replica, one in zip(lane.replicas, engines, strict=True):
        replica.engine = one
    return lane


@pytest.mark.parametrize(("retry_after", "least"), [(None, 0.1), (0.5, 0.5)])
def test_a_busy_replica_gets_the_batch_again(virtual: Run[None], retry_after: float | None, least: float) -> None:
    """The batch is retried after the requested pause, as often as needed; more than two refusals are no failure."""

    async def main() -> None:
        busy = BusyEngine(SLOW, refusals=5, retry_after=retry_after)
        lane = lane_of(busy)
        answer = await lane.run(embed("a", "b"), context())
        assert right(answer, ["a", "b"])
        gaps = [later - earlier for earlier, later in zip(busy.call_times, busy.call_times[1:], strict=False)]
        assert len(gaps) == 5
        assert all(least - 1e-9 <= gap <= least + 0.06 for gap in gaps)
        assert idle(lane)

    virtual(main)


def test_it_ends_at_the_deadline(virtual: Run[None]) -> None:
    """A request to a busy replica ends at its deadline, and new requests are admitted meanwhile."""

    async def main() -> None:
        busy = BusyEngine(SLOW, refusals=10_000)
        lane = lane_of(busy)
        late = asyncio.create_task(lane.run(embed("late"), context(1.0)))
        await asyncio.sleep(0.55)
        assert lane.ready()
        other = asyncio.create_task(lane.run(embed("other"), context(5.0)))
        assert isinstance((await gathered(late))[0], DeadlineExceeded)
        busy.refusals = 0
        assert right(await other, ["other"])
        assert idle(lane)

    virtual(main)


def test_another_replica_takes_over(virtual: Run[None]) -> None:
    """Only the busy replica pauses, and it is retried while the other one works."""

    async def main() -> None:
        busy, free = BusyEngine(SLOW, refusals=1, retry_after=0.2), BusyEngine(FakeScript(delay_ms=1000))
        lane = lane_of(busy, free)
        first = asyncio.create_task(lane.run(embed("a"), context()))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(lane.run(embed("b"), context()))
        assert right(await second, ["b"])
        assert (len(busy.call_times), len(free.call_times)) == (2, 1)
        assert right(await first, ["a"])
        assert idle(lane)

    virtual(main)


def test_a_search_continues_after_a_refusal(virtual: Run[None]) -> None:
    """The half that a full queue refused runs again unchanged: the bad item is found, and the others are answered."""

    async def main() -> None:
        class BusyTwice(BusyEngine):
            async def infer(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
                if len(self.call_times) == 1:
                    self.refusals = 2
                return await super().infer(*args, **kwargs)

        lane = lane_of(BusyTwice(SLOW))
        texts = ["a", "b", "poison-item", "d"]
        outcomes = await gathered(*(lane.run(embed(text), context()) for text in texts))
        assert [isinstance(outcome, EngineFailed) for outcome in outcomes] == [False, False, True, False]
        assert idle(lane)

    virtual(main)


def test_parts_of_a_lost_batch_wait_for_the_replica_to_come_back(virtual: Run[None]) -> None:
    """With nothing queued or running, the waiting halves are still polled."""

    async def main() -> None:
        class UnreachableEngine(BusyEngine):
            async def infer(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
                try:
                    return await super().infer(*args, **kwargs)
                finally:
                    if len(self.call_times) == 1:
                        lane.replicas[0].mark_unreachable(asyncio.get_running_loop().time())

        lane = lane_of(
            unreachable := UnreachableEngine(FakeScript(delay_ms=10, memory_tokens=3)), script=FakeScript(delay_ms=10)
        )
        outcomes = await gathered(*(lane.run(embed(text), context()) for text in ("a", "b", "c", "d")))
        assert not any(isinstance(outcome, BaseException) for outcome in outcomes)
        assert unreachable.call_times[1] - unreachable.call_times[0] == pytest.approx(1.01, abs=0.06)

    virtual(main)


def _prompt(task: BatchTask) -> str | None:
    return task.prompt_name if isinstance(task, Embed) else None


class Late(FakePipeline):
    """Token counts come with the answer; the params of a group say which prompt it has."""

    def prepare(self, items: Sequence[tuple[BatchTask, AnyItem]]) -> list[Prepared | ShoalError]:
        prepared = super().prepare(items)
        return [
            replace(each, tokens=0, group=_prompt(task), params={"prompt": _prompt(task)}, key=None)
            if isinstance(each, Prepared)
            else each
            for each, (task, _) in zip(prepared, items, strict=True)
        ]

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> list[CountedRow | ShoalError]:  # type: ignore[override]
        rows = super().finish(outputs, batch)
        return [
            row if isinstance(row, ShoalError) else CountedRow(row, 100 + item.cost)
            for row, item in zip(rows, batch, strict=True)
        ]


def test_tokens_known_only_from_the_answer_are_counted(virtual: Run[None]) -> None:
    """Such tokens count in usage and admission; a failed input is still an error."""

    async def main() -> None:
        lane = make_lane(SLOW)
        lane.pipeline = Late(SLOW)
        lane._preparer._pipeline = lane.pipeline
        answer = await lane.run(embed("a", "b c", "d e f"), context())
        assert right(answer, ["a", "b c", "d e f"])
        assert answer.tokens == [101, 102, 103]
        outcome = (await gathered(lane.run(embed("nan-item"), context())))[0]
        assert isinstance(outcome, ShoalError)
        assert idle(lane)

    virtual(main)


def test_an_engine_gets_the_params_of_its_batch(virtual: Run[None]) -> None:
    """Items with different params never share a batch."""

    async def main() -> None:
        lane = lane_of(busy := BusyEngine(SLOW))
        lane.pipeline = Late(SLOW)
        lane._preparer._pipeline = lane.pipeline
        tasks = [Embed(model="m", inputs=[f"t{n}"], prompt_name="ab"[n % 2], normalize=False) for n in range(8)]
        await asyncio.gather(*(lane.run(task, context()) for task in tasks))
        assert [params["prompt"] for params in busy.params] in (["a", "b"], ["b", "a"])

    virtual(main)


def test_tokens_are_estimated_once(virtual: Run[None]) -> None:
    """The estimate of admission is used for preparation too."""

    async def main() -> None:
        lane = make_lane(SLOW)
        estimated: list[AnyItem] = []
        estimate = lane.pipeline.estimate

        def counting(item: AnyItem) -> int:
            estimated.append(item)
            return estimate(item)

        lane.pipeline.estimate = counting  # type: ignore[method-assign]
        await lane.run(embed("a", "b"), context())
        assert estimated == ["a", "b"]

    virtual(main)


def test_a_batch_schedules_once(virtual: Run[None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a batch looks for more work exactly once."""

    async def main() -> None:
        lane = make_lane(SLOW)
        pumps: list[int] = []
        pump = Lane._pump

        def counting(self: Lane) -> None:
            pumps.append(len(engine(lane).batches))
            pump(self)

        monkeypatch.setattr(Lane, "_pump", counting)
        await lane.run(embed("a"), context())
        await asyncio.sleep(1)
        assert pumps == [0, 1]

    virtual(main)
