"""Requests leave nothing for the garbage collector: their memory is free when they are answered."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from shoal.backends.fake.model import FakeScript
from shoal.errors import ShoalError
from tests.unit.core.conftest import Run, until
from tests.unit.core.lanes import context, embed, engine, make_lane


class TrackedText(str):
    """A text that can be weakly referenced."""

    __slots__ = ("__weakref__",)


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("text", ["fine", "poison-item", "reject-item", "nan-item"])
@pytest.mark.parametrize("neighbours", [0, 3])
def test_an_answered_request_is_gone(virtual: Run[None], text: str, neighbours: int) -> None:
    async def main() -> None:
        lane = make_lane(FakeScript(delay_ms=5))
        texts = [TrackedText(f"{text} at last"), *(TrackedText(f"fine {number}") for number in range(neighbours))]
        references = [weakref.ref(each) for each in texts]
        pending = [asyncio.create_task(lane.run(embed(each), context())) for each in texts]
        del texts
        answers = await asyncio.gather(*pending, return_exceptions=True)
        assert isinstance(answers[0], ShoalError) == (text != "fine")
        del answers, pending
        await asyncio.sleep(1)
        assert [each() for each in references] == [None] * (1 + neighbours)
        await lane.aclose()

    virtual(main)


def test_a_request_whose_caller_left_is_gone(virtual: Run[None]) -> None:
    async def main() -> None:
        lane = make_lane(FakeScript(delay_ms=1000))
        text = TrackedText("left")
        reference = weakref.ref(text)
        pending = asyncio.create_task(lane.run(embed(text), context()))
        del text
        await until(lambda: bool(engine(lane).running))
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        del pending
        await asyncio.sleep(2)
        assert reference() is None
        await lane.aclose()

    virtual(main)


def test_a_request_that_was_late_is_gone(virtual: Run[None]) -> None:
    async def main() -> None:
        lane = make_lane(FakeScript(delay_ms=1000))
        text = TrackedText("late")
        reference = weakref.ref(text)
        pending = asyncio.create_task(lane.run(embed(text), context(0.5)))
        del text
        assert isinstance((await asyncio.gather(pending, return_exceptions=True))[0], ShoalError)
        del pending
        await asyncio.sleep(2)
        assert reference() is None
        await lane.aclose()

    virtual(main)
