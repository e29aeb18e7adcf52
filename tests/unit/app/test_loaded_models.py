"""Models that clients have loaded come back in the next process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shoal.app import loaded_models
from shoal.app.loaded_models import note_loaded, restore_loaded
from shoal.errors import SetupError
from tests.unit.core.lives import Stack
from tests.unit.workers.kit import until


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(loaded_models, "LOOK_S", 0.001)
    return tmp_path / "loaded"


@asynccontextmanager
async def process(file: Path, *named: str, failing: str = "") -> AsyncIterator[Stack]:
    """Run what a model process runs, with these models named at startup; it ends without a word."""
    stack = Stack()
    stack.loads.seconds = dict.fromkeys(stack.loads.seconds, 0.0)
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
        while [plan.name for plan in await asyncio.to_thread(loaded_models._read, file)] != list(names):  # noqa: ASYNC110
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


async def test_a_sleeping_model_is_loaded_again(file: Path) -> None:
    async with process(file) as stack:
        await stack.lifecycle.load("a").wait()
        assert stack.lifecycle.try_sleep("a")
        await listed(file, "a")
    async with process(file) as stack:
        await until(lambda: states(stack) == {"a": "ready"})


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
