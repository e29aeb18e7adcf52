"""Models that clients have loaded come back in the next process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shoal.app import loaded_models
from shoal.app.loaded_models import note_loaded, restore_loaded
from shoal.core.lifecycle import lifecycle
from shoal.errors import SetupError
from tests.unit.core.lives import Stack
from tests.unit.workers.kit import until


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(loaded_models, "LOOK_S", 0.001)
    return tmp_path / "loaded"


@asynccontextmanager
async def process(
    file: Path, *named: str, failing: str = "", seconds: float = 0.0, **options: int
) -> AsyncIterator[Stack]:
    """Run what a model process runs, with these models named at startup; it ends without a word."""
    stack = Stack(**options)
    stack.loads.seconds = dict.fromkeys(stack.loads.seconds, seconds)
    if failing:
        stack.loads.errors["open", failing] = SetupError("no")
    for name in named:
        await stack.lifecycle.add(stack.loads.plan(name)).wait()
    await restore_loaded(stack.lifecycle, file)
    keeping = asyncio.create_task(note_loaded(stack.lifecycle, file))
    try:
        yield stack
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


async def listed(file: Path, *names: str) -> None:
    async with asyncio.timeout(30):
        while [plan.name for plan, _ in await asyncio.to_thread(loaded_models._read, file)] != list(names):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def states(stack: Stack) -> dict[str, str]:
    return {model.name: model.state for model in stack.registry}


async def test_loaded_models_are_loaded_again(file: Path) -> None:
    """Those that clients have loaded and not unloaded; not required, and in every process that follows."""
    async with process(file, "named") as stack:
        for name in ("a", "b", "c"):
            await stack.lifecycle.load(name).wait()
        await stack.lifecycle.unload("b").wait()
        await listed(file, "a", "c")
    for _ in range(2):
        async with process(file, "named") as stack:
            await until(lambda stack=stack: states(stack) == {"named": "ready", "a": "ready", "c": "ready"})  # type: ignore[misc]
            assert [model.required for model in stack.registry] == [True, False, False]
            await listed(file, "a", "c")


async def test_one_that_does_not_load_is_forgotten(file: Path) -> None:
    """Else it might end each process that loads it. A name that is taken by now is left out."""
    async with process(file) as stack:
        for name in ("a", "b"):
            await stack.lifecycle.load(name).wait()
        await listed(file, "a", "b")
    async with process(file, "b", failing="a") as stack:
        await listed(file)
        await until(lambda: states(stack) == {"b": "ready"})


async def test_a_sleeping_model_sleeps_on(file: Path) -> None:
    """It is not loaded before a request needs it, and stays listed meanwhile."""
    async with process(file) as stack:
        await stack.lifecycle.load("a").wait()
        assert stack.lifecycle.try_sleep("a")
        await listed(file, "a")
    for _ in range(2):
        async with process(file, "named") as stack:
            await asyncio.sleep(0.05)
            assert states(stack) == {"named": "ready", "a": "unloaded"}
            await listed(file, "a")
    async with process(file) as stack:
        await stack.ask("a")
        assert states(stack) == {"a": "ready"}


async def test_a_model_without_room_evicts_nobody(file: Path) -> None:
    """The operator's own stays loaded; the other starts asleep."""
    async with process(file) as stack:
        await stack.lifecycle.load("a").wait()
        await listed(file, "a")
    async with process(file, "named", max_loaded_models=1) as stack:
        await until(lambda: states(stack)["a"] == "unloaded")
        assert states(stack)["named"] == "ready"
        assert ("close", "named") not in stack.loads.log
        await listed(file, "a")
        await stack.ask("a")


async def test_an_end_while_models_load_forgets_the_one_that_loads(file: Path) -> None:
    """The others are loaded by the process after that."""
    async with process(file) as stack:
        for name in ("a", "b", "c"):
            await stack.lifecycle.load(name).wait()
        await listed(file, "a", "b", "c")
    async with process(file, seconds=600):
        await listed(file, "b", "c")
    async with process(file) as stack:
        await until(lambda: states(stack) == {"b": "ready", "c": "ready"})
        await listed(file, "b", "c")


async def test_models_do_not_wait_long_for_the_one_before(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for a server that is gone."""
    async with process(file) as stack:
        for name in ("a", "b", "c"):
            await stack.lifecycle.load(name).wait()
        await listed(file, "a", "b", "c")
    monkeypatch.setattr(lifecycle, "RESTORE_S", 0.01)
    async with process(file, seconds=600) as stack:
        await until(lambda: stack.loads.log == [("fetch", "a"), ("fetch", "b"), ("fetch", "c")])


async def test_a_list_that_cannot_be_written_ends_nothing(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next change is written again, once that is possible."""
    (blocker := file.with_suffix(".new")).mkdir()
    async with process(file) as stack:
        await stack.lifecycle.load("a").wait()
        await until(lambda: "will not be loaded again" in caplog.text)
        blocker.rmdir()
        await stack.lifecycle.load("b").wait()
        await listed(file, "a", "b")


async def test_a_list_that_cannot_be_read_ends_nothing(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.mkdir()  # noqa: ASYNC240
    async with process(file) as stack:
        assert states(stack) == {}
        assert "are not loaded again" in caplog.text
