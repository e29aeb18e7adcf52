from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

from shoal.backends.fake.model import FakePipeline, FakeScript
from shoal.core.protocols import Prepared, WorkWeight
from shoal.core.scheduling.admission import classify_traffic
from shoal.core.scheduling.preparation import AHEAD, INLINE_TOKENS, JOB_ITEMS, JOB_TOKENS, Outcome, Preparer
from shoal.core.scheduling.request_state import RequestState
from shoal.core.threads import Threads
from shoal.errors import InternalError, InvalidValue, ShoalError, Unavailable
from shoal.types import BatchTask, Embed, TextItem
from shoal.types import Item as AnyItem
from tests.unit.core.conftest import until
from tests.unit.core.lanes import context

T = TypeVar("T")


class Jobs(FakePipeline):
    """Keeps the inputs of each prepare call; `answer` replaces what it answers."""

    def __init__(self) -> None:
        super().__init__(FakeScript())
        self.jobs: list[list[Any]] = []
        self.answer: Callable[[list[Prepared | ShoalError]], list[Prepared | ShoalError]] = lambda outcomes: outcomes

    def prepare(self, items: Sequence[tuple[BatchTask, AnyItem]]) -> list[Prepared | ShoalError]:
        self.jobs.append([item for _, item in items])
        return self.answer(super().prepare(items))


class Gate(Threads):
    """Threads that hold every call until the test lets one go."""

    def __init__(self, count: int = 2) -> None:
        super().__init__("gate", count)
        self.held: list[asyncio.Future[None]] = []

    async def run(self, call: Callable[[], T]) -> T:
        self.held.append(gate := asyncio.get_running_loop().create_future())
        await gate
        return call()

    def let_go(self) -> None:
        self.held.pop(0).set_result(None)


class Desk:
    """An intake, its jobs, its threads and what it delivered."""

    def __init__(self, count: int = 2, pipeline: Jobs | None = None) -> None:
        self.pipeline, self.gate = pipeline or Jobs(), Gate(count)
        self.delivered: list[Outcome] = []
        self.answered = 0
        self.intake = Preparer(
            self.pipeline, self.gate, self.delivered.extend, lambda: len(self.delivered) - self.answered
        )

    def add(self, *inputs: TextItem) -> RequestState:
        task, ctx = Embed(model="m", inputs=list(inputs)), context()
        estimates = [self.pipeline.estimate(item) for item in task.items]
        traffic = classify_traffic(ctx, len(inputs))
        pending = RequestState(task, task.items, ctx, traffic=traffic, now=0.0, estimates=estimates)
        self.intake.add(pending)
        return pending

    @property
    def jobs(self) -> list[list[Any]]:
        return self.pipeline.jobs


LONG = "word " * 1000
"""Alone more than a tick prepares inline."""


def bulk(name: str, number: int) -> list[TextItem]:
    return [f"{name}{index} " + LONG for index in range(number)]


async def test_one_tick_shares_one_job() -> None:
    """Requests that arrive together are tokenised together, on the loop when they are short, each with its outcome."""
    desk = Desk()
    pendings = [desk.add(f"text {number}") for number in range(5)]
    assert not desk.jobs
    await until(lambda: len(desk.delivered) == 5)
    assert desk.jobs == [[f"text {number}" for number in range(5)]]
    assert [(pending, index) for pending, index, _ in desk.delivered] == [(pending, 0) for pending in pendings]
    assert not desk.gate.held
    assert all(pending.prepare_seconds > 0 for pending in pendings)


async def test_outcomes_keep_their_items() -> None:
    """Each outcome is that of its own input, errors too."""
    desk = Desk()
    pending = desk.add("a b", [-1], "a b c")
    await until(lambda: len(desk.delivered) == 3)
    tokens = [outcome.tokens if isinstance(outcome, Prepared) else outcome for _, _, outcome in desk.delivered]
    assert tokens[::2] == [2, 3]
    assert isinstance(tokens[1], InvalidValue)
    assert [(each, index) for each, index, _ in desk.delivered] == [(pending, index) for index in range(3)]


async def test_jobs_are_bounded() -> None:
    """No job holds more than JOB_ITEMS items."""
    desk = Desk()
    for number in range(JOB_ITEMS + 10):
        desk.add(f"{number}")
    await until(lambda: len(desk.delivered) == JOB_ITEMS + 10)
    assert [len(job) for job in desk.jobs] == [JOB_ITEMS, 10]


async def test_long_work_goes_to_a_thread() -> None:
    """More than INLINE_TOKENS a tick is not done on the loop: also when it comes in several small jobs."""
    desk = Desk()
    desk.add(LONG)
    await until(lambda: bool(desk.gate.held))
    assert not desk.jobs
    desk.gate.let_go()
    await until(lambda: len(desk.delivered) == 1)
    third = "x" * (INLINE_TOKENS // 32)
    for _ in range(4 * JOB_ITEMS):
        desk.add(third)
    await until(lambda: len(desk.gate.held) == 2)
    inline = sum(map(len, desk.jobs[1:3]))  # what the first tick did
    assert 0 < inline * (len(third) // 3) <= INLINE_TOKENS


class Whole(Jobs):
    """Counts a text in full, however long."""

    def estimate(self, item: AnyItem) -> int:
        assert isinstance(item, str)
        return len(item) // 4 + 1


HUGE = "x" * 4 * JOB_TOKENS
"""One text that alone is more than a job."""


async def test_texts_that_cannot_be_cut_leave_a_thread_to_the_others() -> None:
    """Two huge texts: one is tokenised at a time, and a long one beside it."""
    desk = Desk(pipeline=Whole())
    desk.add(HUGE)
    desk.add("short", HUGE, "short too")
    desk.add(*["long" * 1000] * 2)
    await until(lambda: len(desk.gate.held) == 2)
    desk.gate.held.pop().set_result(None)
    await until(lambda: len(desk.delivered) == 3)
    assert [len(item) for item in desk.jobs[0]] == [5, 4000, 4000]
    await until(lambda: not desk.intake._is_scheduled)
    assert len(desk.gate.held) == 1
    desk.gate.let_go()
    await until(lambda: len(desk.delivered) == 4)
    await until(lambda: len(desk.gate.held) == 1)
    desk.gate.let_go()
    await until(lambda: len(desk.delivered) == 6)
    assert [[len(item) for item in job] for job in desk.jobs[1:]] == [[len(HUGE)], [9], [len(HUGE)]]


async def test_huge_texts_never_take_every_thread() -> None:
    """Also when they are all that there is; the free thread is for who comes next."""
    desk = Desk(pipeline=Whole())
    for _ in range(3):
        desk.add(HUGE)
    await until(lambda: len(desk.gate.held) == 1)
    await until(lambda: not desk.intake._is_scheduled)
    assert len(desk.gate.held) == 1
    desk.add("long" * 1000)
    await until(lambda: len(desk.gate.held) == 2)
    desk.gate.held.pop().set_result(None)
    await until(lambda: len(desk.delivered) == 1)
    for done in range(2, 5):
        await until(lambda: len(desk.gate.held) == 1)
        desk.gate.let_go()
        await until(lambda done=done: len(desk.delivered) == done)  # type: ignore[misc]


async def test_huge_texts_whose_caller_left_are_not_tokenised() -> None:
    """The next one in line is."""
    desk = Desk(pipeline=Whole())
    desk.add(HUGE)
    await until(lambda: len(desk.gate.held) == 1)
    gone, stays = desk.add(HUGE), desk.add(HUGE)
    gone.future.cancel()
    desk.gate.let_go()
    await until(lambda: len(desk.gate.held) == 1)
    desk.gate.let_go()
    await until(lambda: len(desk.delivered) == 2)
    assert desk.delivered[1][0] is stays


async def test_short_texts_wait_for_no_thread() -> None:
    """While all threads are busy, what is short and new is tokenised on the loop: a little in each tick."""
    desk = Desk(count=1)
    desk.add(LONG)
    await until(lambda: len(desk.gate.held) == 1)
    desk.add("hello")
    await until(lambda: desk.jobs == [["hello"]])
    gone = desk.add("gone")
    gone.future.cancel()
    desk.add(LONG)
    desk.add("one", LONG, "two")
    for number in range(JOB_ITEMS + 10):
        desk.add(f"{number}")
    desk.add(*bulk("b", 200))
    await until(lambda: not desk.intake._is_scheduled)
    assert desk.jobs[1] == ["one", *map(str, range(JOB_ITEMS - 1))]
    assert desk.jobs[2] == list(map(str, range(JOB_ITEMS - 1, JOB_ITEMS + 10)))
    assert len(desk.jobs) == 3
    assert len(desk.gate.held) == 1
    while len(desk.delivered) < JOB_ITEMS + 10 + 5 + 200:
        await until(lambda: bool(desk.gate.held))
        desk.gate.let_go()
        seen = len(desk.delivered)
        await until(lambda seen=seen: len(desk.delivered) > seen)  # type: ignore[misc]
    assert len({(id(pending), index) for pending, index, _ in desk.delivered}) == len(desk.delivered)


async def test_jobs_are_bounded_in_tokens_too() -> None:
    """Items of a third of a job each: two fill one."""
    desk = Desk(pipeline=Whole())
    third = "x" * (4 * JOB_TOKENS // 3)
    desk.add(*[third] * 3)
    await until(lambda: len(desk.gate.held) == 2)
    desk.gate.let_go()
    desk.gate.let_go()
    await until(lambda: len(desk.delivered) == 3)
    assert sorted(len(job) for job in desk.jobs) == [1, 2]


async def test_interactive_goes_before_bulk() -> None:
    """In whatever order they came; in between, bulk requests take turns."""
    desk = Desk(count=1)
    desk.add(*bulk("a", 200))
    desk.add(*bulk("b", 200))
    desk.add("single")
    jobs = []
    for number in range(1, 4):
        await until(lambda: bool(desk.gate.held))
        desk.gate.let_go()
        await until(lambda number=number: len(desk.jobs) == number)  # type: ignore[misc]
        jobs.append([str(item).split(maxsplit=1)[0] for item in desk.jobs[-1]])
    assert [(job[0], job[1], job[-1]) for job in jobs] == [
        ("single", "a0", "a62"),
        ("b0", "b1", "b63"),
        ("a63", "a64", "a126"),
    ]
    for held in desk.gate.held:
        held.cancel()
    await until(lambda: not desk.intake._is_scheduled)


async def test_bulk_is_prepared_only_so_far_ahead() -> None:
    """Never more than AHEAD items stand prepared; as they leave for engines more are prepared, and in the end all."""
    desk = Desk()
    desk.add("a single text, so that jobs and AHEAD do not end together")
    pending = desk.add(*map(str, range(1000)))
    await until(lambda: len(desk.delivered) > AHEAD)
    await until(lambda: not desk.intake._is_scheduled)
    assert len(desk.delivered) == AHEAD + 1
    del desk.delivered[0]
    moved = 0
    while moved < 1000:
        desk.intake.record_dispatched(pending, 1)
        moved += 1
        await until(lambda: not desk.intake._is_scheduled)
        assert len(desk.delivered) - moved <= AHEAD
        assert len(desk.delivered) == 1000 or len(desk.delivered) - moved > AHEAD // 2 - 1
    assert [index for _, index, _ in desk.delivered] == list(range(1000))


class Light(Jobs):
    @property
    def work(self) -> WorkWeight:
        return "light"


async def test_turns_do_not_add_up() -> None:
    """Two bulk requests take turns, also after much of one left for engines at once while it waited for its own."""
    desk = Desk(count=1)
    requests = {"a": desk.add(*bulk("a", 600)), "b": desk.add(*bulk("b", 600))}

    async def turn() -> str:
        """Whose items are prepared next."""
        done = len(desk.jobs)
        await until(lambda: bool(desk.gate.held))
        desk.gate.let_go()
        await until(lambda: len(desk.jobs) > done and bool(desk.gate.held))
        return str(desk.jobs[-1][0])[0]

    turns = ""
    for _ in range(5):
        turns += (name := await turn())
        if name == "b":
            desk.intake.record_dispatched(requests[name], JOB_ITEMS)
    assert (turns, requests["a"].ahead) == ("ababa", 3 * JOB_ITEMS)
    desk.intake.record_dispatched(requests["a"], 3 * JOB_ITEMS)
    for _ in range(8):
        turns += (name := await turn())
        desk.intake.record_dispatched(requests[name], JOB_ITEMS)
    assert turns == "ababababababa"
    desk.gate.held[0].cancel()
    await until(lambda: not desk.intake._is_scheduled)


async def test_light_work_needs_no_thread() -> None:
    """However long the texts and however many: on the loop, a bounded job a tick, the interactive ones first."""
    desk = Desk(pipeline=Light())
    desk.add(*bulk("b", 100))
    desk.add("x" * (5 * JOB_TOKENS))
    for number in range(JOB_ITEMS + 10):
        desk.add(f"{number}")
    await until(lambda: len(desk.jobs) == 1)
    assert len(desk.delivered) == JOB_ITEMS
    assert desk.jobs[0][1:] == [*map(str, range(JOB_ITEMS - 1))]
    await until(lambda: len(desk.delivered) == JOB_ITEMS + 10 + 1 + 100)
    assert [len(job) for job in desk.jobs] == [JOB_ITEMS, JOB_ITEMS, 175 - 2 * JOB_ITEMS]
    assert not desk.gate.held
    desk.add("gone").future.cancel()
    await until(lambda: not desk.intake._is_scheduled)
    assert len(desk.jobs) == 3


async def test_short_work_beside_busy_threads_is_looked_at_once() -> None:
    """A thousand requests that wait for their turn do not make each tick longer."""
    desk = Desk(count=1)
    desk.add(LONG)
    await until(lambda: bool(desk.gate.held))
    pendings = [desk.add(f"{number} " + "word " * 40) for number in range(300)]
    looked = 0

    class Watched(list[int]):
        def __getitem__(self, index: Any) -> Any:
            nonlocal looked
            looked += 1
            return super().__getitem__(index)

    for pending in pendings:
        pending.estimates = Watched(pending.estimates)
    await until(lambda: len(desk.delivered) == 300)
    assert looked < 300 * 10
    desk.gate.held.pop().cancel()
    await until(lambda: not desk.intake._is_scheduled)


async def test_requests_that_are_over_are_not_prepared() -> None:
    """Whose caller left while it waited costs no work."""
    desk = Desk()
    gone, stays = desk.add("gone"), desk.add("stays")
    gone.future.cancel()
    await until(lambda: bool(desk.delivered))
    assert desk.jobs == [["stays"]]
    assert desk.delivered[0][0] is stays


@pytest.mark.parametrize("bug", ["raises", "short"])
async def test_a_bug_in_the_pipeline_is_every_items_error(bug: str) -> None:
    """It raises, or answers too few: nobody is left waiting, and the next job is well."""
    desk = Desk()

    def explode(outcomes: list[Prepared | ShoalError]) -> list[Prepared | ShoalError]:
        if bug == "raises":
            raise ZeroDivisionError
        return outcomes[1:]

    desk.pipeline.answer = explode
    desk.add("a", "b")
    await until(lambda: len(desk.delivered) == 2)
    assert all(isinstance(outcome, InternalError) for _, _, outcome in desk.delivered)
    desk.pipeline.answer = lambda outcomes: outcomes
    desk.add("c")
    await until(lambda: len(desk.delivered) == 3)
    assert isinstance(desk.delivered[2][2], Prepared)


async def test_a_bug_that_one_request_meets_is_not_its_neighbours() -> None:
    """Those that were prepared together with it are prepared again, each by itself."""
    desk = Desk()

    def explode(outcomes: list[Prepared | ShoalError]) -> list[Prepared | ShoalError]:
        if any(isinstance(one, Prepared) and one.tokens == 4 for one in outcomes):
            raise ZeroDivisionError
        return outcomes

    desk.pipeline.answer = explode
    before, bad, after = desk.add("a b", "c"), desk.add("one", "this one is bad"), desk.add("d")
    await until(lambda: len(desk.delivered) == 5)
    assert [(pending, index) for pending, index, _ in desk.delivered] == [
        (before, 0), (before, 1), (bad, 0), (bad, 1), (after, 0)
    ]  # fmt: skip
    outcomes = [outcome for _, _, outcome in desk.delivered]
    assert [one.tokens for one in outcomes if isinstance(one, Prepared)] == [2, 1, 1]
    assert [str(one) for one in outcomes[2:4]] == ["preparing the input failed: ZeroDivisionError()"] * 2
    assert len(desk.jobs) == 4


async def test_a_cancelled_job_gives_its_thread_back() -> None:
    """When the pool is closed under it nothing is delivered, and nothing is blocked."""
    desk = Desk(count=1)
    desk.add(LONG)
    await until(lambda: bool(desk.gate.held))
    desk.gate.held.pop().cancel()
    desk.add(LONG)
    await until(lambda: bool(desk.gate.held))
    desk.gate.let_go()
    await until(lambda: len(desk.delivered) == 1)
    assert len(desk.jobs) == 1


async def test_a_job_that_gets_no_thread_fails_its_items() -> None:
    """Nobody waits for what never began, and the next job is tried again."""
    desk = Desk(count=1)
    desk.add(LONG, "short")
    await until(lambda: bool(desk.gate.held))
    desk.gate.held.pop().set_exception(Unavailable("no thread"))
    await until(lambda: len(desk.delivered) == 2)
    assert [str(outcome) for _, _, outcome in desk.delivered] == ["no thread"] * 2
    desk.add(LONG)
    await until(lambda: bool(desk.gate.held))
    desk.gate.let_go()
    await until(lambda: len(desk.delivered) == 3)
    assert isinstance(desk.delivered[-1][2], Prepared)


class Heavy(Jobs):
    @property
    def work(self) -> WorkWeight:
        return "heavy"


async def test_heavy_items_are_jobs_of_their_own() -> None:
    """However short: each in a thread, all threads busy, and requests take turns."""
    desk = Desk(pipeline=Heavy())
    desk.add(*bulk("b", 100))
    desk.add("one")
    await until(lambda: len(desk.gate.held) == 2)
    assert not desk.jobs
    for done in range(1, 5):
        desk.gate.let_go()
        await until(lambda done=done: len(desk.jobs) == done and len(desk.gate.held) == 2)  # type: ignore[misc]
    assert [len(job) for job in desk.jobs] == [1] * 4
    assert ["one"] in desk.jobs[:3]
    for gate in desk.gate.held:
        gate.cancel()


class Holding(Heavy):
    @property
    def max_held_items(self) -> int:
        return 3


async def test_as_many_are_held_as_the_pipeline_allows() -> None:
    """Those in work count too; one more begins when one is answered."""
    desk = Desk(pipeline=Holding())
    desk.add(*bulk("b", 10))
    for delivered, in_work in enumerate((2, 2, 1)):
        await until(lambda want=(delivered, in_work): (len(desk.delivered), len(desk.gate.held)) == want)  # type: ignore[misc]
        desk.gate.let_go()
    await until(lambda: len(desk.delivered) == 3)
    desk.intake.resume()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not desk.gate.held
    desk.answered = 1
    desk.intake.resume()
    await until(lambda: len(desk.gate.held) == 1)
    desk.gate.held.pop().cancel()


async def test_heavy_requests_that_are_over_are_not_prepared() -> None:
    """Nothing is decoded for whoever left."""
    desk = Desk(count=1, pipeline=Heavy())
    desk.add("held")
    await until(lambda: len(desk.gate.held) == 1)
    gone = desk.add("gone")
    desk.add("stays")
    gone.future.cancel()
    desk.gate.let_go()
    await until(lambda: len(desk.gate.held) == 1)
    desk.gate.let_go()
    await until(lambda: len(desk.delivered) == 2)
    assert desk.jobs == [["held"], ["stays"]]
