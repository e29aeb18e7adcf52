"""More work than a lane can do, on a virtual clock: answers are in time, and as many as there can be."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

import msgspec
import pytest

from shoal.backends.fake.model import FakeScript
from shoal.core.protocols import CostModel
from shoal.core.scheduling.admission import OVERLOAD_PART
from shoal.core.scheduling.lane import Lane
from shoal.errors import DeadlineExceeded, Overloaded
from tests.unit.core.conftest import START, run_virtual
from tests.unit.core.lanes import context, embed, engine, make_lane

SCRIPT = FakeScript(delay_ms=20, token_us=200, max_batch_size=16)
"""4 ms a text of twenty words, and 20 ms a call."""

FULL_BATCH_S = 0.084

SECONDS = 8.0


def text_of(name: str) -> str:
    return " ".join(f"{name}w{at}" for at in range(20))


@dataclass
class Seen:
    """Seconds of those that were answered, by when they came; refusals; those that were taken in vain, and how many of
    them came in the first half second, when nothing is known of the engine."""

    answered: list[tuple[float, float]] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    late: int = 0
    late_at_first: int = 0

    def p99(self, since: float = 0.0) -> float:
        seconds = sorted(took for came, took in self.answered if came >= since)
        return seconds[int(0.99 * len(seconds))]

    def goodput(self, since: float, until: float) -> float:
        return sum(since <= came + took < until for came, took in self.answered) / (until - since)


async def ask(lane: Lane, seen: Seen, text: str, deadline: float, client: str = "c") -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        await lane.run(embed(text), context(deadline, client))
        seen.answered.append((began - START, loop.time() - began))
    except Overloaded as error:
        assert error.retry_after is not None
        assert 1 <= error.retry_after <= 45
        seen.refused.append(error.retry_after)
    except DeadlineExceeded:
        seen.late += 1
        seen.late_at_first += began - START < 0.5


async def offer(lane: Lane, seen: Seen, rate: float, seconds: float, deadline: float, *, client: str = "c") -> None:
    """So many texts a second, at random times, whatever becomes of them."""
    random, calls = Random(4), []
    loop = asyncio.get_running_loop()
    ends = loop.time() + seconds
    number = 0
    while loop.time() < ends:
        number += 1
        calls.append(asyncio.create_task(ask(lane, seen, text_of(f"{client}{number}"), deadline, client)))
        await asyncio.sleep(random.expovariate(rate))
    await asyncio.gather(*calls)


async def ask_in_turn(lane: Lane, seen: Seen, callers: int, turns: int) -> None:
    """So many callers, each with a request as soon as the one before is answered."""

    async def caller(number: int) -> None:
        for turn in range(turns):
            await ask(lane, seen, text_of(f"{number}x{turn}"), 30.0)

    await asyncio.gather(*map(caller, range(callers)))


@cache
def normal() -> Seen:
    """Some are always waiting, and nobody for long."""

    async def main() -> Seen:
        lane, seen = make_lane(SCRIPT), Seen()
        await ask_in_turn(lane, seen, 32, 20)
        return seen

    return run_virtual(main)


def capacity() -> float:
    """Texts a second that the lane answers then."""
    ended = sorted(came + took for came, took in normal().answered)
    return len(ended) / ended[-1]


def overload(times: float, deadline: float, *, stated: CostModel | None = None) -> Seen:
    rate = times * capacity()

    async def main() -> Seen:
        lane = make_lane(SCRIPT, max_queue_s=1.0)
        if stated is not None:
            engine(lane).facts = msgspec.structs.replace(engine(lane).facts, cost=stated)
        seen = Seen()
        await offer(lane, seen, rate, SECONDS, deadline)
        return seen

    return run_virtual(main)


@pytest.mark.parametrize("deadline", [30.0, 1.0, 0.2])
@pytest.mark.parametrize("times", [2, 4])
@pytest.mark.parametrize("stated", [None, CostModel(0.001, 0.00001)], ids=["true", "low"])
def test_overload_costs_no_goodput(times: float, deadline: float, stated: CostModel | None) -> None:
    """Nine tenths of what the engine can do are answered in time, whatever is asked, also where the engine was thought
    to be much faster; the rest is refused at once, and little is taken in vain."""
    seen = overload(times, deadline, stated=stated)
    assert seen.goodput(2.0, SECONDS) >= 0.9 * capacity()
    assert seen.p99() <= deadline
    assert seen.p99(since=3.0) <= min(deadline, OVERLOAD_PART + 2 * FULL_BATCH_S)
    assert seen.late - seen.late_at_first <= 0.05 * len(seen.answered)


@pytest.mark.parametrize("deadline", [30.0, 1.0, 0.2])
def test_half_the_load_is_all_answered(deadline: float) -> None:
    seen = overload(0.5, deadline)
    assert (len(seen.refused), seen.late) == (0, 0)


@pytest.mark.parametrize(("times", "slower"), [(4, 1), (8, 1), (8, 8), (8, 40)])
def test_a_heavy_client_is_refused_and_the_others_are_not(times: int, slower: int) -> None:
    """One client asks for many times the capacity; the few requests of another one are all answered, and soon, also if
    a single engine call takes longer than the queue may."""
    script = replace(SCRIPT, delay_ms=20 * slower, token_us=200 * slower)

    async def main() -> tuple[Seen, Seen]:
        lane = make_lane(script, max_queue_s=1.0)
        heavy, light = Seen(), Seen()
        await asyncio.gather(
            offer(lane, heavy, rate, SECONDS * slower, 30.0 * slower, client="heavy"),
            offer(lane, light, 5.0 / slower, SECONDS * slower, 1.0 * slower, client="light"),
        )
        return heavy, light

    rate = times * capacity() / slower
    heavy, light = run_virtual(main)
    assert len(heavy.refused) > len(heavy.answered)
    assert (len(light.refused), light.late) == (0, 0)
    assert light.p99() < 0.2 * slower


@pytest.mark.parametrize(("callers", "slower"), [(8, 1), (32, 1), (64, 1), (8, 20), (64, 20), (120, 8)])
def test_callers_who_wait_for_their_answers_are_not_overload(callers: int, slower: int) -> None:
    """However long the queue is that they make, as long as it takes less than a second or they are few."""
    script = replace(SCRIPT, delay_ms=20 * slower, token_us=200 * slower)

    async def main() -> Seen:
        lane, seen = make_lane(script, max_queue_s=1.0), Seen()
        await ask_in_turn(lane, seen, callers, 30)
        return seen

    seen = run_virtual(main)
    assert (len(seen.answered), len(seen.refused), seen.late) == (30 * callers, 0, 0)


def test_bulk_waits_as_long_as_it_may_and_harms_no_interactive_request() -> None:
    """A job that fills the queue for many seconds: none of it is refused, and others are answered soon."""

    async def main() -> tuple[Seen, float]:
        lane, light = make_lane(SCRIPT, max_queue_s=1.0), Seen()
        await offer(lane, Seen(), capacity_, 1.0, 30.0)
        loop = asyncio.get_running_loop()
        began = loop.time()
        job = asyncio.gather(
            *(
                lane.run(embed(*(text_of(f"{part}b{at}") for at in range(60))), context(60.0, "job"))
                for part in range(8)
            )
        )
        await offer(lane, light, 5.0, SECONDS, 1.0, client="light")
        await job
        return light, loop.time() - began

    capacity_ = capacity()
    light, seconds = run_virtual(main)
    assert (len(light.refused), light.late) == (0, 0)
    assert light.p99() < 0.2
    assert seconds > 3.0


def test_a_burst_is_taken_and_a_queue_that_stays_is_not() -> None:
    """Three seconds' work at once is all answered; whoever comes to what is left of it is refused until it is short."""

    async def main() -> tuple[Seen, Seen, Seen]:
        lane = make_lane(SCRIPT, max_queue_s=1.0)
        burst, more, then = Seen(), Seen(), Seen()
        await offer(lane, Seen(), count / 3, 1.0, 30.0)
        calls = [asyncio.create_task(ask(lane, burst, text_of(f"burst{at}"), 30.0)) for at in range(count)]
        await asyncio.sleep(1.5)
        await ask(lane, more, text_of("more"), 30.0)
        await asyncio.sleep(1.3)
        await ask(lane, then, text_of("then"), 30.0)
        await asyncio.gather(*calls)
        return burst, more, then

    count = int(3 * capacity())
    burst, more, then = run_virtual(main)
    assert (len(burst.answered), burst.late) == (count, 0)
    assert (len(more.refused), len(then.refused), len(then.answered)) == (1, 0, 1)


@pytest.mark.parametrize("deadline", [30.0, 1.0, 0.2])
def test_it_recovers_as_soon_as_the_load_goes_back(deadline: float) -> None:
    """Half the load after four times of it: within two seconds nothing is refused or late any more."""

    async def main() -> Seen:
        lane, after = make_lane(SCRIPT, max_queue_s=1.0), Seen()
        await asyncio.wait([asyncio.create_task(offer(lane, Seen(), 4 * rate, 4.0, deadline))], timeout=4.0)
        await asyncio.wait([asyncio.create_task(offer(lane, Seen(), rate / 2, 2.0, deadline))], timeout=2.0)
        await offer(lane, after, rate / 2, 4.0, deadline)
        return after

    rate = capacity()
    after = run_virtual(main)
    assert (len(after.refused), after.late) == (0, 0)
    assert after.p99() < 0.2


def test_a_burst_long_after_an_overload_is_taken() -> None:
    """A few requests in between show that the queue had drained."""

    async def main() -> tuple[Seen, Seen]:
        lane, calm, burst = make_lane(SCRIPT, max_queue_s=1.0), Seen(), Seen()
        await offer(lane, Seen(), 4 * rate, 4.0, 30.0)
        await ask_in_turn(lane, calm, 4, 5)
        await asyncio.gather(*(ask(lane, burst, text_of(f"burst{at}"), 30.0) for at in range(int(3 * rate))))
        return calm, burst

    rate = capacity()
    calm, burst = run_virtual(main)
    assert (len(calm.refused), len(burst.refused), burst.late) == (0, 0, 0)


@pytest.mark.parametrize("slower", [1, 20])
def test_a_pause_is_no_work(slower: int) -> None:
    """Callers who all leave at once, and as many who come after a pause: neither the queue that the first ones left nor
    the time until the others came makes the engine look slow."""
    script = replace(SCRIPT, delay_ms=20 * slower, token_us=200 * slower, slots=2)

    async def main() -> Seen:
        lane, seen = make_lane(script, max_queue_s=1.0), Seen()
        leaving = asyncio.create_task(ask_in_turn(lane, Seen(), 64, 30))
        await asyncio.sleep(2.02 * slower)
        leaving.cancel()
        await asyncio.sleep(20.0)
        await ask_in_turn(lane, seen, 64, 10)
        return seen

    seen = run_virtual(main)
    assert (len(seen.answered), len(seen.refused), seen.late) == (640, 0, 0)


def test_an_engine_thought_too_fast_is_learned_from_batches_that_are_given_up() -> None:
    """Every batch ends at its deadline, so none is measured, until predictions have grown long enough."""
    script = replace(SCRIPT, delay_ms=100, token_us=400)

    async def main() -> Seen:
        lane, seen = make_lane(script, max_queue_s=1.0), Seen()
        engine(lane).facts = msgspec.structs.replace(engine(lane).facts, cost=CostModel(0.001, 0.00001))
        await offer(lane, seen, 300.0, SECONDS, 0.6)
        return seen

    seen, full = run_virtual(main), 16
    assert seen.goodput(SECONDS / 2, SECONDS) >= 0.8 * full / (0.1 + full * 20 * 0.0004)
