from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from shoal.server import garbage_collection
from shoal.server.garbage_collection import THRESHOLDS, collect_and_freeze, keep_frozen
from tests.unit.core.conftest import run_virtual


class Cycle:
    """Only the collector can free it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """The rest of the tests keep the collector that they had."""
    yield
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() != THRESHOLDS


@pytest.fixture
def restore_gc() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("restore_gc")
def test_what_is_there_is_looked_at_no_more() -> None:
    collect_and_freeze()
    frozen = gc.get_freeze_count()
    assert frozen > 10_000
    assert len(gc.get_objects()) < frozen / 10


@pytest.mark.usefixtures("restore_gc")
def test_what_was_left_since_is_freed() -> None:
    """A model that was there the last time, and is part of a cycle, goes when it is gone."""
    model = Cycle()
    reference = weakref.ref(model)
    collect_and_freeze()
    del model
    gc.collect()
    assert reference() is not None
    collect_and_freeze()
    assert reference() is None


def test_it_settles_when_models_come_or_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, then after each change and not without one; what it changed is put back on leaving."""
    settlings: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(garbage_collection, "collect_and_freeze", lambda: settlings.append(loop.time()))
        models = [("m", "loading")]
        started = loop.time()
        async with keep_frozen(lambda: tuple(models)):
            assert gc.get_threshold() == THRESHOLDS
            await asyncio.sleep(5.5)
            models[0] = ("m", "ready")
            await asyncio.sleep(10)
            models.clear()
            await asyncio.sleep(10)
        await asyncio.sleep(10)
        assert [round(at - started) for at in settlings] == [0, 6, 16]

    run_virtual(main)
