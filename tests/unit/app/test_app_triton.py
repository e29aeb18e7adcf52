"""The composition root over a Triton in this process: waiting for it, serving its models, starting one."""

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
from shoal.backends.triton import TritonBackend
from shoal.backends.triton import engine as engine_module
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
from shoal.kserve import protocol_pb2 as pb
from shoal.models.address import Address
from shoal.models.store import Store
from shoal.observability.metrics import PrometheusObserver
from shoal.types import ModelStats
from tests.fakes.triton import FakeModel, FakeTriton
from tests.unit.app.test_app import LOCAL, files_present, open_loaded_app, patch_opening, settings, states, vector
from tests.unit.backends.triton.open.kit import grpc_in_use, reads, stored_model, text_model, until
from tests.unit.backends.triton.open.kit import vector_of as triton_vector_of
from tests.unit.models.checkpoints import HIDDEN


@pytest.fixture
def loaded() -> LoadedConfig:
    return load({}, {})


@pytest.fixture
async def triton(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeTriton]:
    """A Triton that is checked without pauses."""
    monkeypatch.setattr(TritonBackend, "offers_every_s", 0.001)
    monkeypatch.setattr(discovery, "RETRY_INTERVAL_S", 0.001)
    monkeypatch.setattr(engine_module, "LOOK_S", 0.001)
    monkeypatch.setattr(backoff, "RETRY_S", (0.001,))
    async with grpc_in_use(), FakeTriton() as server:
        yield server


async def test_a_named_model_is_waited_for(loaded: LoadedConfig, triton: FakeTriton) -> None:
    """Meanwhile Shoal is not ready, and errors name the model's server; at shutdown the model stays loaded."""
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


async def test_all_offered_models_are_served(
    loaded: LoadedConfig, triton: FakeTriton, caplog: pytest.LogCaptureFixture
) -> None:
    """Shoal is not ready until the first listing; then models are served as Triton loads them. Unsupported models are
    logged once.
    """
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
        await triton.wait_for_calls("RepositoryIndex", looks + 3)
    messages = [record.getMessage() for record in caplog.records if f"of {address}" in record.getMessage()]
    assert [line.split(" of ")[0] for line in messages] == ["emb", "llm", "org/late"]
    assert "is not served: Triton's model 'llm' generates text" in messages[1]


async def test_names_of_offered_models_are_known_while_they_load(
    loaded: LoadedConfig, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other name is permanently unknown, not a retryable error."""
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


async def test_a_name_conflict_blocks_no_other_model(
    tmp_path: Path, triton: FakeTriton, caplog: pytest.LogCaptureFixture
) -> None:
    """A name from the command line counts as already served; a conflict with an alias is logged."""
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


async def test_models_unloaded_by_api_stay_unloaded(loaded: LoadedConfig, triton: FakeTriton) -> None:
    """The model is no longer offered."""
    triton.add(text_model("emb"))
    async with open_app(loaded, [f"triton://{triton.target}"]) as app:
        await until(lambda: states(app) == {"emb": "ready"})
        assert app.gateway.lifecycle is not None
        await app.gateway.lifecycle.unload("emb").wait()
        assert triton.models["emb"].state == "UNAVAILABLE"
        looks = triton.calls["RepositoryIndex"]
        await triton.wait_for_calls("RepositoryIndex", looks + 3)
        assert states(app) == {}


async def test_own_triton_start_failure_fails_its_models(
    tmp_path: Path, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models for this Triton fail with the reason; others are served."""

    def fail_to_start(*args: Any) -> Any:
        raise SetupError("there is no Triton for this machine")

    patch_opening(monkeypatch, files_present)
    monkeypatch.setattr(host_module, "run_triton", fail_to_start)
    chosen = await settings(tmp_path, triton=True, home=str(tmp_path / "home"))
    async with open_loaded_app(chosen, LOCAL, "good=fake:") as app:
        assert states(app) == {"slow": "failed", "good": "ready"}
        assert app.gateway.model("slow").error == "there is no Triton for this machine"


async def test_own_triton_serves_local_models(
    tmp_path: Path, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written to its repository while it starts, and loaded there."""
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


class CountingRunner:
    """A runner with backend counters, which can be made unreachable."""

    def __init__(self) -> None:
        self.items = 41
        self.away = False
        self.started = asyncio.Event()

    async def statistics(self) -> list[ModelStats]:
        self.started.set()
        if self.away:
            raise TransportFailed("gone")
        return [ModelStats(name="emb", inference_count=self.items)]


async def test_backend_counters_are_among_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters are polled in the background, so a scrape never waits for another machine; an unreachable backend does
    not end the polling.
    """
    monkeypatch.setattr(app_module, "STATISTICS_INTERVAL_S", 0.001)
    registry, observer, runner = Registry(), PrometheusObserver(), CountingRunner()
    registry.add(model := Model("emb"))
    model.runner = cast(Runner, runner)
    asking = asyncio.create_task(app_module._poll_statistics(registry, observer))

    async def two_checks() -> None:
        for _ in range(2):  # the second check sees the result of the first
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
    """No argument names its server."""
    triton.add(text_model("emb"))
    toml = f'[models."far"]\nbackends = ["triton://{triton.target}#emb"]\n'
    async with open_loaded_app(await settings(tmp_path, toml, models=["fake:"]), "fake:") as app:
        assert app.gateway.lifecycle is not None
        await app.gateway.lifecycle.load("far").wait()
        assert np.array_equal(await vector(app, "far", "x"), triton_vector_of("x"))


async def test_one_triton_at_a_time() -> None:
    """The two flags contradict each other; a preset's address gives way to an own server."""
    loaded = await asyncio.to_thread(load, {"triton": True, "triton_url": "localhost:1"}, {})
    with pytest.raises(ConfigError, match="set only one of them"):
        async with open_app(loaded, ["fake:"]):
            raise AssertionError


async def test_checks_continue_after_an_unexpected_error(
    loaded: LoadedConfig, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the error, readiness reports it, and checks continue."""
    triton.add(text_model("emb"))
    real, looks = ModelLoader.list_offers, 0

    async def raise_on_list(self: ModelLoader, address: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise RecursionError("too deep")
        return await real(self, address)

    monkeypatch.setattr(ModelLoader, "list_offers", raise_on_list)
    address = f"triton://{triton.target}"
    async with open_app(loaded, [address]) as app:
        await until(lambda: "could not be processed" in app.gateway.pending_sources.get(address, ""))
        assert not app.gateway.ready()
        await until(app.gateway.ready)
        assert states(app) == {"emb": "ready"}
    assert "too deep" in caplog.text
