"""The router's protocol: lists with status, actions that answer at once, and events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shoal.core.lifecycle.lifecycle import Entry, Event
from shoal.errors import Overloaded, SourceError
from shoal.surfaces import models
from shoal.surfaces.models import HEARTBEAT_S, _encode_event
from shoal.surfaces.shared import listing
from tests.surfaces.life_kit import FOREIGN, OTHER, Living, Scripted, living
from tests.surfaces.surface_kit import MODEL, Exchange, request_scope, serve

DONE = {"success": True}


async def statuses(life: Living) -> dict[str, Any]:
    return {each["id"]: each["status"] for each in (await life.call("GET", "/models")).json()["data"]}


async def wait_for_jobs(life: Living) -> None:
    """Wait for every job, whatever its outcome."""
    for job in life.lifecycle.jobs():
        await job.done_event.wait()


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_list(method: str) -> None:
    """OpenAI's list, plus loadable models and those that Shoal did not create."""
    entries = [Entry(name=FOREIGN, source="triton://host:8001", backend="triton", managed=False, created=7)]
    async with living(Scripted(listed=entries)) as life:
        answer = await (life.call if method == "GET" else life.manage)(method, "/models")
        assert answer.json()["object"] == "list"
        own, foreign = answer.json()["data"]
        assert foreign == {
            "id": FOREIGN,
            "object": "model",
            "created": 7,
            "owned_by": "shoal",
            "status": {"value": "unloaded"},
            "architecture": {"input_modalities": ["text"], "output_modalities": ["embeddings"]},
            "managed": False,
            "backend": "triton",
            "source": "triton://host:8001",
        }
        assert (own["id"], own["status"], own["tasks"]) == (MODEL, {"value": "loaded"}, ["embed"])


async def test_the_list_of_a_server_of_fixed_models() -> None:
    """Only served models."""
    data = (await serve().call("GET", "/models")).json()["data"]
    assert [(each["id"], each["status"]) for each in data] == [(MODEL, {"value": "loaded"})]
    assert data[0]["architecture"]["output_modalities"] == ["embeddings"]


async def test_the_list_does_not_wait_for_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a backend's list takes too long, only served models are listed."""
    monkeypatch.setattr(listing, "LISTING_TIMEOUT_S", 0.001)
    async with living(Scripted(listing_hangs=True)) as life:
        assert await statuses(life) == {MODEL: {"value": "loaded"}}


async def test_load() -> None:
    """Success at once; the list shows progress, then the loaded model."""
    loader = Scripted(hold=asyncio.Event())
    async with living(loader) as life:
        answer = await life.manage("POST", "/models/load", {"model": OTHER})
        assert (answer.status, answer.json()) == (200, DONE)
        await loader.begun.wait()
        status = (await statuses(life))[OTHER]
        assert status["value"] == "loading"
        stage = "downloading model.onnx"
        assert status["progress"] == {"stages": [stage], "current": stage, "value": 0.25}
        assert loader.hold is not None
        loader.hold.set()
        await wait_for_jobs(life)
        assert (await statuses(life))[OTHER] == {"value": "loaded"}


async def test_download() -> None:
    """Like a load, but only the files."""
    loader = Scripted(hold=asyncio.Event())
    async with living(loader) as life:
        assert (await life.manage("POST", "/models", {"model": OTHER})).json() == DONE
        await loader.begun.wait()
        status = (await statuses(life))[OTHER]
        assert status["value"] == "downloading"
        ((_, bytes_done),) = status["progress"].items()
        assert bytes_done == {"done": 30, "total": 120}
        assert loader.hold is not None
        loader.hold.set()
        await wait_for_jobs(life)
        assert loader.touched == [("fetch", OTHER)]


async def test_unloading_stops_a_load() -> None:
    """The router's clients cancel a download this way."""
    loader = Scripted(hold=asyncio.Event())
    async with living(loader) as life:
        await life.manage("POST", "/models/load", {"model": OTHER})
        await loader.begun.wait()
        assert (await life.manage("POST", "/models/unload", {"model": OTHER})).json() == DONE
        await wait_for_jobs(life)
        assert "loaded" not in [(await statuses(life)).get(OTHER, {}).get("value")]


async def test_a_load_that_fails_is_listed() -> None:
    """The load succeeded at once; the list has the reason."""
    async with living(Scripted(error=SourceError("no such model"))) as life:
        assert (await life.manage("POST", "/models/load", {"model": OTHER})).json() == DONE
        await wait_for_jobs(life)
        assert (await statuses(life))[OTHER] == {"value": "unloaded", "failed": True, "error": "no such model"}


async def test_unload_and_delete() -> None:
    """Unloading answers at once, deleting when done; an unknown model is a 404."""
    async with living() as life:
        assert (await life.manage("POST", "/models/unload", {"model": MODEL})).json() == DONE
        await wait_for_jobs(life)
        answer = await life.manage("DELETE", f"/models?model={MODEL}")
        assert (answer.status, answer.json()) == (200, DONE)
        assert life.loader.touched[-1] == ("remove", MODEL)
        assert (await life.manage("DELETE", "/models?model=org%2Fname")).status == 404
        answer = await life.manage("DELETE", "/models")
        assert (answer.status, answer.json()["error"]["param"]) == (400, "model")
        assert (await life.manage("DELETE", f"/models?model={FOREIGN}")).status == 403


@pytest.mark.parametrize("path", ["/models/load", "/models/unload"])
async def test_a_model_is_required(path: str) -> None:
    async with living() as life:
        answer = await life.manage("POST", path, {})
        assert (answer.status, answer.json()["error"]["param"]) == (400, "model")
        assert life.loader.touched == []


@asynccontextmanager
async def watching(life: Living) -> AsyncIterator[Watched]:
    """Yield a client of /models/sse that received the first bytes; it disconnects afterwards."""
    exchange = Watched()
    scope = request_scope("GET", "/models/sse", {"host": "localhost"})
    task = asyncio.create_task(life.server.app(scope, exchange.receive, exchange.send))
    await exchange.until(lambda messages: len(messages) >= 2)
    for _ in range(5):  # until it waits for its first event
        await asyncio.sleep(0)
    try:
        yield exchange
    finally:
        exchange.leave()
        await asyncio.wait_for(task, 30)


class Watched(Exchange):
    """An exchange that wakes waiters when something is sent."""

    def __init__(self) -> None:
        super().__init__([b""])
        self._sent = asyncio.Event()

    async def send(self, message: dict[str, Any]) -> None:
        await super().send(message)
        self._sent.set()

    async def until(self, accepts: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Wait until `accepts` is true for the sent messages."""
        async with asyncio.timeout(30):
            while not accepts(self.messages):
                self._sent.clear()
                await self._sent.wait()

    async def find_event(self, accepts: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for the first event for which `accepts` is true, and return it."""
        await self.until(lambda _: any(map(accepts, events(self))))
        return next(filter(accepts, events(self)))


def over(messages: list[dict[str, Any]]) -> bool:
    return messages[-1] == {"type": "http.response.body", "body": b""}


def events(exchange: Exchange) -> list[dict[str, Any]]:
    text = b"".join(each["body"] for each in exchange.messages[1:]).decode()
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: ")]


async def test_events() -> None:
    """Every step of a model's life, as JSON objects in `data:`."""
    async with living() as life, watching(life) as exchange:
        headers = dict(exchange.messages[0]["headers"])
        assert headers[b"content-type"] == b"text/event-stream"
        await life.manage("POST", "/models", {"model": OTHER})
        await exchange.find_event(lambda each: each["event"] == "download_finished")
        await life.manage("POST", "/models/load", {"model": OTHER})
        await exchange.find_event(lambda each: each.get("data", {}).get("status") == "loaded")
        await life.manage("DELETE", f"/models?model={OTHER}")
        await exchange.find_event(lambda each: each["event"] == "model_remove")
        assert {each["model"] for each in events(exchange)} == {OTHER}
        assert "unloading" not in [each.get("data", {}).get("status") for each in events(exchange)]
        assert {"model_status", "download_finished", "model_remove"} <= {each["event"] for each in events(exchange)}
        assert {"model": OTHER, "event": "model_remove"} in events(exchange)


async def test_a_failed_download_is_an_event() -> None:
    """It has the reason."""
    async with living(Scripted(error=SourceError("no such model"))) as life, watching(life) as exchange:
        await life.manage("POST", "/models", {"model": OTHER})
        failed = await exchange.find_event(lambda each: each["event"] == "download_failed")
        assert failed["data"]["error"] == "no such model"


async def test_a_disconnect_ends_the_stream() -> None:
    """Another client can take its place."""
    async with living() as life:
        async with watching(life):
            pass
        async with watching(life) as exchange:
            assert exchange.messages[1]["body"] == b": watching\n\n"


async def test_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client above the limit gets a 429 with Retry-After, until another disconnects."""
    monkeypatch.setattr(models, "MAX_STREAMS", 1)
    async with living() as life:
        async with watching(life):
            answer = await life.call("GET", "/models/sse")
            assert (answer.status, answer.headers["retry-after"]) == (429, "30")
        async with watching(life):
            pass


async def test_a_burst_of_streams_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place is taken when the stream is created, not when it starts; an unused stream returns it."""
    monkeypatch.setattr(models, "MAX_STREAMS", 1)
    request: Any = None
    async with living() as life:
        stream = models._EventStream(life.server.gateway)
        first = await stream(request)
        with pytest.raises(Overloaded):
            await stream(request)
        del first
        assert (await stream(request)).status == 200


async def test_the_server_going_down_ends_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would delay the drain."""
    monkeypatch.setattr(models, "_POLL_INTERVAL_S", 0.001)
    async with living() as life, watching(life) as exchange:
        life.server.gateway.draining = True
        await exchange.until(over)


async def test_streams_end_with_the_lifecycle() -> None:
    """They end properly."""
    async with living() as life, watching(life) as exchange:
        await life.lifecycle.aclose()
        await exchange.until(over)


async def test_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comment, which no client takes for an event, keeps an idle stream alive."""
    monkeypatch.setattr(models, "_POLL_INTERVAL_S", 0.001)
    monkeypatch.setattr(models, "HEARTBEAT_S", 0.002)
    assert HEARTBEAT_S == 15.0
    async with living() as life, watching(life) as exchange:
        await exchange.until(lambda messages: messages[-1].get("body") == b": still here\n\n")
        assert events(exchange) == []


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            Event("model_status", "m", {"status": "loaded", "error": None, "stage": ""}),
            {"model": "m", "event": "model_status", "data": {"status": "loaded"}},
        ),
        (
            Event("model_status", "m", {"status": "failed", "error": "why", "stage": ""}),
            {"model": "m", "event": "model_status", "data": {"status": "unloaded", "failed": True, "error": "why"}},
        ),
        (
            Event("model_status", "m", {"status": "loading", "error": None, "stage": "opening"}),
            {
                "model": "m",
                "event": "model_status",
                "data": {
                    "status": "loading",
                    "progress": {"stages": ["opening"], "current": "opening", "value": 0.0},
                },
            },
        ),
        (
            Event("download_progress", "m", {"stage": "x", "done": 1.0, "total": None, "fraction": None}),
            {"model": "m", "event": "download_progress", "data": {"m": {"done": 1.0, "total": 0}}},
        ),
        (Event("model_remove", "m"), {"model": "m", "event": "model_remove"}),
    ],
)
def test_the_format_of_events(event: Event, expected: dict[str, Any]) -> None:
    """The router's format: it has no failed state, and reports progress by file."""
    piece = _encode_event(event)
    assert piece.startswith(b"data: ")
    assert piece.endswith(b"\n\n")
    assert json.loads(piece[len(b"data: ") :]) == expected


async def test_a_loaded_model_that_does_not_answer() -> None:
    """No model list calls it loaded; it can still be unloaded."""
    async with living() as life:
        life.server.runner.able = False
        (entry,) = (await life.call("GET", "/models")).json()["data"]
        assert (entry["status"]["value"], entry["status"]["failed"]) == ("unloaded", True)
        assert (await life.call("GET", "/loaded_models")).json() == {"models": []}
        (shown,) = (await life.call("GET", "/repository_models")).json()["models"]
        assert shown["state"] == "UNAVAILABLE"
        assert "does not respond" in shown["reason"]
        assert (await life.manage("POST", f"/v1/models/{MODEL}/unload")).status == 200


async def test_one_model() -> None:
    """triton-openai's route for one model; unknown ones are 404. Only admins see a server's address."""
    entries = [Entry(name=FOREIGN, source="triton://host:8001", backend="triton", managed=False, created=7)]
    async with living(Scripted(listed=entries), admin_key=("boss",)) as life:
        answer = await life.call("GET", f"/models/{MODEL}")
        assert (answer.status, answer.json()["id"]) == (200, MODEL)
        assert (await life.call("GET", "/models/nobody")).status == 404
        for headers, source in (({}, None), ({"authorization": "Bearer boss"}, "triton://host:8001")):
            listed = (await life.call("GET", "/models", headers=headers)).json()["data"]
            assert [each.get("source") for each in listed if each["id"] == FOREIGN] == [source]
