"""Slots and memory of batches: who is next."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from shoal.batches import run
from shoal.batches.objects import Batch
from shoal.batches.run import LineMemory, Slots
from tests.unit.batches.kit import new_batch


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


class Crowd:
    """Requests that each take a slot and keep it."""

    def __init__(self, count: int) -> None:
        self.slots = Slots(count)
        self.order: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def add(self, batch: Batch, count: int = 1) -> None:
        self.tasks += [asyncio.create_task(self._take(batch)) for _ in range(count)]
        await settle()

    async def _take(self, batch: Batch) -> None:
        await self.slots.acquire(batch)
        self.order.append(batch.id)

    async def leave(self) -> None:
        for each in self.tasks:
            each.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_a_small_batch_gets_its_share() -> None:
    """A batch that came first keeps half of the slots, not all of them, however long its requests take."""
    large, small = new_batch(id="large", client="a"), new_batch(id="small", client="b")
    crowd = Crowd(4)
    await crowd.add(large, 50)
    await crowd.add(small, 2)
    assert crowd.order == ["large"] * 4
    for _ in range(4):
        crowd.slots.release(large)
        await settle()
    assert crowd.order[4:] == ["small", "small", "large", "large"]
    await crowd.leave()


async def test_clients_share_before_batches() -> None:
    """A client with three batches has as many slots as one with a single batch, and divides them between its own."""
    mine = [new_batch(id=f"mine-{at}", client="a") for at in range(3)]
    theirs = new_batch(id="theirs", client="b")
    first = new_batch(id="first", client="c")
    crowd = Crowd(6)
    await crowd.add(first, 6)
    for batch in (*mine, theirs):
        await crowd.add(batch, 9)
    for _ in range(6):
        crowd.slots.release(first)
    await settle()
    assert Counter(crowd.order[6:]) == {"mine-0": 1, "mine-1": 1, "mine-2": 1, "theirs": 3}
    await crowd.leave()


async def test_a_single_slot_rotates() -> None:
    """Where all hold as many, the next client and its next batch have their turn."""
    batches = [new_batch(id=f"{client}{at}", client=client) for client, at in (("a", 1), ("a", 2), ("b", 1))]
    crowd = Crowd(1)
    for batch in batches:
        await crowd.add(batch, 3)
    by_id = {batch.id: batch for batch in batches}
    for _ in range(6):
        crowd.slots.release(by_id[crowd.order[-1]])
        await settle()
    assert crowd.order[1:] == ["a1", "b1", "a2", "b1", "a1", "b1"]
    await crowd.leave()


async def test_a_cancelled_request_takes_no_slot() -> None:
    """Neither one that waits, nor one that is given a slot in the moment in which it is cancelled."""
    batch = new_batch()
    crowd = Crowd(1)
    await crowd.add(batch, 3)
    crowd.tasks[1].cancel()
    crowd.slots.release(batch)
    crowd.tasks[2].cancel()
    await settle()
    assert len(crowd.order) == 1
    await crowd.add(batch)
    assert len(crowd.order) == 2
    await crowd.leave()


async def test_freed_bytes_go_first_to_the_run_that_holds_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs whose lines do not fit sleep on, and so does one that no longer waits."""
    monkeypatch.setattr(run, "BYTES_BEGUN", 30)
    memory = LineMemory()
    order: list[str] = []
    batches = {name: new_batch(id=name) for name in ("many", "few", "none", "left")}
    for name, held in (("many", 15), ("few", 10), ("left", 5)):
        memory.add(batches[name], held)

    async def wait(name: str, size: int) -> None:
        event = asyncio.Event()
        with memory.waiting(batches[name], event, size):
            await event.wait()
        order.append(name)

    tasks = [asyncio.create_task(wait(*each)) for each in (("many", 2), ("few", 3), ("none", 9), ("left", 1))]
    await settle()
    tasks[-1].cancel()
    await settle()
    memory.remove(batches["left"], 5)
    await settle()
    assert order == ["few", "many"]
    memory.remove(batches["few"], 10)
    await settle()
    assert order == ["few", "many", "none"]
    await asyncio.gather(*tasks, return_exceptions=True)
