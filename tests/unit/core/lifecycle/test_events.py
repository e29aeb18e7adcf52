from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from shoal.core.lifecycle.events import MAX_WAITING, Event, Events
from tests.unit.core.conftest import Run, gathered, until
from tests.unit.core.lives import Stack, read


def progress(done: int, model: str = "m") -> Event:
    return Event("download_progress", model, {"done": done})


async def test_every_watcher_sees_every_event() -> None:
    """Every watcher gets all events in order from its first `anext`, equal ones too."""
    events = Events()
    seen: list[list[Event]] = [[], []]

    async def watch(into: list[Event]) -> None:
        into.extend([event async for event in events.watch()])

    watchers = [asyncio.create_task(watch(into)) for into in seen]
    await asyncio.sleep(0)
    published = [
        Event("model_remove", "m"),
        Event("model_status", "m", {"status": "loaded"}),
        Event("model_remove", "m"),
    ]
    for event in published:
        events.publish(event)
    events.close()
    await asyncio.gather(*watchers)
    assert seen == [published, published]
    assert [event async for event in events.watch()] == []


async def test_progress_that_nobody_read_is_replaced() -> None:
    """A slow reader gets the newest progress of each model, and every status."""
    events = Events()
    async with aclosing(events.watch()) as watch:
        first = asyncio.create_task(anext(watch))
        await asyncio.sleep(0)
        events.publish(Event("model_status", "m"))
        assert (await first).name == "model_status"
        for done in range(MAX_WAITING * 2):
            events.publish(progress(done))
            events.publish(progress(-done, "n"))
        events.publish(Event("download_finished", "m"))
        read = [await anext(watch) for _ in range(3)]
        assert read == [
            progress(2 * MAX_WAITING - 1),
            progress(1 - 2 * MAX_WAITING, "n"),
            Event("download_finished", "m"),
        ]


async def test_a_reader_that_is_too_far_behind_is_cut_off() -> None:
    """The stream of a reader too far behind ends, rather than losing a status; its buffer is bounded, and other
    readers continue."""
    events = Events()
    async with aclosing(events.watch()) as slow, aclosing(events.watch()) as left:
        begun = [asyncio.create_task(anext(watch)) for watch in (slow, left)]
        await asyncio.sleep(0)
        events.publish(Event("model_remove", "m"))
        await asyncio.gather(*begun)
        [one, _] = events._watchers
        for _ in range(MAX_WAITING + 100):
            events.publish(Event("model_status", "m"))
        assert not one.events
        with pytest.raises(StopAsyncIteration):
            await anext(slow)
    assert not events._watchers


def test_every_status_is_an_event(virtual: Run[None]) -> None:
    """Every status is an event, with the reason of a failure, and downloads report progress."""

    async def main() -> None:
        stack = Stack()
        seen: list[Event] = []
        watch = asyncio.create_task(read(stack, seen))
        await until(lambda: bool(stack.lifecycle._model_status.events._watchers))
        await stack.loaded("a")
        await stack.lifecycle.download("b").wait()
        stack.loads.errors["fetch", "c"] = asyncio.InvalidStateError("by hand")
        await gathered(stack.lifecycle.download("c").wait(), stack.lifecycle.load("d").wait())
        await stack.lifecycle.delete("a").wait()
        await stack.lifecycle.aclose()
        await watch

        def statuses(model: str) -> list[str]:
            return [event.data.get("status", event.name) for event in seen if event.model == model]

        assert [each for each in statuses("a") if each != "download_progress"] == [
            *("loading", "loading", "loaded"),
            *("loaded", "unloading", "model_remove", "unloaded"),
        ]
        assert [
            event.data["fraction"] for event in seen if event.name == "download_progress" and event.model == "b"
        ] == [
            0.0,
            1.0,
        ]
        assert statuses("b")[-2:] == ["download_finished", "unloaded"]
        failed = next(event for event in seen if event.name == "download_failed")
        assert (failed.model, "by hand" in failed.data["error"]) == ("c", True)
        assert any(event.data.get("stage") == "opening" for event in seen if event.model == "d")

    virtual(main)
