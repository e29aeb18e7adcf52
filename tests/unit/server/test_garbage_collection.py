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
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def restore_frozen_objects() -> Iterator[None]:
    """Check that the test left the collector as the other tests need it."""
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
def test_existing_objects_are_frozen() -> None:
    collect_and_freeze()
    frozen = gc.get_freeze_count()
    assert frozen > 10_000
    assert len(gc.get_objects()) < frozen / 10


@pytest.mark.usefixtures("restore_gc")
def test_later_garbage_is_freed() -> None:
    """A frozen model in a reference cycle is freed after its removal."""
    model = Cycle()
    reference = weakref.ref(model)
    collect_and_freeze()
    del model
    gc.collect()
    assert reference() is not None
    collect_and_freeze()
    assert reference() is None


def test_it_freezes_after_each_model_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start and after each change only; the collector's settings are restored at the end."""
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
