"""A server with a cache: settings to lanes, and hits to headers, metrics and statistics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from shoal.app import App, open_app
from shoal.config import LoadedConfig, load
from shoal.errors import ConfigError
from shoal.types import Context, Embed, Rerank
from tests.surfaces.surface_kit import Answer, Exchange, request_scope
from tests.unit.app.test_app import settings


@asynccontextmanager
async def serve(loaded: LoadedConfig, *served: str) -> AsyncIterator[App]:
    async with open_app(loaded, served) as app:
        await app.wait_until_loaded()
        yield app


async def post(app: App, path: str, body: dict[str, Any]) -> Answer:
    sent = {"host": "127.0.0.1:8080", "content-type": "application/json"}
    exchange = Exchange([orjson.dumps({"model": "fake", **body})])
    await app.asgi(request_scope("POST", path, sent), exchange.receive, exchange.send)
    answer = exchange.answer()
    assert answer.status == 200, answer.body
    return answer


async def render_metrics(app: App) -> str:
    return (await asyncio.to_thread(app.observer.render)).decode()


async def metrics(app: App, model: str) -> dict[str, float]:
    """Return the values of a model's cache metrics, by name and tier."""
    hits = {}
    for line in (await render_metrics(app)).splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("shoal_cache_") and f'model="{model}"' in name:
            hits[name.replace(f'{{model="{model}"}}', "").replace(f'model="{model}",', "")] = float(value)
    return hits


async def test_off_by_default() -> None:
    """The header is present and zero; the metrics have no series."""
    async with serve(load({}, {}), "fake:") as app:
        for _ in range(2):
            answer = await post(app, "/v1/embeddings", {"input": ["a", "b"]})
            assert answer.headers["x-shoal-cached"] == "0"
        assert await metrics(app, "fake") == {}
        assert "shoal_cache_hits_total" in await render_metrics(app)


async def test_hits_are_reported() -> None:
    """In the header of each response, in the metrics and in the model's statistics."""
    async with serve(load({"cache_mb": "1"}, {}), "fake:") as app:
        first = await post(app, "/v1/embeddings", {"input": ["a", "b"]})
        again = await post(app, "/v1/embeddings", {"input": ["b", "c", "a"]})
        assert (first.headers["x-shoal-cached"], again.headers["x-shoal-cached"]) == ("0", "2")
        rows = [entry["embedding"] for entry in again.json()["data"]]
        assert [rows[2], rows[0]] == [entry["embedding"] for entry in first.json()["data"]]
        assert again.json()["usage"]["prompt_tokens"] == 3
        alone = await post(app, "/v1/embeddings", {"input": "a"})
        assert (alone.headers["x-shoal-batches"], alone.headers["x-shoal-cached"]) == ("0", "1")
        values = await metrics(app, "fake")
        assert (values["shoal_cache_hits_total"], values["shoal_cache_misses_total"]) == (3, 3)
        assert values["shoal_cache_evicted_total"] == 0
        assert values['shoal_cache_bytes{place="memory"}'] > 3 * 32 * 4
        assert values['shoal_cache_bytes{place="disk"}'] == 0
        (stats,) = await app.gateway.statistics("fake")
        assert (stats.inference_stats.cache_hit.count, stats.inference_stats.cache_miss.count) == (3, 3)


async def test_a_model_may_have_its_own_cache_size(tmp_path: Any) -> None:
    """The model's table overrides the rest of the file."""
    toml = 'cache_mb = 1\n[models."two"]\nbackends = ["fake:"]\ncache_mb = 0\n[models."one"]\nbackends = ["fake:"]'
    loaded = await settings(tmp_path, toml)
    async with serve(loaded, "one", "two") as app:
        for name, cached in (("one", "1"), ("two", "0")):
            await post(app, "/v1/embeddings", {"model": name, "input": "a"})
            answer = await post(app, "/v1/embeddings", {"model": name, "input": "a"})
            assert answer.headers["x-shoal-cached"] == cached
        assert await metrics(app, "one")
        assert not await metrics(app, "two")


async def test_an_unloaded_model_keeps_nothing() -> None:
    """Its rows and series are removed; after a reload it starts empty."""
    async with serve(load({"cache_mb": "1"}, {}), "fake:") as app:
        await post(app, "/v1/embeddings", {"input": "a"})
        lifecycle = app.gateway.lifecycle
        assert lifecycle is not None
        await lifecycle.unload("fake").wait()
        assert await metrics(app, "fake") == {}
        await lifecycle.load("fake").wait()
        answer = await post(app, "/v1/embeddings", {"input": "a"})
        assert answer.headers["x-shoal-cached"] == "0"
        assert (await metrics(app, "fake"))["shoal_cache_misses_total"] == 1


async def test_every_lane_gets_the_cache_setting() -> None:
    """Classifiers and embedders."""
    task = Rerank(model="", queries=["q"], documents=["a", "b"])
    async with serve(load({"cache_mb": "1"}, {}), "fake:labels=1") as app:
        for cached in (0, 2):
            answer = await app.gateway.run(task, Context(id="r", deadline=time.monotonic() + 10))
            assert answer.facts.cached == cached


@pytest.mark.parametrize("value", ["-1", "much"])
def test_sizes_are_checked(value: str) -> None:
    with pytest.raises(ConfigError, match="--cache-disk-mb: must be a whole number"):
        load({"cache_disk_mb": value}, {})


async def test_the_gateway_reports_hits() -> None:
    """As facts of the result, for callers in this process."""
    async with serve(load({"cache_mb": "1"}, {}), "fake:") as app:
        ctx = Context(id="r", deadline=time.monotonic() + 10)
        for cached in (0, 2):
            answer = await app.gateway.run(Embed(model="", inputs=["x", "y"]), ctx)
            assert answer.facts.cached == cached
