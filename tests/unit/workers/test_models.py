"""The model process's side of the links."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

import shoal.workers.models
from shoal.core.protocols import ReplicaStatus
from shoal.errors import ShoalError
from shoal.types import Embed
from shoal.workers import messages
from shoal.workers.front import STREAM_WINDOW
from tests.unit.core.runners import Embedder
from tests.unit.workers.kit import (
    CONTEXT,
    EMBED,
    build_gateway,
    build_model,
    generate,
    model_end,
    pair,
    raw_front,
    until,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "models"


async def greet(end: Any, pid: int = 7) -> messages.Models:
    end.write(messages.Hello(pid))
    models: messages.Models = await end.read()
    assert isinstance(models, messages.Models)
    return models


async def test_a_front_learns_the_models_first(path: Path) -> None:
    """The answer to Hello is the state of all models, and the front's process id is known from then on."""
    async with model_end(build_gateway(build_model(Embedder())), path) as end, raw_front(path) as raw:
        models = await greet(raw)
        assert [model.name for model in models.models] == ["m"]
        assert end.server.pids() == [7]
        raw.writer.close()
        await until(lambda: end.server.pids() == [])


async def test_tasks_of_a_lost_front_are_cancelled(path: Path) -> None:
    """A front that dies leaves nothing running: neither tasks nor streams nor requests."""
    model, requests = build_model(Embedder(("embed", "generate"), release=asyncio.Event())), []

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        requests.append("began")
        try:
            await receive()
        finally:
            requests.append("ended")

    async with model_end(build_gateway(model), path, wait), raw_front(path) as raw:
        await greet(raw)
        raw.write(messages.Run(1, EMBED, CONTEXT), messages.Stream.of(2, generate(1), CONTEXT))
        raw.write(messages.Request(3, "GET", "/", b"", [], ("h", 0)))
        await until(lambda: model.inflight == 2 and requests == ["began"])
        raw.writer.transport.abort()
        await until(lambda: model.inflight == 0 and requests == ["began", "ended"])


async def test_a_task_cancelled_at_once_leaves_no_warning(path: Path) -> None:
    """A task and its cancellation may arrive together; the next task is answered."""
    model = build_model(Embedder())
    async with model_end(build_gateway(model), path), raw_front(path) as raw:
        await greet(raw)
        raw.write(messages.Run(1, EMBED, CONTEXT), messages.Cancel(1), messages.Run(2, EMBED, CONTEXT))
        answer = await raw.read()
        assert isinstance(answer, messages.EmbedAnswer)
        assert answer.id == 2
        assert model.inflight == 0


async def test_messages_about_ended_calls_are_ignored(path: Path) -> None:
    """More, Cancel and Event may cross with the end of their call."""
    async with model_end(build_gateway(build_model(Embedder())), path), raw_front(path) as raw:
        await greet(raw)
        raw.write(
            messages.More(5, 3), messages.Cancel(5), messages.Event(5, b"", False), messages.Run(6, EMBED, CONTEXT)
        )
        assert (await raw.read()).id == 6


async def test_a_stream_stops_at_its_window(path: Path) -> None:
    """STREAM_WINDOW pieces are sent ahead of the reader; each More allows that many again."""
    async with model_end(build_gateway(build_model(Embedder(("generate",)))), path), raw_front(path) as raw:
        version = (await greet(raw)).version
        words = STREAM_WINDOW + 5
        raw.write(
            messages.Known(version), messages.Stream.of(1, generate(words), CONTEXT), messages.AwaitServers(2, 0.0)
        )
        first = [await raw.read() for _ in range(STREAM_WINDOW + 1)]
        kinds = [type(message) for message in first]
        assert (kinds.count(messages.Piece), kinds.count(messages.Done)) == (STREAM_WINDOW, 1)
        raw.write(messages.More(1, 2), messages.AwaitServers(3, 0.0))
        then = [await raw.read() for _ in range(3)]
        assert sorted(type(message).__name__ for message in then) == ["Done", "Piece", "Piece"]
        raw.write(messages.More(1, 9))
        rest = [await raw.read() for _ in range(4)]
        assert [type(message) for message in rest] == [messages.Piece] * 3 + [messages.Done]


async def test_garbage_ends_only_its_own_front(path: Path) -> None:
    """A front whose messages cannot be read loses its link; others are served."""
    async with model_end(build_gateway(build_model(Embedder())), path), raw_front(path) as bad, raw_front(path) as good:
        await greet(bad)
        await greet(good)
        bad.writer.write(b"\x00\x00\x00\x01\xc1")
        assert await bad.has_ended()
        good.write(messages.Run(1, EMBED, CONTEXT))
        assert (await good.read()).id == 1


async def test_an_unexpected_error_is_answered(path: Path) -> None:
    """A bug while a request is handed over becomes an InternalError for its client."""

    async def fail(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("bug")

    async with model_end(build_gateway(), path, fail), raw_front(path) as raw:
        await greet(raw)
        raw.write(messages.Request(3, "GET", "/", b"", [], ("h", 0)))
        answer = await raw.read()
        assert (answer.id, answer.error.name) == (3, "InternalError")


async def test_an_error_that_is_not_unicode_is_answered(path: Path) -> None:
    """An error whose message has a lone surrogate, as from a file's name, still reaches its client."""
    runner = Embedder(error=ShoalError("no such file: \udcff"))
    async with model_end(build_gateway(build_model(runner)), path), raw_front(path) as raw:
        await greet(raw)
        raw.write(messages.Run(1, EMBED, CONTEXT))
        async with asyncio.timeout(5):
            answer = await raw.read()
        assert isinstance(answer, messages.Failure)


async def test_a_change_is_settled_once_all_fronts_know_it(path: Path) -> None:
    """`settle` returns after each front has reported the new version."""
    gateway = build_gateway(build_model(Embedder()))
    async with model_end(gateway, path) as end, raw_front(path) as one, raw_front(path) as other:
        for raw in (one, other):
            raw.write(messages.Known((await greet(raw)).version))
        gateway.registry.add(build_model(Embedder(), name="second"))
        settling = asyncio.create_task(end.server.settle())
        versions = []
        for raw in (one, other):
            models = await raw.read()
            assert [model.name for model in models.models] == ["m", "second"]
            versions.append(models.version)
        one.write(messages.Known(versions[0]))
        one.write(messages.Run(1, EMBED, CONTEXT))
        await one.read()
        assert not settling.done()
        other.write(messages.Known(versions[1]))
        async with asyncio.timeout(30):
            await settling


async def test_a_front_that_leaves_settles_a_change(path: Path) -> None:
    """A front that dies meanwhile is not waited for."""
    gateway = build_gateway(build_model(Embedder()))
    async with model_end(gateway, path) as end:
        async with raw_front(path) as raw:
            await greet(raw)
            gateway.registry.add(build_model(Embedder(), name="second"))
            settling = asyncio.create_task(end.server.settle())
            await raw.read()
        async with asyncio.timeout(30):
            await settling


async def test_a_front_that_hangs_delays_a_change_for_a_while(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A front that does not report is not waited for longer than SETTLE_S, and the log says so."""
    monkeypatch.setattr(shoal.workers.models, "SETTLE_S", 0.02)
    gateway = build_gateway(build_model(Embedder()))
    async with model_end(gateway, path) as end, raw_front(path) as raw:
        await greet(raw)
        with caplog.at_level(logging.WARNING, "shoal.workers"):
            await end.server.settle()
        assert "did not answer" in caplog.text


async def test_nothing_is_sent_without_a_change(path: Path) -> None:
    """Fronts get the models again only when they differ."""
    gateway = build_gateway(build_model(Embedder()))
    async with pair(gateway, path) as (remote, end):
        registry = remote.registry
        await end.server.settle()
        await remote.run(EMBED, CONTEXT)
        assert remote.registry is registry


async def test_a_stop_waits_for_the_fronts(path: Path) -> None:
    """After a stop, fronts are told to ask no more, and tasks are still answered until the last one has left."""
    release = asyncio.Event()
    gateway = build_gateway(build_model(Embedder(release=release)))
    async with model_end(gateway, path) as end:
        async with raw_front(path) as raw:
            await greet(raw)
            raw.write(messages.Run(1, EMBED, CONTEXT))
            end.stop.set()
            await until(lambda: gateway.draining)
            assert isinstance(await raw.read(), messages.Leaving)
            assert not end.done.done()
            release.set()
            assert (await raw.read()).id == 1
        async with asyncio.timeout(30):
            await end.done


async def test_every_failure_of_a_task_is_answered(path: Path) -> None:
    """An unknown model is an error of its request, and its process goes on."""
    async with model_end(build_gateway(build_model(Embedder())), path), raw_front(path) as raw:
        raw.write(messages.Known((await greet(raw)).version))
        raw.write(messages.Run(1, Embed(model="x", inputs=["a"]), CONTEXT), messages.Wake(2, "x", CONTEXT))
        answers = {message.id: message for message in [await raw.read(), await raw.read()]}
        assert {answers[1].error.name, answers[2].error.name} == {"ModelNotFound"}
        raw.write(messages.Wake(3, "m", CONTEXT))
        assert isinstance(await raw.read(), messages.Done | messages.Models)


def test_a_model_that_was_loaded_again_stays_in_use() -> None:
    """Requests to the earlier one of its name, which may still end, are not counted as ends of its own."""
    front, old, new = shoal.workers.models.Front(), build_model(), build_model()
    for model in (old, new, new):
        front.enter(model)
    front.leave("m")
    assert (old.inflight, new.inflight) == (0, 2)
    front.leave_all()
    front.leave("m")
    assert (old.inflight, new.inflight) == (0, 0)


async def test_replicas_are_those_of_all_fronts(path: Path) -> None:
    """Each front's last report counts; ejections outlive their front, but not their model."""
    model = build_model(Embedder())
    gateway = build_gateway(model)
    async with model_end(gateway, path) as end:
        async with raw_front(path) as one, raw_front(path) as other:
            for front in (one, other):
                await greet(front)
            two = [("m", ReplicaStatus("r", "ejected", count)) for count in (2, 3)]
            one.write(messages.Replicas(two[:1]), messages.Replicas(two))
            other.write(messages.Replicas([("m", ReplicaStatus("r", "in_service", 4))]))
            await until(lambda: sum(each.ejections for _, each in end.server.replicas()) == 9)
            assert {each.state for _, each in end.server.replicas()} == {"ejected", "in_service"}
        await until(lambda: end.server.pids() == [])
        assert end.server.replicas() == [("m", ReplicaStatus("r", "in_service", 9))]
        gateway.registry.remove(model)
        assert end.server.replicas() == []
