"""An item that crashes its process is found and reported, and fails no other item."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from shoal.backends.fake.model import FakeEngine, FakeScript, word_id
from shoal.core.protocols import Tensors
from shoal.core.scheduling.replica import Replica
from shoal.core.scheduling.retries import RetryState, next_step
from shoal.errors import Crashed
from shoal.types import Array
from tests.unit.core.conftest import Run
from tests.unit.core.lanes import context, embed, make_lane, right

LETHAL = "lethal-item"


class Mortal(FakeEngine):
    """An engine that crashes on a batch with LETHAL, fails all calls in flight, and is back half a second later."""

    def __init__(self, script: FakeScript, name: str = "mortal") -> None:
        super().__init__(script, name)
        self.deaths = 0
        self._grave = asyncio.Event()

    async def infer(
        self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        if (inputs["ids"] == word_id(LETHAL)).any():
            await asyncio.sleep(0.005)
            self.die()
        grave = self._grave
        answer = asyncio.ensure_future(super().infer(inputs, outputs, params, deadline))
        death = asyncio.ensure_future(grave.wait())
        try:
            await asyncio.wait({answer, death}, return_when=asyncio.FIRST_COMPLETED)
            if grave.is_set():
                raise Crashed("the process died")
            return answer.result()
        finally:
            answer.cancel()
            death.cancel()
            await asyncio.gather(answer, death, return_exceptions=True)

    def die(self) -> None:
        self.deaths += 1
        self._grave.set()
        self._grave = asyncio.Event()
        self.online = False
        asyncio.get_running_loop().call_later(0.5, setattr, self, "online", True)
        raise Crashed("the process died")


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("first", [True, False])
def test_only_the_lethal_item_fails(virtual: Run[None], slots: int, first: bool) -> None:
    """All other items are answered, and the process crashes at most twice."""

    async def main() -> None:
        script = FakeScript(delay_ms=20, slots=slots, parallel=1, max_batch_size=4)
        lane = make_lane(script)
        lane.replicas[:] = [Replica(engine := Mortal(script))]
        texts = [f"fine {number}" for number in range(9)]
        texts.insert(0 if first else 5, LETHAL)
        pending = [asyncio.create_task(lane.run(embed(text), context())) for text in texts]
        answers = await asyncio.gather(*pending, return_exceptions=True)
        for text, answer in zip(texts, answers, strict=True):
            if text == LETHAL:
                assert isinstance(answer, Crashed)
            else:
                assert not isinstance(answer, BaseException), (text, answer)
                assert right(answer, [text])
        assert 1 <= engine.deaths <= 2
        await lane.aclose()

    virtual(main)


@pytest.mark.parametrize(
    ("items", "shared", "expected"),
    [(1, False, "fail"), (1, True, "singles"), (3, False, "singles"), (3, True, "singles")],
)
def test_which_item_is_to_blame(items: int, shared: bool, expected: str) -> None:
    """Only an item that ran alone on a replica is certain to be the cause."""
    assert next_step(Crashed("x"), items, RetryState(0), replica_ready=False, shared=shared) == expected


async def test_a_replica_that_crashed_takes_one_at_a_time() -> None:
    """One batch runs at a time until as many ran as there were suspects; batches from before do not count."""
    replica = Replica(FakeEngine(FakeScript(slots=3)))
    before = replica.start(0.0)
    replica.record_crash(2)
    assert not replica.is_free(0.0)
    assert replica.next_check_s(0.0) is None
    replica.end(before, 0.0)
    for _ in range(2):
        turn = replica.start(0.0)
        assert not replica.is_free(0.0)
        replica.end(turn, 0.0)
    first, second = replica.start(0.0), replica.start(0.0)
    assert (first.shared, second.shared) == (True, True)
    replica.end(first, 0.0)
    replica.end(second, 0.0)
    assert not replica.start(0.0).shared
