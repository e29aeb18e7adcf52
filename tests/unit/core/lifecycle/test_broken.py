"""Models whose runner fails for good while loaded: reported everywhere, and repaired by a load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from shoal.backends.fake.model import FakeScript
from shoal.core.lane_runner import LaneRunner
from shoal.core.lifecycle.events import Event
from shoal.core.protocols import Breakable, ModelFacts
from shoal.core.registry import Model
from shoal.core.routing import TaskRouter
from shoal.errors import Crashed, InternalError, ModelFailed, ShoalError, TransportFailed
from tests.unit.core.conftest import Run, until
from tests.unit.core.lanes import context, embed, make_lane
from tests.unit.core.lives import ClosableRunner, Stack, read
from tests.unit.core.runners import Embedder

REASON = InternalError("the batcher stopped")


class Fragile(ClosableRunner):
    """A runner that breaks on request."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 0.1, ("embed",))
        self.tell: Callable[[ShoalError], None] | None = None

    def when_broken(self, call: Callable[[ShoalError], None]) -> None:
        self.tell = call

    def breaks(self, error: ShoalError = REASON) -> None:
        assert self.tell is not None
        self.is_ready = False
        self.tell(error)


def fragile(stack: Stack) -> list[Fragile]:
    """Make every runner opened from now on breakable; return the list of them."""
    opened: list[Fragile] = []
    real = stack.loads.open

    async def open_fragile(plan: Any, report: Any) -> Fragile:
        await real(plan, report)
        stack.loads.runners[-1] = one = Fragile(plan.name)
        opened.append(one)
        return one

    stack.loads.open = open_fragile  # type: ignore[method-assign]
    return opened


def test_a_lane_that_dies_breaks_its_model(virtual: Run[None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure passes through every wrapping runner to the model, and the pending request gets its error."""

    async def main() -> None:
        lane = make_lane(FakeScript())
        batched = LaneRunner(lane, ModelFacts(source="s", backend="b", tasks=("embed",)))
        runner = TaskRouter([batched, Embedder(("generate",))])
        assert isinstance(runner, Breakable)
        model = Model("m")
        model.mark_loaded(runner)
        runner.when_broken(lambda error: model.mark_broken(runner, error))

        def explode(*args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(lane._planner, "take", explode)
        with pytest.raises(InternalError, match="reload the model or restart the server"):
            await runner.run(embed("a"), context())
        assert not model.can_answer()
        assert (model.state, model.card().broken) == ("failed", True)
        with pytest.raises(
            ModelFailed, match="the model 'm' stopped working: the batcher of 'm' stopped: reload the model"
        ):
            model.ready_runner()

    virtual(main)


def test_a_broken_model_is_reported_and_loaded_again(virtual: Run[None]) -> None:
    """Card, event and readiness report it; a load closes the old runner and opens a new one."""

    async def main() -> None:
        stack = Stack()
        opened, events = fragile(stack), list[Event]()
        reader = asyncio.create_task(read(stack, events))
        await stack.lifecycle.add(stack.loads.plan("a")).wait()
        assert stack.gateway.ready()
        opened[0].breaks()
        card = stack.gateway.model("a")
        assert (card.state, card.error, card.facts is not None) == ("failed", REASON.message, True)
        assert not stack.gateway.ready()
        with pytest.raises(ModelFailed, match="'a' stopped working"):
            await stack.ask("a")
        job = stack.lifecycle.load("a")
        await job.wait()
        assert job.changed
        assert (opened[0].closed, opened[1].closed) == (1, 0)
        assert stack.gateway.model("a").error is None
        assert stack.gateway.ready()
        await stack.ask("a")
        opened[0].breaks()  # the old one has no say any longer
        assert stack.gateway.ready()
        assert [log[0] for log in stack.loads.log] == ["fetch", "open", "close", "fetch", "open"]
        await stack.lifecycle.aclose()
        await reader
        statuses = [event.data["status"] for event in events if event.name == "model_status"]
        assert [each for at, each in enumerate(statuses) if at == 0 or statuses[at - 1] != each] == [
            "loading",
            "loaded",
            "failed",
            "loading",
            "loaded",
        ]

    virtual(main)


@pytest.mark.parametrize("error", [TransportFailed("the server is gone"), ZeroDivisionError("by hand")])
def test_an_old_runner_that_does_not_close_is_not_in_the_way(virtual: Run[None], error: Exception) -> None:
    """The old runner's server may be gone; after a second failure the model is listed as failed."""

    async def main() -> None:
        stack = Stack()
        opened = fragile(stack)
        await stack.loaded("a")
        opened[0].breaks()
        stack.loads.errors["close", "a"] = error
        stack.loads.errors["open", "a"] = TransportFailed("the server is gone")
        with pytest.raises(TransportFailed):
            await stack.lifecycle.load("a").wait()
        card = stack.gateway.model("a")
        assert (card.state, card.broken, opened[0].closed) == ("failed", False, 1)
        with pytest.raises(ModelFailed, match="'a' failed to load: the server is gone"):
            await stack.ask("a")
        stack.loads.errors.clear()
        await stack.loaded("a")
        await stack.ask("a")

    virtual(main)


def test_a_crash_while_the_server_closes_starts_nothing(virtual: Run[None]) -> None:
    """A process that ends because it is being closed is not put to sleep by a job that nobody awaits."""

    async def main() -> None:
        stack = Stack()
        opened = fragile(stack)
        await stack.loaded("a")
        close = opened[0].aclose

        async def crash() -> None:
            opened[0].breaks(Crashed("ended"))
            await close()

        opened[0].aclose = crash  # type: ignore[method-assign]
        await stack.lifecycle.aclose()
        assert not list(stack.lifecycle._queue)

    virtual(main)


def test_a_model_that_cannot_answer_is_loaded_anew(virtual: Run[None]) -> None:
    """A model that its server unloaded is opened again by a load, although nothing broke here."""

    async def main() -> None:
        stack = Stack()
        opened = fragile(stack)
        await stack.loaded("a")
        assert not stack.lifecycle.load("a").changed
        opened[0].is_ready = False
        job = stack.lifecycle.load("a")
        await job.wait()
        assert (job.changed, opened[0].closed, len(opened)) == (True, 1, 2)
        await stack.ask("a")

    virtual(main)


def test_a_broken_model_can_be_unloaded(virtual: Run[None]) -> None:
    """Its runner is closed, and no state is left."""

    async def main() -> None:
        stack = Stack()
        opened = fragile(stack)
        await stack.loaded("a")
        opened[0].breaks()
        await stack.lifecycle.unload("a").wait()
        assert (stack.state("a"), opened[0].closed) == ("gone", 1)

    virtual(main)


def test_a_broken_model_can_be_evicted(virtual: Run[None]) -> None:
    """A broken model can be evicted and woken; loading it again does not count it twice."""

    async def main() -> None:
        stack = Stack(max_loaded_models=1)
        opened = fragile(stack)
        await stack.loaded("a")
        opened[0].breaks()
        await stack.loaded("a")
        opened[1].breaks()
        await stack.loaded("b")
        assert stack.states("a", "b") == ["unloaded", "ready"]
        await stack.ask("a")
        assert stack.states("a", "b") == ["ready", "unloaded"]
        assert [one.closed for one in opened] == [1, 1, 1, 0]

    virtual(main)


def test_a_model_whose_process_died_comes_back_with_the_next_request(virtual: Run[None]) -> None:
    """It restarts once; if it dies again at once, it is failed with the reason until it is loaded, or until some
    time has passed."""

    async def main() -> None:
        stack = Stack()
        opened = fragile(stack)
        await stack.loaded("a")
        for at, pause in ((0, 100.0), (1, 10.0)):
            opened[at].breaks(Crashed("its process died"))
            assert (stack.state("a"), stack.gateway.ready()) == ("unloading", True)
            await stack.ask("a")
            assert (stack.state("a"), opened[at].closed) == ("ready", 1)
            await asyncio.sleep(pause)
        opened[2].breaks(Crashed("its process died"))
        with pytest.raises(ModelFailed, match="'a' stopped working: its process died"):
            await stack.ask("a")
        await stack.loaded("a")
        assert stack.state("a") == "ready"

    virtual(main)


def test_a_model_that_dies_in_the_middle_of_something_is_failed(virtual: Run[None]) -> None:
    """The job in progress decides what follows: an unload still removes the model."""

    async def main() -> None:
        stack = Stack()
        opened = fragile(stack)
        await stack.loaded("a")
        model = stack.registry.find("a")
        model.enter()
        unload = stack.lifecycle.unload("a")
        await until(lambda: stack.state("a") == "unloading")
        opened[0].breaks(Crashed("its process died"))
        model.leave()
        await unload.wait()
        assert stack.state("a") == "gone"

    virtual(main)
