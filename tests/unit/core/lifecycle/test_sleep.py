"""Eviction, sleep and wake-up of models: never during a request, and only when needed."""

from __future__ import annotations

import asyncio
import random

import pytest

from shoal.core.lifecycle.lifecycle import Lifecycle
from shoal.core.protocols import ModelFacts
from shoal.core.registry import Model
from shoal.errors import (
    CapacityError,
    Conflict,
    DeadlineExceeded,
    InvalidValue,
    ModelFailed,
    ModelNotFound,
    ModelNotReady,
    ShoalError,
    SourceError,
    TransportFailed,
    Unavailable,
    Unsupported,
)
from shoal.types import Embed, Embedded, Generate
from tests.unit.core.conftest import Run, gathered, until
from tests.unit.core.lanes import context
from tests.unit.core.lives import Stack
from tests.unit.core.runners import Embedder


def test_the_least_recently_used_makes_room(virtual: Run[None]) -> None:
    """The evicted model stays listed, as sleeping, and wakes on its next request; then another one sleeps."""

    async def main() -> None:
        stack = Stack(max_loaded_models=2)
        await stack.loaded("a", "b")
        await stack.ask("a")
        await stack.loaded("c")
        assert stack.states("a", "b", "c") == ["ready", "unloaded", "ready"]
        card = stack.gateway.model("b")
        assert (card.sleeping, card.facts is not None) == (True, True)
        assert [each.status for each in await stack.lifecycle.listing()] == ["loaded", "sleeping", "loaded"]
        answers = await asyncio.gather(*(stack.ask("b") for _ in range(5)))
        assert [answer.tokens for answer in answers] == [[1]] * 5
        assert stack.states("a", "b", "c") == ["unloaded", "ready", "ready"]
        assert [log for log in stack.loads.log if log[1] == "b"] == [
            ("fetch", "b"),
            ("open", "b"),
            ("close", "b"),
            ("fetch", "b"),
            ("open", "b"),
        ]
        assert [job.action for job in stack.lifecycle.jobs()] == ["load"] * 3

    virtual(main)


def test_bytes_are_a_budget_too(virtual: Run[None]) -> None:
    """As many models sleep as the next one needs; one that can never fit is rejected by name."""

    async def main() -> None:
        stack = Stack(max_loaded_bytes=100)
        stack.loads.sizes = {"a": 40, "b": 40, "c": 90, "d": 101}
        await stack.loaded("a", "b")
        assert stack.states("a", "b") == ["ready", "ready"]
        await stack.loaded("c")
        assert stack.states("a", "b", "c") == ["unloaded", "unloaded", "ready"]
        with pytest.raises(InvalidValue, match=r"'d' needs 101 bytes, more than max_loaded_bytes \(100\)"):
            await stack.lifecycle.load("d").wait()
        assert stack.states("c", "d") == ["ready", "gone"]
        assert [listing.size for listing in await stack.lifecycle.listing()] == [40, 40, 90, 0]

    virtual(main)


def test_no_model_is_evicted_during_a_request(virtual: Run[None]) -> None:
    """A load waits until a model is idle, and reports what it waits for."""

    async def main() -> None:
        stack = Stack(max_loaded_models=1)
        stack.loads.infer_s = 20.0
        await stack.loaded("a")
        call = asyncio.create_task(stack.ask("a"))
        await until(lambda: stack.loads.runners[0].begun == 1)
        job = stack.lifecycle.load("b")
        await asyncio.sleep(10)
        assert (stack.states("a", "b"), job.stage) == (
            ["ready", "loading"],
            "waiting until another model can be put to sleep",
        )
        assert (await call).tokens == [1]
        await job.wait()
        assert (stack.states("a", "b"), stack.loads.runners[0].answered_closed) == (["unloaded", "ready"], 0)

    virtual(main)


def test_models_named_at_start_do_not_evict_each_other(virtual: Run[None]) -> None:
    """Those without room start asleep; the server is ready, and they wake on a request."""

    async def main() -> None:
        stack = Stack(max_loaded_models=1)
        jobs = [stack.lifecycle.add(stack.loads.plan(name)) for name in "abc"]
        await gathered(*(job.wait() for job in jobs))
        assert sorted(stack.states("a", "b", "c")) == ["ready", "unloaded", "unloaded"]
        assert stack.gateway.ready()
        for name in "abc":
            await stack.ask(name)
            assert stack.state(name) == "ready"

    virtual(main)


def test_idle_models_fall_asleep(virtual: Run[None]) -> None:
    """After keep_alive_s without a request, each by itself; a long request counts until its end."""

    async def main() -> None:
        stack = Stack(keep_alive_s=60.0)
        await stack.loaded("a", "b")
        stack.loads.runners[1].seconds = 100.0
        await asyncio.sleep(50)
        await stack.ask("a")
        call = asyncio.create_task(stack.ask("b", 1000))
        await asyncio.sleep(58)
        assert stack.states("a", "b") == ["ready", "ready"]
        await asyncio.sleep(5)
        assert stack.states("a", "b") == ["unloaded", "ready"]
        await call
        await asyncio.sleep(58)
        assert stack.state("b") == "ready"
        await asyncio.sleep(5)
        assert stack.states("a", "b") == ["unloaded", "unloaded"]
        await stack.ask("a")
        assert stack.state("a") == "ready"
        await stack.lifecycle.aclose()
        await asyncio.sleep(100)
        assert stack.state("a") == "ready"

    virtual(main)


def test_a_download_beside_it_keeps_a_model_awake_no_longer_than_it_takes(virtual: Run[None]) -> None:
    """The timer that found the model busy is set again."""

    async def main() -> None:
        stack = Stack(keep_alive_s=60.0)
        await stack.loaded("a")
        stack.loads.seconds["fetch"] = 100.0
        job = stack.lifecycle.download("a")
        await asyncio.sleep(99)
        assert stack.state("a") == "ready"
        await job.wait()
        await asyncio.sleep(130)
        assert stack.state("a") == "unloaded"

    virtual(main)


async def asleep(**options: float) -> Stack:
    """Return a stack whose model "a" sleeps."""
    stack = Stack(max_loaded_models=1, **options)
    await stack.loaded("a", "b")
    assert stack.states("a", "b") == ["unloaded", "ready"]
    return stack


def test_a_request_that_comes_while_it_falls_asleep_waits_for_both(virtual: Run[None]) -> None:
    """The model is closed without interruption, then opened again."""

    async def main() -> None:
        stack = Stack(max_loaded_models=1)
        await stack.loaded("a")
        load = stack.lifecycle.load("b")
        await until(lambda: stack.state("a") == "ready")
        await asyncio.sleep(1.5)
        assert stack.state("a") == "unloading"
        assert (await stack.ask("a")).tokens == [1]
        await load.wait()
        assert [life.closed for life in stack.loads.runners if life.name == "a"] == [1, 0]

    virtual(main)


def test_a_wake_has_the_requests_time(virtual: Run[None]) -> None:
    """The request fails at its deadline, the wake-up continues, and the next request finds the model ready."""

    async def main() -> None:
        stack = await asleep()
        with pytest.raises(
            DeadlineExceeded, match=r"'a' was asleep and did not load in time \(downloading\): allow more"
        ):
            await stack.ask("a", 0.5)
        with pytest.raises(DeadlineExceeded, match=r"did not load in time \(waiting until another model has"):
            await stack.ask("a", 1.0)
        with pytest.raises(DeadlineExceeded, match=r"did not load in time \(opening\)"):
            await stack.ask("a", 1.0)
        await stack.ask("a", 10.0)
        assert [log for log in stack.loads.log if log[0] == "open"] == [("open", "a"), ("open", "b"), ("open", "a")]

    virtual(main)


@pytest.mark.parametrize(
    ("error", "expected"),
    [(SourceError("the files are gone"), ModelFailed), (TransportFailed("triton is away"), Unavailable)],
    ids=["lasting", "passing"],
)
def test_a_wake_that_fails_says_why_and_may_be_tried_again(
    virtual: Run[None], error: ShoalError, expected: type[ShoalError]
) -> None:
    """All waiting requests get the reason; the model stays asleep."""

    async def main() -> None:
        stack = await asleep()
        stack.loads.errors["open", "a"] = error
        for outcome in await gathered(*(stack.ask("a") for _ in range(3))):
            assert isinstance(outcome, expected)
            assert f"'a' was asleep and could not be reloaded: {error.message}" in outcome.message
        assert stack.state("a") == "unloaded"
        listing = next(each for each in await stack.lifecycle.listing() if each.name == "a")
        assert (listing.status, listing.error) == ("sleeping", error.message)
        stack.loads.errors.clear()
        await stack.ask("a")
        assert stack.gateway.model("a").error is None

    virtual(main)


def test_no_room_is_waited_for_as_long_as_somebody_waits(virtual: Run[None]) -> None:
    """A wake-up whose requests have all left evicts no model later."""

    async def main() -> None:
        stack = await asleep()
        stack.loads.runners[-1].seconds = 20.0
        call = asyncio.create_task(stack.ask("b", 100))
        await until(lambda: stack.loads.runners[-1].begun == 1)
        with pytest.raises(Unavailable, match="all loaded models stayed busy"):
            await stack.ask("a", 5)
        await call
        await asyncio.sleep(10)
        assert stack.states("a", "b") == ["unloaded", "ready"]
        assert stack.idle()

    virtual(main)


def test_an_unload_or_delete_ends_the_sleep(virtual: Run[None]) -> None:
    """Asleep, waking or being loaded: the model is gone, and waiting requests learn what to do."""

    async def main() -> None:
        for undo in ("unload", "delete"):
            stack = await asleep()
            act = getattr(stack.lifecycle, undo)
            assert (await gathered(act("a").wait()))[0] is None
            assert stack.state("a") == "gone"
            stack = await asleep()
            call = asyncio.create_task(stack.ask("a"))
            await asyncio.sleep(0.5)
            job = getattr(stack.lifecycle, undo)("a")
            late = asyncio.create_task(stack.ask("a"))
            outcomes = await gathered(call, late)
            assert [type(outcome) for outcome in outcomes] == [ModelNotReady] * 2
            assert "load it again" in outcomes[0].message
            await job.wait()
            assert (stack.state("a"), job.changed) == ("gone", True)

    virtual(main)


def test_a_load_wakes_and_is_joined_by_requests(virtual: Run[None]) -> None:
    """A failed load leaves the model asleep, as before."""

    async def main() -> None:
        stack = await asleep()
        stack.loads.errors["open", "a"] = SourceError("no")
        assert isinstance((await gathered(stack.lifecycle.load("a").wait()))[0], SourceError)
        assert stack.state("a") == "unloaded"
        stack.loads.errors.clear()
        job = stack.lifecycle.load("a")
        await stack.ask("a")
        assert (job.state, job.changed) == ("done", True)
        call = asyncio.create_task(stack.ask("b"))
        await asyncio.sleep(0.5)
        behind = stack.lifecycle.load("b")
        await behind.wait()
        assert not behind.changed
        await call

    virtual(main)


def test_a_model_sleeps_even_if_closing_fails(virtual: Run[None]) -> None:
    """Its runner is closed in any case; the list has the reason, and a bug does not block other loads."""

    async def main() -> None:
        for error in (TransportFailed("triton is away"), ZeroDivisionError("by hand")):
            stack = Stack(max_loaded_models=1)
            await stack.loaded("a")
            stack.loads.errors["close", "a"] = error
            await stack.loaded("b")
            assert (stack.states("a", "b"), stack.loads.runners[0].closed) == (["unloaded", "ready"], 1)
            assert stack.gateway.model("a").error in (None, "triton is away")

    virtual(main)


def test_a_sleeping_model_gets_only_tasks_it_supports(virtual: Run[None]) -> None:
    """Its capabilities are checked before the wake-up if it was loaded once, else after it."""

    async def main() -> None:
        stack = await asleep()
        model = stack.registry.find("a")
        model.facts = ModelFacts(source="s", backend="b", tasks=("generate",))
        with pytest.raises(Unsupported, match="'a' cannot embed"):
            await stack.ask("a")
        assert stack.state("a") == "unloaded"
        task = Generate(model="a", prompts=["x y"])
        assert [chunk.text async for chunk in stack.gateway.stream(task, context())] == ["x", "y"]
        await stack.loaded("c")
        assert stack.state("a") == "unloaded"
        assert await stack.gateway.count_tokens(task, context()) == 1
        assert (stack.state("a"), model.inflight) == ("ready", 0)
        await stack.loaded("b")
        model.facts = None
        assert stack.state("a") == "unloaded"
        stack.loads.tasks = ("generate",)
        with pytest.raises(Unsupported, match="'a' cannot embed"):
            await stack.ask("a")
        assert stack.state("a") == "ready"

    virtual(main)


def test_without_a_lifecycle_no_model_wakes(virtual: Run[None]) -> None:
    """Without a lifecycle, a sleeping model is rejected as not ready."""

    async def main() -> None:
        stack = Stack()
        stack.gateway.lifecycle = None
        stack.registry.add(model := Model("m", is_sleeping=True))
        with pytest.raises(ModelNotReady):
            await stack.ask("m")
        await stack.gateway.wake("m", context())
        assert model.inflight == 0

    virtual(main)


def test_gateway_wake(virtual: Run[None]) -> None:
    """Gateway.wake, for callers that need a model without a task."""

    async def main() -> None:
        stack = await asleep()
        await stack.gateway.wake("a", context())
        assert (stack.states("a", "b"), stack.registry.find("a").inflight) == (["ready", "unloaded"], 0)
        await stack.gateway.wake("a", context())
        with pytest.raises(ModelNotFound):
            await stack.gateway.wake("nobody", context())

    virtual(main)


def test_no_model_wakes_after_shutdown(virtual: Run[None]) -> None:
    """The error names the shutdown."""

    async def main() -> None:
        stack = await asleep()
        call = asyncio.create_task(stack.ask("a"))
        await asyncio.sleep(0.5)
        await stack.lifecycle.aclose()
        for outcome in await gathered(call, stack.ask("a")):
            assert isinstance(outcome, Unavailable)
            assert "shutting down" in outcome.message

    virtual(main)


@pytest.mark.parametrize("seed", range(40))
def test_invariants_hold_over_random_lives(virtual: Run[None], seed: int) -> None:
    """Random loads, unloads, deletes, requests, sleep, failures and cancellations: each request has one outcome, a
    closed runner answers none, sleep interrupts none, a name is open once at a time and closed once, the limits
    hold, and nothing is left at the end."""

    async def main() -> None:
        chance = random.Random(seed)
        limit = chance.choice([0, 1, 2])
        stack = Stack(
            max_loaded_models=limit,
            max_loaded_bytes=chance.choice([0, 25]),
            keep_alive_s=chance.choice([0.0, 0.7]),
            unload_timeout_s=1000.0,
        )
        loads = stack.loads
        loads.sizes = {"a": 10, "b": 10, "c": 20}
        loads.infer_s = chance.choice([0.0, 0.3])
        for stage in loads.seconds:
            loads.seconds[stage] = chance.choice([0.0, 0.1, 0.5])
        names = ["a", "b", "c"]
        for name in names:
            stack.lifecycle.add(loads.plan(name))
        watch = asyncio.create_task(_watch(stack, limit))
        outcomes = await gathered(*(_one_life(stack, chance, names) for _ in range(150)), _faults(stack, chance))
        watch.cancel()
        assert isinstance((await gathered(watch))[0], asyncio.CancelledError)
        assert [outcome for outcome in outcomes if isinstance(outcome, BaseException)] == []
        loads.errors.clear()
        await asyncio.sleep(2000)
        assert stack.idle()
        assert not loads.running
        for model in stack.registry:
            assert (model.inflight, model.state in ("ready", "unloaded", "failed")) == (0, True)
            assert (model.runner is not None) == (model.state == "ready")
        alive = [model.runner for model in stack.registry if model.runner is not None]
        assert [life.closed for life in loads.runners] == [int(life not in alive) for life in loads.runners]
        assert sum(life.answered_closed for life in loads.runners) == 0
        await stack.lifecycle.aclose()
        assert [life.closed for life in loads.runners] == [1] * len(loads.runners)

    virtual(main)


async def _watch(stack: Stack, limit: int) -> None:
    while True:
        open_now = [life.name for life in stack.loads.runners if not life.closed]
        assert len(open_now) == len(set(open_now)), open_now
        assert not limit or len(open_now) <= limit, open_now
        await asyncio.sleep(0.01)


async def _one_life(stack: Stack, chance: random.Random, names: list[str]) -> None:
    await asyncio.sleep(chance.random() * 10)
    name = chance.choice(names)
    what = chance.choice(["ask"] * 8 + ["load", "load", "download", "unload", "delete"])
    patience = chance.choice([0.2, 100.0, 100.0])
    call = asyncio.create_task(stack.ask(name, patience) if what == "ask" else _job(stack.lifecycle, what, name))
    if chance.random() < 0.2:
        await asyncio.sleep(chance.random())
        call.cancel()
    outcome = (await gathered(call))[0]
    if what == "ask":
        allowed = (Embedded, asyncio.CancelledError, CapacityError, ModelNotFound)
        assert isinstance(outcome, allowed), outcome
        assert "with" not in str(outcome)
    else:
        assert outcome is None or isinstance(outcome, asyncio.CancelledError | Conflict | SourceError), outcome


async def _job(life: Lifecycle, what: str, name: str) -> None:
    await getattr(life, what)(name).wait()


async def _faults(stack: Stack, chance: random.Random) -> None:
    for _ in range(20):
        await asyncio.sleep(chance.random())
        fault = (chance.choice(["fetch", "open"]), chance.choice("abc"))
        stack.loads.errors[fault] = SourceError("by chance")
        await asyncio.sleep(chance.random())
        del stack.loads.errors[fault]


def test_embedding_through_a_sleeper_counts_as_one_request(virtual: Run[None]) -> None:
    """It is in flight, once, from before the wake-up until its answer."""

    async def main() -> None:
        stack = await asleep()
        call = asyncio.create_task(stack.gateway.run(Embed(model="a", inputs=["x"]), context()))
        await asyncio.sleep(0.5)
        model = stack.registry.find("a")
        assert model.inflight == 1
        await call
        assert model.inflight == 0

    virtual(main)


def test_a_model_sleeps_on_request(virtual: Run[None]) -> None:
    """An idle model sleeps at once, and the next request wakes it; a model in use, in another job, or without a plan
    to load it again does not."""

    async def main() -> None:
        stack = Stack()
        await stack.loaded("a")
        assert stack.lifecycle.try_sleep("a")
        assert stack.lifecycle.try_sleep("a")
        await stack.ask("a")
        assert stack.state("a") == "ready"
        model = stack.registry.find("a")
        model.enter()
        assert not stack.lifecycle.try_sleep("a")
        model.leave()
        unloading = stack.lifecycle.unload("a")
        assert not stack.lifecycle.try_sleep("a")
        await unloading.wait()
        with pytest.raises(ModelNotFound):
            stack.lifecycle.try_sleep("a")
        stack.registry.add(alone := Model("b"))
        alone.mark_loaded(Embedder())
        assert not stack.lifecycle.try_sleep("b")

    virtual(main)
