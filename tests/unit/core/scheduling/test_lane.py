from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.backends.fake.model import FakePipeline, FakeScript
from shoal.core.protocols import WorkWeight
from shoal.core.scheduling.lane import Lane
from shoal.core.scheduling.planner import Wait
from shoal.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InputRejected,
    InternalError,
    InvalidValue,
    NotFinite,
    Overloaded,
    TransportFailed,
    Unavailable,
)
from shoal.types import BatchTask, Embedded, Item, TokenizedTexts, TrafficClass
from tests.unit.core.conftest import Run, gathered, until
from tests.unit.core.lanes import Reports, context, embed, engine, make_lane, right

SLOW = FakeScript(delay_ms=10)


def idle(lane: Lane) -> bool:
    """Whether no state of any request is left."""
    admission = lane.admission
    return (
        lane.queue_size == (0, 0)
        and admission.items == 0
        and admission.tokens == 0
        and all(replica.running == 0 for replica in lane.replicas)
        and not lane._requests  # the books themselves are what is tested
        and not lane._coalescer
    )


def test_lone_request_is_answered_with_its_facts(virtual: Run[None]) -> None:
    """One text is one batch of one, at once, with the true counts."""

    async def main() -> None:
        lane = make_lane(SLOW)
        answer = await lane.run(embed("a b c"), context())
        assert right(answer, ["a b c"])
        assert (answer.tokens, answer.truncated, answer.space) == ([3], 0, "s")
        assert (answer.facts.size, answer.facts.batches, answer.facts.flush) == (1, 1, "idle")
        assert answer.facts.infer_ms == pytest.approx(10, abs=0.1)
        assert answer.facts.queue_ms == pytest.approx(0, abs=0.1)
        assert idle(lane)

    virtual(main)


def test_requests_of_many_callers_share_batches(virtual: Run[None]) -> None:
    """Items gather while a slot is busy, and each caller gets its own row."""

    async def main() -> None:
        lane = make_lane(SLOW)
        texts = [f"text {number}" for number in range(33)]
        answers = await asyncio.gather(*(lane.run(embed(text), context()) for text in texts))
        assert all(right(answer, [text]) for answer, text in zip(answers, texts, strict=True))
        assert max(answer.facts.size for answer in answers) > 8
        assert idle(lane)

    virtual(main)


def test_large_request_is_split_and_put_together_in_order(virtual: Run[None]) -> None:
    """2,048 texts of mixed lengths run in many batches and come back in input order."""

    async def main() -> None:
        lane = make_lane(FakeScript(delay_ms=1, slots=2))
        texts = [" ".join(f"w{number}" for _ in range(1 + number % 40)) for number in range(2048)]
        answer = await lane.run(embed(*texts), context())
        assert right(answer, texts)
        assert answer.facts.batches >= 2048 / 64
        assert answer.tokens == [1 + number % 40 for number in range(2048)]
        assert idle(lane)

    virtual(main)


def test_identical_items_are_computed_once(virtual: Run[None]) -> None:
    """Identical items coalesce within a request and between requests, queued or running."""

    async def main() -> None:
        lane = make_lane(SLOW)
        first = asyncio.create_task(lane.run(embed("same", "same", "other"), context()))
        await until(lambda: bool(engine(lane).running))
        second = asyncio.create_task(lane.run(embed("same"), context()))
        answers = await asyncio.gather(first, second)
        assert right(answers[0], ["same", "same", "other"])
        assert right(answers[1], ["same"])
        assert sum(size for size, _ in engine(lane).batches) == 2
        assert idle(lane)

    virtual(main)


def test_follower_survives_its_leader(virtual: Run[None]) -> None:
    """The first caller of a shared item may leave; the other one still gets the answer."""

    async def main() -> None:
        lane = make_lane(SLOW)
        leader = asyncio.create_task(lane.run(embed("same"), context()))
        follower = asyncio.create_task(lane.run(embed("same"), context()))
        await until(lambda: bool(engine(lane).running))
        leader.cancel()
        assert right(await follower, ["same"])
        assert leader.cancelled()
        assert idle(lane)

    virtual(main)


def test_options_are_applied_an_item_at_a_time(virtual: Run[None]) -> None:
    """Requests with different options share a batch, and each gets its own options."""

    async def main() -> None:
        lane = make_lane(SLOW)
        whole, cut = await asyncio.gather(
            lane.run(embed("a"), context()), lane.run(embed("b", normalize=True, dimensions=5), context())
        )
        assert whole.vectors.shape == (1, 32)
        assert cut.vectors.shape == (1, 5)
        assert np.linalg.norm(cut.vectors) == pytest.approx(1, abs=1e-6)

    virtual(main)


def test_cancelled_while_queued_never_runs(virtual: Run[None]) -> None:
    """A caller that leaves removes its items from the queue and releases its permits."""

    async def main() -> None:
        lane = make_lane(SLOW)
        running = asyncio.create_task(lane.run(embed("first"), context()))
        await until(lambda: bool(engine(lane).running))
        queued = asyncio.create_task(lane.run(embed("gone"), context()))
        await until(lambda: lane.queue_size[0] == 1)
        queued.cancel()
        await gathered(queued)
        assert (lane.queue_size, lane.admission.items) == ((0, 0), 1)
        assert right(await running, ["first"])
        assert len(engine(lane).batches) == 1
        assert idle(lane)

    virtual(main)


@pytest.mark.parametrize("leave", ["cancelled", "late"])
def test_unneeded_prepared_items_are_freed(virtual: Run[None], monkeypatch: pytest.MonkeyPatch, leave: str) -> None:
    """Prepared inputs are freed at once, not with the lane's next work: images hold memory that other models wait
    for."""

    async def main() -> None:
        lane = make_lane(SLOW)
        made: list[weakref.ref[Any]] = []
        prepare = lane.pipeline.prepare

        def watched(items: Any) -> Any:
            entries: Any = prepare(items)
            made.extend(weakref.ref(entry.tensors["ids"]) for entry in entries)
            return entries

        monkeypatch.setattr(lane.pipeline, "prepare", watched)
        running = asyncio.create_task(lane.run(embed("first"), context()))
        await until(lambda: bool(engine(lane).running))
        made.clear()
        late = context(0.005 if leave == "late" else 30.0)
        waiting = asyncio.create_task(lane.run(embed("a", "b", "c"), late))
        await until(lambda: lane.queue_size[0] == len(made) == 3)
        if leave == "cancelled":
            waiting.cancel()
        await gathered(waiting)
        del waiting
        assert not running.done()
        assert not [one for one in made if one() is not None]
        await running
        assert idle(lane)

    virtual(main)


class Holding(FakePipeline):
    @property
    def work(self) -> WorkWeight:
        return "heavy"

    @property
    def max_held_items(self) -> int:
        return 5


@pytest.mark.parametrize("seed", range(20))
def test_a_lane_holds_no_more_than_its_pipeline_allows(
    virtual: Run[None], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The bound holds whether requests are answered, refused, late or abandoned, and none of them waits forever."""

    async def main() -> None:
        draw = random.Random(seed)
        lane = make_lane(FakeScript(delay_ms=10, slots=draw.choice((1, 2))), pipeline=Holding)
        made: list[weakref.ref[Any]] = []
        peak = 0
        prepare = lane.pipeline.prepare

        def watched(items: Any) -> Any:
            nonlocal peak
            entries: Any = prepare(items)
            made.extend(weakref.ref(entry.tensors["ids"]) for entry in entries)
            made[:] = [one for one in made if one() is not None]
            peak = max(peak, len(made))
            return entries

        monkeypatch.setattr(lane.pipeline, "prepare", watched)
        calls = []
        for number in range(40):
            words = [f"{number} {index}" for index in range(draw.randint(1, 8))]
            if draw.random() < 0.1:
                words[-1] = "reject-item"
            patience = draw.choice((30.0, 30.0, 30.0, 0.03))
            calls.append(asyncio.create_task(lane.run(embed(*words), context(patience))))
            if draw.random() < 0.5:
                await asyncio.sleep(draw.choice((0.0, 0.005)))
            if draw.random() < 0.2:
                draw.choice(calls).cancel()
        start = asyncio.get_running_loop().time()
        outcomes = await gathered(*calls)
        assert asyncio.get_running_loop().time() - start < 25.0
        answered = [outcome for outcome in outcomes if isinstance(outcome, Embedded)]
        assert len(answered) > 5
        await until(lambda: idle(lane))
        assert 1 < peak <= 2 * 5  # the batch that is being answered is let go of a moment later

    virtual(main)


def test_a_hanging_engine_does_not_exceed_the_limit(virtual: Run[None]) -> None:
    """Nothing more is prepared until a prepared item is answered or given up."""

    async def main() -> None:
        lane = make_lane(FakeScript(delay_ms=5000), pipeline=Holding)
        calls = [asyncio.create_task(lane.run(embed(f"{number}"), context(1.0))) for number in range(30)]
        await asyncio.sleep(0.5)
        assert lane.queue_size[0] + sum(rows for rows, _ in engine(lane).batches) == 5
        assert all(isinstance(outcome, DeadlineExceeded) for outcome in await gathered(*calls))
        await until(lambda: idle(lane))

    virtual(main)


@pytest.mark.parametrize("traffic", ["bulk", "interactive"])
@pytest.mark.parametrize("requests", [1, 200])
def test_an_image_does_not_wait_for_those_of_another_client(
    virtual: Run[None], monkeypatch: pytest.MonkeyPatch, requests: int, traffic: TrafficClass
) -> None:
    """b's one item, prepared and answered among the first, beside 200 of a: each of a request, or all of one."""

    async def main() -> None:
        lane = make_lane(FakeScript(delay_ms=10), pipeline=Holding)
        prepared: list[Any] = []
        prepare = lane.pipeline.prepare

        def watched(items: Any) -> Any:
            prepared.extend(item for _, item in items)
            return prepare(items)

        monkeypatch.setattr(lane.pipeline, "prepare", watched)
        texts = [[f"a {number} {index}" for index in range(200 // requests)] for number in range(requests)]
        tasks = [asyncio.create_task(lane.run(embed(*each), context(client="a", traffic="bulk"))) for each in texts]
        await until(lambda: lane._count_held_items() == 5)
        answer = await lane.run(embed("b"), context(client="b", traffic=traffic))
        assert right(answer, ["b"])
        assert prepared.index("b") <= 6
        assert len(prepared) < 20
        assert sum(task.done() for task in tasks) < 20
        for task, each in zip(tasks, texts, strict=True):
            assert right(await task, each)
        assert len(prepared) == len(set(prepared)) == 201
        assert idle(lane)

    virtual(main)


def test_images_of_callers_who_left_are_let_go_while_the_engine_hangs(virtual: Run[None]) -> None:
    """They leave the queue of items to prepare, although nothing is taken from it."""

    async def main() -> None:
        lane = make_lane(FakeScript(delay_ms=5000), pipeline=Holding)
        calls = [asyncio.create_task(lane.run(embed(f"{number}"), context(100.0))) for number in range(30)]
        await asyncio.sleep(0.5)
        waiting = [weakref.ref(request.future) for request in lane._requests if not request.cursor]
        assert len(waiting) == 25
        for call in calls[5:]:
            call.cancel()
        await gathered(*calls[5:])
        del call, calls[5:]
        assert not [one for one in waiting if one() is not None]
        assert len(await gathered(*calls)) == 5
        assert idle(lane)

    virtual(main)


def test_cancelled_while_running_cancels_the_engine_call(virtual: Run[None]) -> None:
    """When the last caller of a batch leaves, its engine call is cancelled and the slot is free."""

    async def main() -> None:
        lane = make_lane(SLOW)
        calls = [asyncio.create_task(lane.run(embed(text), context())) for text in ("a", "b")]
        await until(lambda: bool(engine(lane).running))
        for call in calls:
            call.cancel()
        await gathered(*calls)
        await until(lambda: idle(lane))
        assert engine(lane).cancelled == 1
        assert right(await lane.run(embed("c"), context()), ["c"])

    virtual(main)


def test_deadline_ends_a_wait_in_the_queue_and_on_the_engine(virtual: Run[None]) -> None:
    """The 504 comes at the deadline, not when the engine is done, and no state is left."""

    async def main() -> None:
        lane = make_lane(FakeScript(delay_ms=5000))
        loop = asyncio.get_running_loop()
        start = loop.time()
        outcomes = await gathered(*(lane.run(embed(str(number)), context(1.0)) for number in range(70)))
        assert all(isinstance(outcome, DeadlineExceeded) for outcome in outcomes)
        assert loop.time() - start == pytest.approx(1.0, abs=0.01)
        await until(lambda: idle(lane))

    virtual(main)


@pytest.mark.parametrize(("word", "error"), [("poison-item", EngineFailed), ("reject-item", InputRejected)])
def test_poisoned_item_fails_alone(virtual: Run[None], word: str, error: type[Exception]) -> None:
    """One bad item among 64 is found by halving within 2 log2(n) + 2 extra calls; the other items are answered."""

    async def main() -> None:
        lane = make_lane(SLOW)
        texts = [f"text {number}" for number in range(63)]
        texts.insert(17, word)
        blocker = asyncio.create_task(lane.run(embed("blocker"), context()))
        await until(lambda: bool(engine(lane).running))
        outcomes = await gathered(*(lane.run(embed(text), context()) for text in texts))
        await blocker
        for text, outcome in zip(texts, outcomes, strict=True):
            if text == word:
                assert isinstance(outcome, error)
            else:
                assert right(outcome, [text])
        assert len(engine(lane).batches) <= 2 + 2 * 6 + 2
        assert idle(lane)

    virtual(main)


def test_many_poisoned_items_fall_back_to_single_calls(virtual: Run[None]) -> None:
    """After the last halving the rest runs one by one, and every caller gets the right outcome."""

    async def main() -> None:
        lane = make_lane(SLOW)
        texts = [f"poison-item {number}" if number % 3 == 0 else f"text {number}" for number in range(32)]
        outcomes = await gathered(*(lane.run(embed(text), context()) for text in texts))
        for text, outcome in zip(texts, outcomes, strict=True):
            assert isinstance(outcome, EngineFailed) if "poison" in text else right(outcome, [text])
        assert idle(lane)

    virtual(main)


def test_neighbour_of_a_culprit_that_left_is_unharmed(virtual: Run[None]) -> None:
    """When the caller of the bad item leaves while the batch runs, the other item is retried, not blamed."""

    async def main() -> None:
        lane = make_lane(SLOW)
        blocker = asyncio.create_task(lane.run(embed("blocker"), context()))
        await until(lambda: bool(engine(lane).running))
        calls = [asyncio.create_task(lane.run(embed(text), context())) for text in ("poison-item", "innocent")]
        await blocker
        await until(lambda: bool(engine(lane).running))
        calls[0].cancel()
        assert right(await calls[1], ["innocent"])
        assert list(engine(lane).batches)[1:] == [(2, 1), (1, 1)]

    virtual(main)


def test_nan_row_fails_its_request_only(virtual: Run[None]) -> None:
    """A NaN row fails only its own request."""

    async def main() -> None:
        lane = make_lane(SLOW)
        good, bad = await gathered(lane.run(embed("a"), context()), lane.run(embed("nan-item"), context()))
        assert right(good, ["a"])
        assert isinstance(bad, NotFinite)

    virtual(main)


def test_bad_item_fails_its_request_and_drops_the_rest_of_it(virtual: Run[None]) -> None:
    """A token id outside the vocabulary fails its request, removes the rest of it from the queue, and affects no other
    request."""

    async def main() -> None:
        lane = make_lane(SLOW)
        bad, good = await gathered(lane.run(embed("x", [-5], "y"), context()), lane.run(embed("z"), context()))
        assert isinstance(bad, InvalidValue)
        assert right(good, ["z"])
        await until(lambda: idle(lane))

    virtual(main)


def test_out_of_memory_halves_and_remembers(virtual: Run[None]) -> None:
    """Batches that do not fit are halved until they do, and later batches stay below the size that failed."""

    async def main() -> None:
        lane = make_lane(FakeScript(delay_ms=1, memory_tokens=40))
        texts = [f"a b c d{number}" for number in range(64)]
        assert right(await lane.run(embed(*texts), context()), texts)
        before = len(engine(lane).batches)
        again = [f"a b c e{number}" for number in range(64)]
        assert right(await lane.run(embed(*again), context()), again)
        sizes = [size * length for size, length in list(engine(lane).batches)[before:]]
        assert max(sizes) <= 40

    virtual(main)


def test_lost_replica_hands_its_work_to_another(virtual: Run[None]) -> None:
    """A transport error is retried on another replica; the lost one is not used for a while."""

    async def main() -> None:
        lane = make_lane(*[FakeScript(delay_ms=10, token_us=5000)] * 2)
        texts = [str(number) for number in range(20)]
        calls = [asyncio.create_task(lane.run(embed(text), context())) for text in texts]
        await until(lambda: bool(engine(lane, 0).running and engine(lane, 1).running))
        engine(lane, 0).online = False
        answers = await asyncio.gather(*calls)
        assert all(right(answer, [text]) for answer, text in zip(answers, texts, strict=True))
        assert lane.ready()
        assert idle(lane)

    virtual(main)


def test_without_a_replica_requests_fail_at_once(virtual: Run[None]) -> None:
    """Without a live replica new work is refused, and queued work fails after one retry."""

    async def main() -> None:
        lane = make_lane(SLOW)
        call = asyncio.create_task(lane.run(embed("a"), context(5)))
        await until(lambda: bool(engine(lane).running))
        engine(lane).online = False
        outcome = (await gathered(call))[0]
        assert isinstance(outcome, TransportFailed | DeadlineExceeded)
        with pytest.raises(Unavailable):
            await lane.run(embed("b"), context())
        engine(lane).online = True
        await asyncio.sleep(2)
        assert right(await lane.run(embed("c"), context()), ["c"])

    virtual(main)


def test_queue_is_bounded_and_one_client_gets_half(virtual: Run[None]) -> None:
    """The Overloaded error says what to do; an empty queue admits any valid request."""

    async def main() -> None:
        lane = make_lane(SLOW, max_items=10)
        big = asyncio.create_task(lane.run(embed(*map(str, range(50))), context()))
        await until(lambda: lane.admission.items == 50)
        with pytest.raises(Overloaded) as caught:
            await lane.run(embed("x"), context(client="other"))
        assert caught.value.retry_after is not None
        await big
        first = asyncio.create_task(lane.run(embed("1", "2", "3"), context()))
        await until(lambda: lane.admission.items == 3)
        with pytest.raises(Overloaded, match="share"):
            await lane.run(embed("4", "5", "6"), context())
        other = lane.run(embed("7", "8", "9", "10", "11"), context(client="other"))
        assert all(isinstance(answer, Embedded) for answer in await asyncio.gather(first, other))

    virtual(main)


@pytest.mark.parametrize("method", ["add", "take"])
def test_a_planner_bug_fails_all_requests_and_readiness(
    virtual: Run[None], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A bug in the planner fails all waiting requests and turns readiness off; nothing hangs."""

    async def main() -> None:
        lane = make_lane(SLOW)

        def explode(*args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(lane._planner, method, explode)
        with pytest.raises(InternalError):
            await lane.run(embed("a"), context())
        assert not lane.ready()
        with pytest.raises(InternalError):
            await lane.run(embed("b"), context())

    virtual(main)


def test_bug_in_a_pipeline_fails_one_batch(virtual: Run[None], monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception in prepare or finish is an InternalError of that request; the lane keeps working."""

    async def main() -> None:
        lane = make_lane(SLOW)

        def explode(*args: Any) -> None:
            raise ZeroDivisionError

        for stage in ("prepare", "finish"):
            with monkeypatch.context() as patch:
                patch.setattr(lane.pipeline, stage, explode)
                with pytest.raises(InternalError):
                    await lane.run(embed("a"), context())
            assert right(await lane.run(embed("a"), context()), ["a"])
        assert idle(lane)

    virtual(main)


def test_close_fails_what_waits_and_may_be_repeated(virtual: Run[None]) -> None:
    """After aclose no request waits and no engine call runs."""

    async def main() -> None:
        lane = make_lane(SLOW)
        calls = [asyncio.create_task(lane.run(embed(str(number)), context())) for number in range(5)]
        await until(lambda: bool(engine(lane).running))
        await lane.aclose()
        await lane.aclose()
        assert all(isinstance(outcome, Unavailable) for outcome in await gathered(*calls))
        assert idle(lane)

    virtual(main)


def test_faster_replica_gets_more_work(virtual: Run[None]) -> None:
    """One planner serves unequal replicas: each takes work when it is free, within its own limits."""

    async def main() -> None:
        scripts = (
            FakeScript(delay_ms=1, token_us=50, slots=2, max_batch_size=4),
            FakeScript(delay_ms=5, token_us=500, max_batch_size=16),
            FakeScript(delay_ms=2, token_us=100, padded=0, max_batch_size=8),
        )
        reports = Reports()
        lane = make_lane(*scripts, observer=reports)
        texts = [" ".join([f"t{number}"] * (1 + number % 30)) for number in range(600)]
        answers = await asyncio.gather(*(lane.run(embed(text), context()) for text in texts))
        assert all(right(answer, [text]) for answer, text in zip(answers, texts, strict=True))
        served = {
            name: sum(r.items for r in reports.batches if r.replica == name) for name in ("fake-0", "fake-1", "fake-2")
        }
        assert served["fake-0"] > served["fake-2"] > served["fake-1"] > 0
        for report in reports.batches:
            assert report.items <= scripts[int(report.replica[-1])].max_batch_size

    virtual(main)


@pytest.mark.parametrize("seed", range(40))
def test_invariants_hold_over_random_lives(virtual: Run[None], seed: int) -> None:
    """Under random sizes, options, cancellations, deadlines, bad items, NaN and lost replicas, each request has exactly
    one outcome, the right one, and no state is left."""

    async def main() -> None:
        random_ = random.Random(seed)
        scripts = [
            FakeScript(
                delay_ms=random_.choice([0, 1, 20]),
                token_us=random_.choice([0, 100]),
                slots=random_.randint(1, 3),
                padded=random_.randint(0, 1),
                max_batch_size=random_.randint(1, 20),
                memory_tokens=random_.choice([0, 0, 200]),
            )
            for _ in range(random_.randint(1, 3))
        ]
        lane = make_lane(*scripts, max_wait_time_ms=random_.choice([0, 5]), max_items=400)
        outcomes = await gathered(*(_one_life(lane, random_) for _ in range(120)), _chaos(lane, random_))
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert not failures, failures
        await until(lambda: idle(lane))

    virtual(main)


async def _one_life(lane: Lane, random_: random.Random) -> None:
    await asyncio.sleep(random_.random() * 0.5)
    words = ["poison-item", "nan-item", "reject-item"]
    texts = [
        " ".join(
            [random_.choice(words) if random_.random() < 0.02 else f"w{random_.randint(0, 50)}"]
            * random_.randint(1, 60)
        )
        for _ in range(random_.choice([1, 1, 1, 5, 40]))
    ]
    patience = random_.choice([30.0, 30.0, 0.05])
    call = asyncio.create_task(lane.run(embed(*texts), context(patience, client=random_.choice("abc"))))
    if random_.random() < 0.2:
        await asyncio.sleep(random_.random() * 0.05)
        call.cancel()
    outcome = (await gathered(call))[0]
    if isinstance(outcome, Embedded):
        assert right(outcome, texts)
        assert not any(word in text for text in texts for word in words)
    elif isinstance(outcome, EngineFailed | InputRejected | NotFinite):
        assert any(word in text for text in texts for word in words)
    else:
        assert isinstance(
            outcome,
            asyncio.CancelledError | DeadlineExceeded | Overloaded | TransportFailed | Unavailable | Cancelled,
        ), outcome


async def _chaos(lane: Lane, random_: random.Random) -> None:
    for _ in range(3):
        await asyncio.sleep(random_.random() * 0.2)
        victim = engine(lane, random_.randrange(len(lane.replicas)))
        victim.online = False
        await asyncio.sleep(random_.random() * 0.05)
        victim.online = True


def test_a_queue_without_runnable_items_waits_for_the_next_one(
    virtual: Run[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No timer runs for such a queue: the next item wakes the lane."""

    async def main() -> None:
        lane = make_lane(FakeScript())
        real = lane._planner.take
        answers: list[Any] = [(Wait(None), [])]
        monkeypatch.setattr(
            lane._planner, "take", lambda *args, **named: answers.pop() if answers else real(*args, **named)
        )
        first = asyncio.ensure_future(lane.run(embed("a"), context()))
        await asyncio.sleep(0.5)
        assert not answers
        assert not first.done()
        assert lane._timer is None
        assert right(await lane.run(embed("b"), context()), ["b"])
        assert right(await first, ["a"])
        await lane.aclose()

    virtual(main)


class SharingPipeline(FakePipeline):
    """Has the tokenizer "mine", whose packed tokens are a text for each item."""

    tokenizer_id = "mine"
    tokenizer_bytes = 0
    folder = Path()
    spec = None

    def tokenize(self, task: BatchTask) -> bytes:
        raise AssertionError("another process does it")

    def unpack_tokens(self, packed: bytes, items: Sequence[Item]) -> list[str]:
        return packed.decode().split()


class TestTokenizedTexts:
    """Tokens come with the texts of a task, from another process."""

    async def test_its_own_take_the_place_of_the_texts(self) -> None:
        """The time that they took counts as preparation."""
        lane = make_lane(FakeScript(), pipeline=SharingPipeline)
        task = msgspec.structs.replace(embed("a", "b"), tokenized=TokenizedTexts("mine", b"c d", 2.0))
        answer = await lane.run(task, context())
        assert right(answer, ["c", "d"])
        assert answer.facts.prepare_ms == pytest.approx(2000)

    async def test_tokens_that_cannot_be_read_hold_no_place(self) -> None:
        """The request fails, and those after it are admitted."""
        lane = make_lane(FakeScript(), pipeline=SharingPipeline, max_items=1)
        for _ in range(2):
            with pytest.raises(UnicodeDecodeError):
                await lane.run(
                    msgspec.structs.replace(embed("a"), tokenized=TokenizedTexts("mine", b"\xff")), context()
                )
        assert right(await lane.run(embed("a"), context()), ["a"])

    @pytest.mark.parametrize("pipeline", [SharingPipeline, FakePipeline])
    async def test_those_of_another_tokenizer_are_ignored(self, pipeline: type[FakePipeline]) -> None:
        """Whether the pipeline shares its tokenizer or not, it reads the texts."""
        lane = make_lane(FakeScript(), pipeline=pipeline)
        task = msgspec.structs.replace(embed("a", "b"), tokenized=TokenizedTexts("other", b"c d", 2.0))
        answer = await lane.run(task, context())
        assert right(answer, ["a", "b"])
        assert answer.facts.prepare_ms < 2000
