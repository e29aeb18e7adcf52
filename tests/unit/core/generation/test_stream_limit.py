from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from shoal.core.generation.stream_limit import StreamLimit
from shoal.errors import DeadlineExceeded, Overloaded
from shoal.types import Context
from tests.unit.core.conftest import Run, gathered, until


def by(client: str, seconds: float = 1000.0) -> Context:
    return Context(id="r", deadline=time.monotonic() + seconds, client=client)


@asynccontextmanager
async def permit(limit: StreamLimit, ctx: Context) -> AsyncGenerator[None]:
    """Hold a slot, as a stream does."""
    await limit.enter(ctx)
    try:
        yield
    finally:
        limit.leave()


async def hold(limit: StreamLimit, ctx: Context, order: list[str], release: asyncio.Event | None = None) -> None:
    async with permit(limit, ctx):
        order.append(ctx.client)
        if release is not None:
            await release.wait()


async def test_a_free_place_is_had_at_once() -> None:
    """Up to the limit no stream waits, and all slots are released."""
    limit = StreamLimit(2)
    async with permit(limit, by("a")), permit(limit, by("a")):
        assert limit.free == 0
    assert limit.free == 2


async def test_a_stream_that_fails_gives_its_place_back() -> None:
    """A slot is released whatever happens in the stream."""
    limit = StreamLimit(1)
    with pytest.raises(ZeroDivisionError):
        async with permit(limit, by("a")):
            raise ZeroDivisionError
    assert limit.free == 1


async def test_clients_take_turns_not_requests() -> None:
    """Five waiting streams of one client and two of another alternate while both wait."""
    limit, order, release = StreamLimit(1), list[str](), asyncio.Event()
    first = asyncio.create_task(hold(limit, by("holder"), order, release))
    await until(lambda: limit.free == 0)
    names = ["greedy"] * 5 + ["modest"] * 2
    waiting = [asyncio.create_task(hold(limit, by(name), order)) for name in names]
    await until(lambda: sum(map(len, limit._waiters.clients.values())) == 7)
    release.set()
    await asyncio.gather(first, *waiting)
    assert order == ["holder", "greedy", "modest", "greedy", "modest", "greedy", "greedy", "greedy"]
    assert (limit.free, limit._waiters.clients) == (1, {})


async def test_a_newcomer_does_not_pass_those_who_wait() -> None:
    """A free slot is handed over at once; no later stream takes it."""
    limit, order, release = StreamLimit(1), list[str](), asyncio.Event()
    first = asyncio.create_task(hold(limit, by("holder"), order, release))
    await until(lambda: limit.free == 0)
    waits = asyncio.create_task(hold(limit, by("waits"), order))
    await until(lambda: "waits" in limit._waiters.clients)
    release.set()
    await first
    await asyncio.gather(hold(limit, by("new"), order), waits)
    assert order == ["holder", "waits", "new"]


async def test_cancelled_in_the_moment_of_hand_over_passes_the_place_on() -> None:
    """A stream cancelled after it got its slot, but before it ran, passes it to the next one."""
    limit, order, release = StreamLimit(1), list[str](), asyncio.Event()
    first = asyncio.create_task(hold(limit, by("holder"), order, release))
    await until(lambda: limit.free == 0)
    cancelled, stays = (asyncio.create_task(hold(limit, by(name), order)) for name in ("gone", "stays"))
    await until(lambda: len(limit._waiters.clients) == 2)
    release.set()
    await until(lambda: "gone" not in limit._waiters.clients)
    cancelled.cancel()
    assert isinstance((await gathered(cancelled))[0], asyncio.CancelledError)
    await asyncio.gather(first, stays)
    assert order == ["holder", "stays"]
    assert limit.free == 1


async def test_cancelled_while_waiting_leaves_the_queue() -> None:
    """The other streams of the client keep their order, and a client without streams is removed."""
    limit, order, release = StreamLimit(1), list[str](), asyncio.Event()
    first = asyncio.create_task(hold(limit, by("holder"), order, release))
    await until(lambda: limit.free == 0)
    alone, one, two = (asyncio.create_task(hold(limit, by(name), order)) for name in ("alone", "pair", "pair"))
    await until(lambda: sum(map(len, limit._waiters.clients.values())) == 3)
    for task in (alone, one):
        task.cancel()
    await gathered(alone, one)
    assert list(limit._waiters.clients) == ["pair"]
    release.set()
    await asyncio.gather(first, two)
    assert (order, limit.free) == (["holder", "pair"], 1)


def test_waiting_ends_at_the_deadline(virtual: Run[None]) -> None:
    """A wait ends with DeadlineExceeded at that time and leaves no state."""

    async def main() -> None:
        limit, loop = StreamLimit(1), asyncio.get_running_loop()
        async with permit(limit, by("holder")):
            begun = loop.time()
            with pytest.raises(DeadlineExceeded, match="try again later"):
                async with permit(limit, by("late", 7.0)):
                    raise AssertionError("it has no place")
            assert loop.time() - begun == pytest.approx(7.0, abs=0.05)
            assert not limit._waiters.clients
        assert limit.free == 1

    virtual(main)


@pytest.mark.parametrize("seed", range(20))
def test_places_are_never_lost_nor_doubled(virtual: Run[None], seed: int) -> None:
    """Random holds, cancellations and deadlines never exceed the limit, and all slots are released."""

    async def main() -> None:
        chance = random.Random(seed)
        places = chance.randint(1, 4)
        limit = StreamLimit(places)
        inside: Counter[str] = Counter()

        async def life() -> None:
            await asyncio.sleep(chance.random())
            client = chance.choice("abc")
            async with permit(limit, by(client, chance.choice([0.05, 1000.0]))):
                inside[client] += 1
                assert inside.total() <= places
                try:
                    await asyncio.sleep(chance.choice([0.0, 0.01, 0.1]))
                finally:
                    inside[client] -= 1

        tasks = [asyncio.create_task(life()) for _ in range(100)]
        for _ in range(30):
            await asyncio.sleep(chance.random() * 0.05)
            chance.choice(tasks).cancel()
        outcomes = await gathered(*tasks)
        expected = DeadlineExceeded | Overloaded | asyncio.CancelledError
        assert not [o for o in outcomes if o is not None and not isinstance(o, expected)]
        assert outcomes.count(None) > 20
        assert (limit.free, limit._waiters.clients, inside.total()) == (places, {}, 0)

    virtual(main)


async def test_who_would_wait_too_long_is_refused() -> None:
    """The wait is predicted from the rate of released slots: one in ten seconds, six streams ahead, clients in turn."""
    now = 100.0
    limit, order = StreamLimit(1, clock=lambda: now), list[str]()

    async def waits(client: str, seconds: float) -> asyncio.Task[None]:
        before = limit.waiting
        task = asyncio.create_task(hold(limit, Context(id="r", deadline=now + seconds, client=client), order))
        await until(lambda: limit.waiting > before or task.done())
        return task

    places = [permit(limit, Context(id="r", deadline=now + 1000, client="a")) for _ in range(6)]
    await places[0].__aenter__()
    for here, there in itertools.pairwise(places):
        entering = asyncio.create_task(there.__aenter__())
        await until(lambda: limit.waiting == 1)
        now += 10
        await here.__aexit__(None, None, None)
        await entering
    waiting = [await waits("a", 1000) for _ in range(6)]
    with pytest.raises(Overloaded, match=r"about 70\.0 s, too late for a request with 30\.0 s") as caught:
        await (await waits("a", 30))
    assert caught.value.retry_after is not None
    assert caught.value.retry_after >= 30
    waiting.append(await waits("b", 30))  # its turn is the second
    await places[-1].__aexit__(None, None, None)
    await asyncio.gather(*waiting)
    assert order[:2] == ["a", "b"]
    assert limit.free == 1
