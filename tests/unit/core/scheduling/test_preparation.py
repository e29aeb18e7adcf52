from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.backends.fake.model import FakePipeline, FakeScript
from shoal.core.protocols import Prepared, WorkWeight
from shoal.core.scheduling.admission import classify_traffic
from shoal.core.scheduling.fair_queue import WEIGHTS
from shoal.core.scheduling.preparation import AHEAD, INLINE_TOKENS, JOB_ITEMS, JOB_TOKENS, Outcome, Preparer
from shoal.core.scheduling.request_state import RequestState
from shoal.core.threads import Threads
from shoal.errors import InternalError, InvalidValue, ShoalError, Unavailable
from shoal.types import BatchTask, Embed, TextItem, TrafficClass
from shoal.types import Item as AnyItem
from tests.unit.core.conftest import run_virtual, until
from tests.unit.core.lanes import context

T = TypeVar("T")


class Jobs(FakePipeline):
    """Records the inputs of each prepare call; `answer` replaces the outcomes."""

    def __init__(self) -> None:
        super().__init__(FakeScript())
        self.jobs: list[list[Any]] = []
        self.answer: Callable[[list[Prepared | ShoalError]], list[Prepared | ShoalError]] = lambda outcomes: outcomes

    def prepare(self, items: Sequence[tuple[BatchTask, AnyItem]]) -> list[Prepared | ShoalError]:
        self.jobs.append([item for _, item in items])
        return self.answer(super().prepare(items))


class Gate(Threads):
    """Threads that block every call until the test releases one."""

    def __init__(self, count: int = 2) -> None:
        super().__init__("gate", count)
        self.waiting: list[asyncio.Future[None]] = []
        self.calls: list[Any] = []

    async def run(self, call: Callable[[], T]) -> T:
        self.calls.append(call)
        self.waiting.append(gate := asyncio.get_running_loop().create_future())
        await gate
        return call()

    def let_go(self) -> None:
        self.waiting.pop(0).set_result(None)


class PreparerHarness:
    """A preparer with its jobs, its threads and the delivered outcomes."""

    def __init__(self, count: int = 2, pipeline: Jobs | None = None) -> None:
        self.pipeline, self.gate = pipeline or Jobs(), Gate(count)
        self.delivered: list[Outcome] = []
        self.answered = 0
        self.now = 0.0
        self.preparer = Preparer(
            self.pipeline,
            self.gate,
            deliver=self.delivered.extend,
            count_held=lambda: len(self.delivered) - self.answered,
            max_age_ms=250,
            clock=lambda: self.now,
        )

    def add(self, *inputs: TextItem, client: str = "c", traffic: TrafficClass | None = None) -> RequestState:
        task, ctx = Embed(model="m", inputs=list(inputs)), context(client=client, traffic=traffic)
        estimates = [self.pipeline.estimate(item) for item in task.items]
        traffic = classify_traffic(ctx, len(inputs))
        pending = RequestState(task, task.items, ctx, traffic=traffic, arrived=0.0, estimates=estimates)
        self.preparer.add(pending)
        return pending

    async def prepare_next(self) -> tuple[RequestState, int]:
        """Let the oldest job in a thread end; returns its item, which is answered at once."""
        await self.settle()
        self.gate.let_go()
        await self.settle()
        await self.answer()
        return self.delivered[-1][:2]

    async def answer(self) -> None:
        """Answer one prepared item, which makes room for another one."""
        self.answered += 1
        self.preparer.resume()
        await self.settle()

    async def settle(self) -> None:
        """Wait until every job waits at the gate and none can start."""
        await until(lambda: not self.preparer._is_scheduled and self.preparer._jobs == len(self.gate.waiting))

    @property
    def jobs(self) -> list[list[Any]]:
        return self.pipeline.jobs


LONG = "word " * 1000
"""Alone more than a tick prepares inline."""


def bulk(name: str, number: int) -> list[TextItem]:
    return [f"{name}{index} " + LONG for index in range(number)]


async def test_one_tick_shares_one_job() -> None:
    """Requests that arrive together are tokenized together, on the loop if short, and each gets its outcome."""
    harness = PreparerHarness()
    pendings = [harness.add(f"text {number}") for number in range(5)]
    assert not harness.jobs
    await until(lambda: len(harness.delivered) == 5)
    assert harness.jobs == [[f"text {number}" for number in range(5)]]
    assert [(pending, index) for pending, index, _ in harness.delivered] == [(pending, 0) for pending in pendings]
    assert not harness.gate.waiting
    assert all(pending.prepare_seconds > 0 for pending in pendings)


async def test_outcomes_keep_their_items() -> None:
    """Each outcome, errors included, belongs to its own input."""
    harness = PreparerHarness()
    pending = harness.add("a b", [-1], "a b c")
    await until(lambda: len(harness.delivered) == 3)
    tokens = [outcome.tokens if isinstance(outcome, Prepared) else outcome for _, _, outcome in harness.delivered]
    assert tokens[::2] == [2, 3]
    assert isinstance(tokens[1], InvalidValue)
    assert [(each, index) for each, index, _ in harness.delivered] == [(pending, index) for index in range(3)]


async def test_jobs_are_bounded() -> None:
    """No job holds more than JOB_ITEMS items."""
    harness = PreparerHarness()
    for number in range(JOB_ITEMS + 10):
        harness.add(f"{number}")
    await until(lambda: len(harness.delivered) == JOB_ITEMS + 10)
    assert [len(job) for job in harness.jobs] == [JOB_ITEMS, 10]


async def test_long_work_goes_to_a_thread() -> None:
    """The loop does at most INLINE_TOKENS per tick, also over several small jobs."""
    harness = PreparerHarness()
    harness.add(LONG)
    await until(lambda: bool(harness.gate.waiting))
    assert not harness.jobs
    harness.gate.let_go()
    await until(lambda: len(harness.delivered) == 1)
    third = "x" * (INLINE_TOKENS // 32)
    for _ in range(4 * JOB_ITEMS):
        harness.add(third)
    await until(lambda: len(harness.gate.waiting) == 2)
    inline = sum(map(len, harness.jobs[1:3]))  # what the first tick did
    assert 0 < inline * (len(third) // 3) <= INLINE_TOKENS


class Whole(Jobs):
    """Counts a text in full, whatever its length."""

    def estimate(self, item: AnyItem) -> int:
        assert isinstance(item, str)
        return len(item) // 4 + 1


HUGE = "x" * 4 * JOB_TOKENS
"""One text that alone is more than a job."""


async def test_texts_that_cannot_be_cut_leave_a_thread_to_the_others() -> None:
    """Of two huge texts one is tokenized at a time, and a long text runs beside it."""
    harness = PreparerHarness(pipeline=Whole())
    harness.add(HUGE)
    harness.add("short", HUGE, "short too")
    harness.add(*["long" * 1000] * 2)
    await until(lambda: len(harness.gate.waiting) == 2)
    harness.gate.waiting.pop().set_result(None)
    await until(lambda: len(harness.delivered) == 3)
    assert [len(item) for item in harness.jobs[0]] == [5, 4000, 4000]
    await until(lambda: not harness.preparer._is_scheduled)
    assert len(harness.gate.waiting) == 1
    harness.gate.let_go()
    await until(lambda: len(harness.delivered) == 4)
    await until(lambda: len(harness.gate.waiting) == 1)
    harness.gate.let_go()
    await until(lambda: len(harness.delivered) == 6)
    assert [[len(item) for item in job] for job in harness.jobs[1:]] == [[len(HUGE)], [9], [len(HUGE)]]


async def test_huge_texts_never_take_every_thread() -> None:
    """Even if no other work is queued, one thread stays free."""
    harness = PreparerHarness(pipeline=Whole())
    for _ in range(3):
        harness.add(HUGE)
    await until(lambda: len(harness.gate.waiting) == 1)
    await until(lambda: not harness.preparer._is_scheduled)
    assert len(harness.gate.waiting) == 1
    harness.add("long" * 1000)
    await until(lambda: len(harness.gate.waiting) == 2)
    harness.gate.waiting.pop().set_result(None)
    await until(lambda: len(harness.delivered) == 1)
    for done in range(2, 5):
        await until(lambda: len(harness.gate.waiting) == 1)
        harness.gate.let_go()
        await until(lambda done=done: len(harness.delivered) == done)  # type: ignore[misc]


async def test_huge_texts_whose_caller_left_are_not_tokenised() -> None:
    """The next one in the queue is tokenized instead."""
    harness = PreparerHarness(pipeline=Whole())
    harness.add(HUGE)
    await until(lambda: len(harness.gate.waiting) == 1)
    cancelled, stays = harness.add(HUGE), harness.add(HUGE)
    cancelled.future.cancel()
    harness.gate.let_go()
    await until(lambda: len(harness.gate.waiting) == 1)
    harness.gate.let_go()
    await until(lambda: len(harness.delivered) == 2)
    assert harness.delivered[1][0] is stays


async def test_short_texts_do_not_wait_for_threads() -> None:
    """While all threads are busy, new short texts are tokenized on the loop, a few per tick."""
    harness = PreparerHarness(count=1)
    harness.add(LONG)
    await until(lambda: len(harness.gate.waiting) == 1)
    harness.add("hello")
    await until(lambda: harness.jobs == [["hello"]])
    cancelled = harness.add("gone")
    cancelled.future.cancel()
    harness.add(LONG)
    harness.add("one", LONG, "two")
    for number in range(JOB_ITEMS + 10):
        harness.add(f"{number}")
    harness.add(*bulk("b", 200))
    await until(lambda: not harness.preparer._is_scheduled)
    assert harness.jobs[1] == ["one", *map(str, range(JOB_ITEMS - 1))]
    assert harness.jobs[2] == list(map(str, range(JOB_ITEMS - 1, JOB_ITEMS + 10)))
    assert len(harness.jobs) == 3
    assert len(harness.gate.waiting) == 1
    while len(harness.delivered) < JOB_ITEMS + 10 + 5 + 200:
        await until(lambda: bool(harness.gate.waiting))
        harness.gate.let_go()
        seen = len(harness.delivered)
        await until(lambda seen=seen: len(harness.delivered) > seen)  # type: ignore[misc]
    assert len({(id(pending), index) for pending, index, _ in harness.delivered}) == len(harness.delivered)


async def test_jobs_are_bounded_in_tokens_too() -> None:
    """Two items of a third of the token limit each fill a job."""
    harness = PreparerHarness(pipeline=Whole())
    third = "x" * (4 * JOB_TOKENS // 3)
    harness.add(*[third] * 3)
    await until(lambda: len(harness.gate.waiting) == 2)
    harness.gate.let_go()
    harness.gate.let_go()
    await until(lambda: len(harness.delivered) == 3)
    assert sorted(len(job) for job in harness.jobs) == [1, 2]


async def test_interactive_goes_before_bulk() -> None:
    """Interactive work goes first in any order of arrival; bulk requests take turns."""
    harness = PreparerHarness(count=1)
    harness.add(*bulk("a", 200))
    harness.add(*bulk("b", 200))
    harness.add("single")
    jobs = []
    for number in range(1, 4):
        await until(lambda: bool(harness.gate.waiting))
        harness.gate.let_go()
        await until(lambda number=number: len(harness.jobs) == number)  # type: ignore[misc]
        jobs.append([str(item).split(maxsplit=1)[0] for item in harness.jobs[-1]])
    assert [(job[0], job[1], job[-1]) for job in jobs] == [
        ("single", "a0", "a62"),
        ("b0", "b1", "b63"),
        ("a63", "a64", "a126"),
    ]
    for call in harness.gate.waiting:
        call.cancel()
    await until(lambda: not harness.preparer._is_scheduled)


async def test_bulk_is_prepared_only_so_far_ahead() -> None:
    """At most AHEAD items are prepared ahead; more are prepared as those leave, until all are done."""
    harness = PreparerHarness()
    harness.add("a single text, so that jobs and AHEAD do not end together")
    pending = harness.add(*map(str, range(1000)))
    await until(lambda: len(harness.delivered) > AHEAD)
    await until(lambda: not harness.preparer._is_scheduled)
    assert len(harness.delivered) == AHEAD + 1
    del harness.delivered[0]
    moved = 0
    while moved < 1000:
        harness.preparer.record_dispatched(pending, 1)
        moved += 1
        await until(lambda: not harness.preparer._is_scheduled)
        assert len(harness.delivered) - moved <= AHEAD
        assert len(harness.delivered) == 1000 or len(harness.delivered) - moved > AHEAD // 2 - 1
    assert [index for _, index, _ in harness.delivered] == list(range(1000))


class Light(Jobs):
    @property
    def work(self) -> WorkWeight:
        return "light"


async def test_turns_do_not_accumulate() -> None:
    """Two bulk requests take turns, also after the engines took much of one at once."""
    harness = PreparerHarness(count=1)
    requests = {"a": harness.add(*bulk("a", 600)), "b": harness.add(*bulk("b", 600))}

    async def turn() -> str:
        """Return the name of the request whose items are prepared next."""
        done = len(harness.jobs)
        await until(lambda: bool(harness.gate.waiting))
        harness.gate.let_go()
        await until(lambda: len(harness.jobs) > done and bool(harness.gate.waiting))
        return str(harness.jobs[-1][0])[0]

    order = ""
    for _ in range(5):
        order += (name := await turn())
        if name == "b":
            harness.preparer.record_dispatched(requests[name], JOB_ITEMS)
    assert (order, requests["a"].ahead) == ("ababa", 3 * JOB_ITEMS)
    harness.preparer.record_dispatched(requests["a"], 3 * JOB_ITEMS)
    for _ in range(8):
        order += (name := await turn())
        harness.preparer.record_dispatched(requests[name], JOB_ITEMS)
    assert order == "ababababababa"
    harness.gate.waiting[0].cancel()
    await until(lambda: not harness.preparer._is_scheduled)


async def test_light_work_needs_no_thread() -> None:
    """Light items run on the loop in bounded jobs, interactive ones first, whatever their length and number."""
    harness = PreparerHarness(pipeline=Light())
    harness.add(*bulk("b", 100))
    harness.add("x" * (5 * JOB_TOKENS))
    for number in range(JOB_ITEMS + 10):
        harness.add(f"{number}")
    await until(lambda: len(harness.jobs) == 1)
    assert len(harness.delivered) == JOB_ITEMS
    assert harness.jobs[0][1:] == [*map(str, range(JOB_ITEMS - 1))]
    await until(lambda: len(harness.delivered) == JOB_ITEMS + 10 + 1 + 100)
    assert [len(job) for job in harness.jobs] == [JOB_ITEMS, JOB_ITEMS, 175 - 2 * JOB_ITEMS]
    assert not harness.gate.waiting
    harness.add("gone").future.cancel()
    await until(lambda: not harness.preparer._is_scheduled)
    assert len(harness.jobs) == 3


async def test_short_work_beside_busy_threads_is_looked_at_once() -> None:
    """A thousand waiting requests do not make each tick longer."""
    harness = PreparerHarness(count=1)
    harness.add(LONG)
    await until(lambda: bool(harness.gate.waiting))
    pendings = [harness.add(f"{number} " + "word " * 40) for number in range(300)]
    looked = 0

    class Watched(list[int]):
        def __getitem__(self, index: Any) -> Any:
            nonlocal looked
            looked += 1
            return super().__getitem__(index)

    for pending in pendings:
        pending.estimates = Watched(pending.estimates)
    await until(lambda: len(harness.delivered) == 300)
    assert looked < 300 * 10
    harness.gate.waiting.pop().cancel()
    await until(lambda: not harness.preparer._is_scheduled)


async def test_cancelled_requests_are_not_prepared() -> None:
    """A request whose caller left costs no work."""
    harness = PreparerHarness()
    cancelled, stays = harness.add("gone"), harness.add("stays")
    cancelled.future.cancel()
    await until(lambda: bool(harness.delivered))
    assert harness.jobs == [["stays"]]
    assert harness.delivered[0][0] is stays


@pytest.mark.parametrize("bug", ["raises", "short"])
async def test_a_bug_in_the_pipeline_is_every_items_error(bug: str) -> None:
    """When prepare raises or returns too few outcomes, every item fails, and the next job works."""
    harness = PreparerHarness()

    def explode(outcomes: list[Prepared | ShoalError]) -> list[Prepared | ShoalError]:
        if bug == "raises":
            raise ZeroDivisionError
        return outcomes[1:]

    harness.pipeline.answer = explode
    harness.add("a", "b")
    await until(lambda: len(harness.delivered) == 2)
    assert all(isinstance(outcome, InternalError) for _, _, outcome in harness.delivered)
    harness.pipeline.answer = lambda outcomes: outcomes
    harness.add("c")
    await until(lambda: len(harness.delivered) == 3)
    assert isinstance(harness.delivered[2][2], Prepared)


async def test_a_bug_of_one_item_does_not_fail_the_job() -> None:
    """The other items of the job are prepared again, each by itself."""
    harness = PreparerHarness()

    def explode(outcomes: list[Prepared | ShoalError]) -> list[Prepared | ShoalError]:
        if any(isinstance(one, Prepared) and one.tokens == 4 for one in outcomes):
            raise ZeroDivisionError
        return outcomes

    harness.pipeline.answer = explode
    before, bad, after = harness.add("a b", "c"), harness.add("one", "this one is bad"), harness.add("d")
    await until(lambda: len(harness.delivered) == 5)
    assert [(pending, index) for pending, index, _ in harness.delivered] == [
        (before, 0), (before, 1), (bad, 0), (bad, 1), (after, 0)
    ]  # fmt: skip
    outcomes = [outcome for _, _, outcome in harness.delivered]
    assert [one.tokens for one in outcomes if isinstance(one, Prepared)] == [2, 1, 1]
    assert [str(one) for one in outcomes[2:4]] == ["preparing the input failed: ZeroDivisionError()"] * 2
    assert len(harness.jobs) == 4


async def test_a_cancelled_job_gives_its_thread_back() -> None:
    """When the pool closes, nothing is delivered and nothing is blocked."""
    harness = PreparerHarness(count=1)
    harness.add(LONG)
    await until(lambda: bool(harness.gate.waiting))
    harness.gate.waiting.pop().cancel()
    harness.add(LONG)
    await until(lambda: bool(harness.gate.waiting))
    harness.gate.let_go()
    await until(lambda: len(harness.delivered) == 1)
    assert len(harness.jobs) == 1


async def test_a_job_that_gets_no_thread_fails_its_items() -> None:
    """The items of a job that could not start fail, and the next job is tried."""
    harness = PreparerHarness(count=1)
    harness.add(LONG, "short")
    await until(lambda: bool(harness.gate.waiting))
    harness.gate.waiting.pop().set_exception(Unavailable("no thread"))
    await until(lambda: len(harness.delivered) == 2)
    assert [str(outcome) for _, _, outcome in harness.delivered] == ["no thread"] * 2
    harness.add(LONG)
    await until(lambda: bool(harness.gate.waiting))
    harness.gate.let_go()
    await until(lambda: len(harness.delivered) == 3)
    assert isinstance(harness.delivered[-1][2], Prepared)


class Heavy(Jobs):
    @property
    def work(self) -> WorkWeight:
        return "heavy"


async def test_heavy_items_are_jobs_of_their_own() -> None:
    """Each heavy item runs in a thread, however short; all threads are used, and requests take turns."""
    harness = PreparerHarness(pipeline=Heavy())
    harness.add(*bulk("b", 100))
    harness.add("one")
    await until(lambda: len(harness.gate.waiting) == 2)
    assert not harness.jobs
    for done in range(1, 5):
        harness.gate.let_go()
        await until(lambda done=done: len(harness.jobs) == done and len(harness.gate.waiting) == 2)  # type: ignore[misc]
    assert [len(job) for job in harness.jobs] == [1] * 4
    assert ["one"] in harness.jobs[:3]
    for gate in harness.gate.waiting:
        gate.cancel()


class Holding(Heavy):
    @property
    def max_held_items(self) -> int:
        return 3


async def test_the_pipelines_limit_of_prepared_items_holds() -> None:
    """Items in work count too; the next one starts when one is answered."""
    harness = PreparerHarness(pipeline=Holding())
    harness.add(*bulk("b", 10))
    for delivered, in_work in enumerate((2, 2, 1)):
        await until(lambda want=(delivered, in_work): (len(harness.delivered), len(harness.gate.waiting)) == want)  # type: ignore[misc]
        harness.gate.let_go()
    await until(lambda: len(harness.delivered) == 3)
    harness.preparer.resume()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not harness.gate.waiting
    harness.answered = 1
    harness.preparer.resume()
    await until(lambda: len(harness.gate.waiting) == 1)
    harness.gate.waiting.pop().cancel()


async def test_cancelled_heavy_requests_are_not_prepared() -> None:
    """Nothing is decoded for a caller that left."""
    harness = PreparerHarness(count=1, pipeline=Heavy())
    harness.add("held")
    await until(lambda: len(harness.gate.waiting) == 1)
    cancelled = harness.add("gone")
    harness.add("stays")
    cancelled.future.cancel()
    harness.gate.let_go()
    await until(lambda: len(harness.gate.waiting) == 1)
    harness.gate.let_go()
    await until(lambda: len(harness.delivered) == 2)
    assert harness.jobs == [["held"], ["stays"]]


@pytest.mark.parametrize("kind", [Heavy, Whole])
async def test_clients_take_turns_with_large_items(kind: type[Jobs]) -> None:
    """One item of b behind 200 of a, in one request or in many, waits for those in threads and for one turn of a."""
    for requests in (1, 200):
        harness = PreparerHarness(count=2, pipeline=kind())
        a = [harness.add(*[HUGE] * (200 // requests), client="a", traffic="bulk") for _ in range(requests)]
        await harness.settle()
        b = harness.add(HUGE, client="b", traffic="bulk")
        order = [await harness.prepare_next() for _ in range(201)]
        assert order.index((b, 0)) <= harness.gate.count + 1
        order.remove((b, 0))
        assert order == ([(a[0], index) for index in range(200)] if requests == 1 else [(each, 0) for each in a])


async def test_large_items_of_classes_share_as_in_the_planner() -> None:
    """Interactive items go first at once, bulk ones get one job in nine, and a class that was not served for
    max_age_ms goes next."""
    harness = PreparerHarness(count=1, pipeline=Heavy())
    harness.add(*["text"] * 200, client="a")
    await harness.settle()
    for number in range(100):
        harness.add("text", client=f"b{number % 3}")
    classes = [request.traffic for request, _ in [await harness.prepare_next() for _ in range(91)]]
    assert classes[:2] == ["bulk", "interactive"]
    assert Counter(classes[1:]) == {"interactive": 10 * WEIGHTS["interactive"], "bulk": 10 * WEIGHTS["bulk"]}
    classes = []
    for _ in range(11):
        harness.now += 0.3
        classes.append((await harness.prepare_next())[0].traffic)
    assert {*classes[1::2]} != {*classes[2::2]}
    assert Counter(classes[1:]) == {"interactive": 5, "bulk": 5}
    harness.gate.waiting.pop().cancel()


async def test_a_large_item_that_arrives_during_a_bulk_job_goes_next() -> None:
    """It waits for the job that runs, not for another bulk one."""
    harness = PreparerHarness(count=1, pipeline=Heavy())
    bulk_request = harness.add(*["text"] * 20, client="a")
    await harness.settle()
    harness.now = 3.0
    request = harness.add("text", client="b")
    await harness.settle()
    harness.now = 10.0
    order = [(await harness.prepare_next())[0] for _ in range(3)]
    assert order == [bulk_request, request, bulk_request]
    harness.gate.waiting.pop().cancel()


async def test_large_requests_that_are_over_leave_the_queue_at_once() -> None:
    """A discarded request is gone although nothing can start, and one that is done takes no turn of its class."""
    harness = PreparerHarness(count=1, pipeline=Heavy())
    held = harness.add("held")
    gone, stays = [harness.add("gone", client="a") for _ in range(40)], harness.add("stays", client="a")
    bulk_request = harness.add(*["text"] * 9, client="b")
    await harness.settle()
    for request in gone:
        request.future.cancel()
    for request in gone[:20]:
        harness.preparer.discard(request)
        harness.preparer.discard(request)
    assert harness.preparer._large_queue.requests == 22
    assert [(await harness.prepare_next())[0] for _ in range(3)] == [held, bulk_request, stays]
    late = harness.add("late", client="a")
    late.future.cancel()
    bulk_request.future.cancel()
    await harness.prepare_next()
    assert (harness.preparer._large_queue.requests, harness.gate.waiting) == (0, [])


Step = tuple[str, int, int]
STEPS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 2), st.integers(1, 12)),
    st.tuples(st.sampled_from(["leave", "prepared", "answered"]), st.integers(0, 50), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEPS, max_size=60))
def test_large_items_are_prepared_once_and_in_order(steps: list[Step]) -> None:
    """Whatever arrives, leaves or is answered when: every item of a request that stays is prepared once, the items of
    each request and the requests of a client and class start in order, and the pipeline's limit holds."""

    async def main() -> None:
        harness, requests = PreparerHarness(pipeline=Holding()), list[RequestState]()
        for action, number, size in steps:
            if action == "add":
                requests.append(harness.add(*["text"] * size, client=f"client {number}"))
            elif action == "leave" and requests:
                request = requests[number % len(requests)]
                request.future.cancel()
                harness.preparer.discard(request)
            elif action == "prepared" and harness.gate.waiting:
                harness.gate.waiting.pop(number % len(harness.gate.waiting)).set_result(None)
            elif action == "answered" and harness.answered < len(harness.delivered):
                await harness.answer()
            harness.now += number / 1000
            await harness.settle()
            assert len(harness.delivered) + len(harness.gate.waiting) - harness.answered <= 3
        while harness.gate.waiting or harness.answered < len(harness.delivered):
            if harness.gate.waiting:
                await harness.prepare_next()
            else:
                await harness.answer()
        prepared = Counter((id(request), index) for request, index, _ in harness.delivered)
        assert set(prepared.values()) <= {1}
        for request in requests:
            missing = [index for index in range(len(request.tokens)) if not prepared[id(request), index]]
            assert not missing or request.done
            assert request.done or not request.waiting
        assert harness.preparer._large_queue.requests == 0
        started = [call.args[0][0] for call in harness.gate.calls]
        for request in requests:
            own = [index for each, index in started if each is request]
            assert own == list(range(len(own)))
        for flow in {(request.ctx.client, request.traffic) for request in requests}:
            first = [each for each, index in started if (each.ctx.client, each.traffic) == flow and not index]
            assert first == [each for each in requests if each in first]

    run_virtual(main)
