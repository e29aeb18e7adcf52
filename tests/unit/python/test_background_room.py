"""Waiting for room in the gateway: in order, without starvation."""

from __future__ import annotations

import asyncio

import pytest

from shoal.python.background import _ItemLimiter


class Caller:
    """Makes calls with a number of items, each of which lasts until `leave`."""

    def __init__(self, limiter: _ItemLimiter) -> None:
        self.limiter = limiter
        self.inside: list[str] = []
        self._doors: dict[str, asyncio.Event] = {}

    def come(self, name: str, items: int) -> asyncio.Task[None]:
        return asyncio.create_task(self._call(name, items))

    def leave(self, name: str) -> None:
        self._doors[name].set()

    async def _call(self, name: str, items: int) -> None:
        self._doors[name] = asyncio.Event()
        async with self.limiter.admit(items):
            self.inside.append(name)
            try:
                await self._doors[name].wait()
            finally:
                self.inside.remove(name)


async def run_loop() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


@pytest.fixture
def caller() -> Caller:
    return Caller(_ItemLimiter(10))


async def test_small_calls_do_not_overtake_a_large_one(caller: Caller) -> None:
    tasks = [caller.come("a", 3), caller.come("b", 3)]
    await run_loop()
    tasks += [caller.come("large", 12), caller.come("c", 3)]
    await run_loop()
    assert caller.inside == ["a", "b"]
    caller.leave("a")
    await run_loop()
    assert caller.inside == ["b"]
    caller.leave("b")
    await run_loop()
    assert caller.inside == ["large"]
    caller.leave("large")
    await run_loop()
    assert caller.inside == ["c"]
    caller.leave("c")
    await asyncio.gather(*tasks)


async def test_all_calls_that_fit_are_admitted_at_once(caller: Caller) -> None:
    tasks = [caller.come("full", 10)]
    await run_loop()
    tasks += [caller.come(name, 5) for name in "abc"]
    await run_loop()
    caller.leave("full")
    await run_loop()
    assert caller.inside == ["a", "b"]
    for name in "abc":
        caller.leave(name)
    await asyncio.gather(*tasks)


async def test_a_cancelled_waiter_blocks_no_other(caller: Caller) -> None:
    tasks = [caller.come("a", 5)]
    await run_loop()
    large = caller.come("large", 10)
    await run_loop()
    tasks.append(caller.come("b", 5))
    await run_loop()
    assert caller.inside == ["a"]
    large.cancel()
    await run_loop()
    assert caller.inside == ["a", "b"]
    for name in "ab":
        caller.leave(name)
    await asyncio.gather(*tasks)


async def test_a_waiter_cancelled_on_admission_frees_its_room(caller: Caller) -> None:
    async with caller.limiter.admit(10):
        large = caller.come("large", 10)
        await run_loop()
        small = caller.come("small", 10)
        await run_loop()
    large.cancel()  # it is admitted, but has not resumed yet
    await run_loop()
    assert caller.inside == ["small"]
    caller.leave("small")
    await small
