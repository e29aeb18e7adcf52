"""The composition root over a Triton in this process: waiting for it, serving what it offers, starting one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import shoal.backends.local.open
from shoal import app as app_module
from shoal.app import discovery, open_app
from shoal.app.loader import ModelLoader
from shoal.backends.base import backoff
from shoal.backends.triton import engine as engine_module
from shoal.backends.triton import protocol_pb2 as pb
from shoal.backends.triton.open import host as host_module
from shoal.config import LoadedConfig, load
from shoal.core.protocols import Runner
from shoal.core.registry import Model, Registry
from shoal.errors import (
    ConfigError,
    ModelNotFound,
    ModelNotReady,
    SetupError,
    TransportFailed,
)
from shoal.models.address import Address
from shoal.models.store import Store
from shoal.observability.metrics import PrometheusObserver
from shoal.types import ModelStats
from tests.fakes.triton import FakeModel, FakeTriton
from tests.unit.app.test_app import LOCAL, at_hand, opened, opening, settings, states, vector
from tests.unit.backends.triton.open.kit import grpc_in_use, reads, stored_model, text_model, until
from tests.unit.backends.triton.open.kit import vector_of as triton_vector_of
from tests.unit.models.checkpoints import HIDDEN


@pytest.fixture
def loaded() -> LoadedConfig:
    return load({}, {})


@pytest.fixture
async def triton(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeTriton]:
    """Nobody pauses between looks at it."""
    monkeypatch.setattr(discovery, "POLL_INTERVAL_S", 0.001)
    monkeypatch.setattr(discovery, "RETRY_INTERVAL_S", 0.001)
    monkeypatch.setattr(engine_module, "LOOK_S", 0.001)
    monkeypatch.setattr(backoff, "RETRY_S", (0.001,))
    async with grpc_in_use(), FakeTriton() as server:
        yield server


async def test_a_named_model_is_waited_for(loaded: LoadedConfig, triton: FakeTriton) -> None:
    """Shoal answers meanwhile, not ready, and its refusals say what for; on leaving the model stays loaded."""
    triton.add(text_model("emb"))
    await triton.stop()
    async with open_app(loaded, [f"triton://{triton.target}#emb", "fake:"]) as app:
        await until(lambda: "is not reachable" in app.gateway.model("emb").note)
        assert not app.gateway.ready()
        with pytest.raises(ModelNotReady, match=rf"loading \(waiting for triton://{triton.target}#emb: "):
            await vector(app, "emb", "x")
        assert len(await vector(app, "fake", "x")) == 32
        await triton.start()
        await app.wait_until_loaded()
        assert app.gateway.ready()
        assert app.gateway.model("emb").note == ""
        assert np.array_equal(await vector(app, "emb", "x"), triton_vector_of("x"))
        await triton.stop()
        await until(lambda: not app.gateway.ready())
        await triton.start()
        await until(app.gateway.ready)
    assert triton.models["emb"].state == "READY"


async def test_whatever_a_server_offers_is_served(
    loaded: LoadedConfig, triton: FakeTriton, caplog: pytest.LogCaptureFixture
) -> None:
    """Not ready until it was asked; then models come as they are loaded there. What cannot be served is said
    once."""
    address = f"triton://{triton.target}"
    triton.add(text_model("emb"))
    triton.add(FakeModel("llm", config=pb.ModelConfig(name="llm", backend="vllm")))
    await triton.stop()
    caplog.set_level("INFO", "shoal")
    async with open_app(loaded, [address]) as app:
        assert list(app.gateway.pending_sources) == [address]
        await until(lambda: "is not reachable" in app.gateway.pending_sources[address])
        assert not app.gateway.ready()
        await triton.start()
        await until(lambda: states(app) == {"emb": "ready"})
        await until(app.gateway.ready)
        assert app.gateway.pending_sources == {}
        assert np.array_equal(await vector(app, "", "x"), triton_vector_of("x"))
        triton.add(text_model("org~late"))
        await until(lambda: states(app).get("org/late") == "ready")
        looks = triton.calls["RepositoryIndex"]
        await triton.called("RepositoryIndex", looks + 3)
    messages = [record.getMessage() for record in caplog.records if f"of {address}" in record.getMessage()]
    assert [line.split(" of ")[0] for line in messages] == ["emb", "llm", "org/late"]
    assert "is not served: Triton's model 'llm' generates text" in messages[1]


async def test_while_what_a_server_offers_loads_its_names_are_known(
    loaded: LoadedConfig, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another name is unknown for good, and nobody is to come again for it."""
    triton.add(text_model("emb"))
    release, real = asyncio.Event(), ModelLoader.open

    async def slow(self: ModelLoader, *args: Any, **more: Any) -> Any:
        await release.wait()
        return await real(self, *args, **more)

    monkeypatch.setattr(ModelLoader, "open", slow)
    address = f"triton://{triton.target}"
    async with open_app(loaded, [address]) as app:
        await until(lambda: app.gateway.pending_sources[address] == "its models are loading")
        with pytest.raises(ModelNotReady, match="loading"):
            await vector(app, "emb", "x")
        with pytest.raises(ModelNotFound, match="available models: 'emb'"):
            app.gateway.model("other")
        release.set()
        await until(app.gateway.ready)


async def test_a_name_that_is_taken_keeps_no_other_away(
    tmp_path: Path, triton: FakeTriton, caplog: pytest.LogCaptureFixture
) -> None:
    """By a model of the command line it is simply served already; by an alias it is said."""
    toml = '[models."b"]\naliases = ["fake"]\n'
    for name in ("fake", "b", "c"):
        triton.add(text_model(name))
    caplog.set_level("INFO", "shoal")
    async with open_app(await settings(tmp_path, toml), ["fake:", f"triton://{triton.target}"]) as app:
        await until(lambda: states(app).get("c") == "ready")
        assert states(app) == {"fake": "ready", "c": "ready"}
        await until(app.gateway.ready)
    assert "b of" in caplog.text
    assert "the name 'fake' is used by two models" in caplog.text


async def test_what_was_unloaded_there_by_api_does_not_come_back(loaded: LoadedConfig, triton: FakeTriton) -> None:
    """It is not offered any more."""
    triton.add(text_model("emb"))
    async with open_app(loaded, [f"triton://{triton.target}"]) as app:
        await until(lambda: states(app) == {"emb": "ready"})
        assert app.gateway.lifecycle is not None
        await app.gateway.lifecycle.unload("emb").wait()
        assert triton.models["emb"].state == "UNAVAILABLE"
        looks = triton.calls["RepositoryIndex"]
        await triton.called("RepositoryIndex", looks + 3)
        assert states(app) == {}


async def test_a_triton_of_its_own_that_cannot_start(
    tmp_path: Path, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models that were meant for it say why; the others serve."""

    def nowhere(*args: Any) -> Any:
        raise SetupError("there is no Triton for this machine")

    opening(monkeypatch, at_hand)
    monkeypatch.setattr(host_module, "run_triton", nowhere)
    chosen = await settings(tmp_path, triton=True, home=str(tmp_path / "home"))
    async with opened(chosen, LOCAL, "good=fake:") as app:
        assert states(app) == {"slow": "failed", "good": "ready"}
        assert app.gateway.model("slow").error == "there is no Triton for this machine"


async def test_a_triton_of_its_own_takes_local_models(
    tmp_path: Path, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written into its repository while it starts, and asked there."""
    there = asyncio.Event()

    @asynccontextmanager
    async def run_triton(options: Any, progress: Any) -> AsyncIterator[Any]:
        await there.wait()
        reads(triton, options.folder)
        yield SimpleNamespace(url=triton.target, repository=options.folder, platforms=("onnxruntime",))

    async def prepared(address: Address, *args: Any) -> Any:
        store = Store(tmp_path / "home")
        there = await asyncio.to_thread(store.find, address)
        return there or await asyncio.to_thread(stored_model, store, str(address))

    monkeypatch.setattr(shoal.backends.local.open, "prepare_async", prepared)
    monkeypatch.setattr(host_module, "run_triton", run_triton)
    chosen = await settings(tmp_path, triton=True, home=str(tmp_path / "home"))
    async with open_app(chosen, [LOCAL]) as app:
        await until(lambda: app.gateway.model("slow").note == "waiting for Triton to start")
        there.set()
        await app.wait_until_loaded()
        facts = app.gateway.model("slow").facts
        assert facts is not None
        assert (facts.backend, app.gateway.ready()) == ("triton", True)
        assert (await vector(app, "slow", "fish")).shape == (HIDDEN,)


class Counting:
    """A runner whose backend counts, and is away when it is told to be."""

    def __init__(self) -> None:
        self.items = 41
        self.away = False
        self.started = asyncio.Event()

    async def statistics(self) -> list[ModelStats]:
        self.started.set()
        if self.away:
            raise TransportFailed("gone")
        return [ModelStats(name="emb", inference_count=self.items)]


async def test_what_backends_count_is_among_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked in the background, so that a scrape waits for no other machine; one that is away does not end that."""
    monkeypatch.setattr(app_module, "STATISTICS_INTERVAL_S", 0.001)
    registry, observer, runner = Registry(), PrometheusObserver(), Counting()
    registry.add(model := Model("emb"))
    model.runner = cast(Runner, runner)
    asking = asyncio.create_task(app_module._poll_statistics(registry, observer))

    async def two_checks() -> None:
        for _ in range(2):  # what the first one answered is in its place by the second
            runner.started.clear()
            await runner.started.wait()

    def line(count: int) -> bytes:
        return b'shoal_backend_items_total{model="emb",replica="0"} %d.0' % count

    await two_checks()
    assert line(41) in await asyncio.to_thread(observer.render)
    runner.away = True
    await two_checks()
    runner.away, runner.items = False, 42
    await two_checks()
    assert line(42) in await asyncio.to_thread(observer.render)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_table_may_be_loaded_later(tmp_path: Path, triton: FakeTriton) -> None:
    """Its server is named nowhere else."""
    triton.add(text_model("emb"))
    toml = f'[models."far"]\nbackends = ["triton://{triton.target}#emb"]\n'
    async with opened(await settings(tmp_path, toml, models=["fake:"]), "fake:") as app:
        assert app.gateway.lifecycle is not None
        await app.gateway.lifecycle.load("far").wait()
        assert np.array_equal(await vector(app, "far", "x"), triton_vector_of("x"))


async def test_one_triton_at_a_time() -> None:
    """Both flags contradict each other; a preset's address gives way to a server of its own."""
    loaded = await asyncio.to_thread(load, {"triton": True, "triton_url": "localhost:1"}, {})
    with pytest.raises(ConfigError, match="choose one of them"):
        async with open_app(loaded, ["fake:"]):
            raise AssertionError


async def test_a_look_that_fails_in_an_unforeseen_way_is_not_the_last(
    loaded: LoadedConfig, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the mistake, readiness says that there is one, and the next look is as good as any."""
    triton.add(text_model("emb"))
    real, looks = ModelLoader.list_offers, 0

    async def offered(self: ModelLoader, address: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise RecursionError("too deep")
        return await real(self, address)

    monkeypatch.setattr(ModelLoader, "list_offers", offered)
    address = f"triton://{triton.target}"
    async with open_app(loaded, [address]) as app:
        await until(lambda: "could not be processed" in app.gateway.pending_sources.get(address, ""))
        assert not app.gateway.ready()
        await until(app.gateway.ready)
        assert states(app) == {"emb": "ready"}
    assert "too deep" in caplog.text
