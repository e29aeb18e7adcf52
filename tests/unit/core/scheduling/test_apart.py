"""A server that batches by itself fails all merged items for one bad item: only that item may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from shoal.backends.fake.model import FakeEngine, FakeScript, word_id
from shoal.core.protocols import Tensors
from shoal.core.scheduling.replica import Replica
from shoal.core.scheduling.retries import RetryState, next_step
from shoal.errors import EngineFailed, InputRejected, ShoalError
from shoal.types import Array
from tests.unit.core.conftest import Run
from tests.unit.core.lanes import context, embed, make_lane, right

POISON = "poison-item"


class Merging(FakeEngine):
    """An engine that merges all calls in flight: one poisoned item fails all of them."""

    def __init__(self, script: FakeScript) -> None:
        super().__init__(replace(script, poison="none"), "merging")
        self.facts = msgspec.structs.replace(self.facts, merges=True)
        self.flights: list[Array] = []
        self.hurt = 0

    async def infer(
        self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        self.flights.append(ids := inputs["ids"])
        poisoned = any((each == word_id(POISON)).any() for each in self.flights)
        try:
            answer = await super().infer(inputs, outputs, params, deadline)
            poisoned = poisoned or any((each == word_id(POISON)).any() for each in self.flights)
        finally:
            self.flights = [each for each in self.flights if each is not ids]
        if poisoned:
            self.hurt += 1
            raise EngineFailed("one of all that was in flight")
        return answer


@pytest.mark.parametrize("slots", [2, 4])
@pytest.mark.parametrize("poisoned", [{0}, {20}, {3, 17, 40}])
def test_only_the_bad_items_fail(virtual: Run[None], slots: int, poisoned: set[int]) -> None:
    async def main() -> None:
        script = FakeScript(delay_ms=10, slots=slots, max_batch_size=16)
        lane = make_lane(script)
        lane.replicas[:] = [Replica(engine := Merging(script))]
        texts = [POISON if number in poisoned else f"text {number}" for number in range(41)]
        pending = [asyncio.create_task(lane.run(embed(text), context())) for text in texts]
        answers = await asyncio.gather(*pending, return_exceptions=True)
        assert {number for number, answer in enumerate(answers) if isinstance(answer, EngineFailed)} == poisoned
        assert all(
            right(answer, [text])
            for text, answer in zip(texts, answers, strict=True)
            if not isinstance(answer, BaseException)
        )
        # What failed in the first flight, then only batches that a culprit was in: found by halving, not by luck.
        assert engine.hurt <= slots + len(poisoned) * 6
        assert all(replica.running == 0 for replica in lane.replicas)
        await lane.aclose()

    virtual(main)


def test_others_wait_no_longer_than_for_the_parts(virtual: Run[None]) -> None:
    """New items are answered after the parts of the failed batch, and several batches run at once again."""

    async def main() -> None:
        script = FakeScript(delay_ms=10, slots=3, max_batch_size=4)
        lane = make_lane(script)
        lane.replicas[:] = [Replica(engine := Merging(script))]
        first = [asyncio.create_task(lane.run(embed(text), context())) for text in ("a", "b", POISON, "c")]
        await asyncio.sleep(0.015)
        later = [asyncio.create_task(lane.run(embed(f"later {number}"), context())) for number in range(24)]
        answers = await asyncio.gather(*first, *later, return_exceptions=True)
        assert [isinstance(answer, ShoalError) for answer in answers] == [False, False, True, False] + [False] * 24
        assert lane.replicas[0].is_free(asyncio.get_running_loop().time())
        turns = [lane.replicas[0].start(0.0) for _ in range(3)]
        assert [turn.suspect for turn in turns] == [False] * 3
        assert engine.hurt <= 6
        await lane.aclose()

    virtual(main)


@pytest.mark.parametrize(
    ("error", "items", "shared", "merges", "expected"),
    [
        (EngineFailed("x"), 1, True, True, "apart"),
        (EngineFailed("x"), 9, True, True, "apart"),
        (EngineFailed("x"), 1, False, True, "fail"),
        (EngineFailed("x"), 9, False, True, "halve"),
        (EngineFailed("x"), 1, True, False, "fail"),
        (InputRejected("x"), 1, True, True, "fail"),
    ],
)
def test_when_another_item_may_be_the_cause(
    error: ShoalError, items: int, shared: bool, merges: bool, expected: str
) -> None:
    step = next_step(error, items, RetryState(4), replica_ready=True, shared=shared, merges=merges)
    assert step == expected
