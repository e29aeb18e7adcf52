"""The composition root over scripted models: start, failure and shutdown."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import shoal.backends.local.open
from shoal.app import App, open_app
from shoal.backends.fake.model import compute_vector, tokenize_item
from shoal.backends.local.open import open_local
from shoal.config import LoadedConfig, load
from shoal.config.settings import Settings
from shoal.core.protocols import Runner
from shoal.errors import (
    AddressError,
    ConfigError,
    ModelFailed,
    ModelNotFound,
    ModelNotReady,
    SourceError,
)
from shoal.models.address import Address
from shoal.models.sources.pins import DEFAULT_MODEL
from shoal.models.store import StoredModel
from shoal.types import Context, Embed, Generate
from tests.unit.core.conftest import gathered

LOCAL = "slow=hf:org/slow"


async def settings(tmp_path: Path, toml: str = "", **flags: Any) -> LoadedConfig:
    file = tmp_path / "shoal.toml"
    file.write_text(toml)
    return await asyncio.to_thread(load, flags, {}, file)


@pytest.fixture
def loaded() -> LoadedConfig:
    return load({}, {})


@asynccontextmanager
async def open_loaded_app(loaded: LoadedConfig, *served: str) -> AsyncIterator[App]:
    async with open_app(loaded, served) as app:
        await app.wait_until_loaded()
        yield app


def new_context() -> Context:
    return Context(id="r", deadline=time.monotonic() + 10, client="c")


def states(app: App) -> dict[str, str]:
    return {card.name: card.state for card in app.gateway.models()}


async def vector(app: App, model: str, text: str) -> Any:
    answer = await app.gateway.run(Embed(model=model, inputs=[text], normalize=False), new_context())
    return answer.vectors[0]


async def files_present(*args: Any) -> Any:
    """Pretend that the files are already present."""
    return SimpleNamespace(size=0, manifest=SimpleNamespace(created=0, generation=None, image=None))


def patch_opening(
    monkeypatch: pytest.MonkeyPatch,
    open_: Callable[..., Awaitable[Any]],
    prepared: Callable[..., Awaitable[Any]] = files_present,
) -> None:
    """Replace the steps of a local model: its files, then its engines."""
    monkeypatch.setattr(shoal.backends.local.open, "prepare_async", prepared)
    monkeypatch.setattr(shoal.backends.local.open, "open_local", open_)


async def test_fake_models_embed_and_generate(loaded: LoadedConfig) -> None:
    """Each model uses its own script; the server is ready when all are, and the first one is the default."""
    async with open_loaded_app(loaded, "a=fake:dimension=8", "b=fake:dimension=16") as app:
        assert app.gateway.ready()
        assert np.array_equal(await vector(app, "a", "x y"), compute_vector(tokenize_item("x y"), 8))
        assert np.array_equal(await vector(app, "b", "x y"), compute_vector(tokenize_item("x y"), 16))
        assert len(await vector(app, "", "x y")) == 8
        chunks = app.gateway.stream(Generate(model="b", prompts=["x y"]), new_context())
        assert "".join([chunk.text async for chunk in chunks]) == "x y"
        assert app.gateway.models()[0].facts is not None


async def test_replicas_of_a_model_share_its_work(loaded: LoadedConfig) -> None:
    """Two addresses under one name are one model with two replicas."""
    async with open_loaded_app(loaded, "two=fake:delay_ms=1000,fake:delay_ms=1000") as app:
        first = asyncio.create_task(app.gateway.run(Embed(model="two", inputs=["a"]), new_context()))
        await asyncio.sleep(0.01)
        second = await app.gateway.run(Embed(model="two", inputs=["b"]), new_context())
        assert {(await first).facts.replica, second.facts.replica} == {"fake-0", "fake-1"}


async def test_a_failed_model_does_not_stop_others(loaded: LoadedConfig) -> None:
    """An unknown option of fake fails its model with the reason; the other one serves, and the server is not ready."""
    async with open_loaded_app(loaded, "bad=fake:speed=5", "good=fake:") as app:
        assert states(app) == {"bad": "failed", "good": "ready"}
        assert "unknown option 'speed'" in str(app.gateway.model("bad").error)
        assert len(await vector(app, "good", "x")) == 32
        with pytest.raises(ModelFailed, match="unknown option 'speed'"):
            await vector(app, "bad", "x")
        assert not app.gateway.ready()


async def test_a_bug_while_loading_is_that_models_failure(
    loaded: LoadedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected exception becomes the model's failure with its type; errors for operators keep their text."""

    async def broken(name: str, *args: Any, **named: Any) -> Any:
        raise ZeroDivisionError("by hand")

    async def prepared(address: Address, *args: Any) -> Any:
        if address.target == "org/gone":
            raise SourceError("the hub is away")
        return await files_present()

    patch_opening(monkeypatch, broken, prepared)
    async with open_loaded_app(loaded, LOCAL, "gone=hf:org/gone", "good=fake:") as app:
        assert states(app) == {"slow": "failed", "gone": "failed", "good": "ready"}
        assert "by hand" in str(app.gateway.model("slow").error)
        assert app.gateway.model("gone").error == "the hub is away"


async def test_kinds_of_replicas_do_not_mix(loaded: LoadedConfig) -> None:
    """A scripted and a real model under one name would return different kinds of vectors."""
    async with open_loaded_app(loaded, "x=fake:,hf:org/real") as app:
        assert "must use the same backend, not fake, hf" in str(app.gateway.model("x").error)


async def test_tables_give_aliases_and_defaults(tmp_path: Path) -> None:
    """Tables apply by the model's name; a table of a model that is not served has no effect."""
    toml = """
        [models."b"]
        aliases = ["bee", "text-embedding-3-small"]
        default_for = ["embed"]
        [models."elsewhere"]
        aliases = ["nobody"]
    """
    async with open_loaded_app(await settings(tmp_path, toml), "a=fake:dimension=8", "b=fake:dimension=16") as app:
        for name in ("", "b", "bee", "text-embedding-3-small"):
            assert app.gateway.model(name).name == "b"
        assert app.gateway.registry.find("", "generate").name == "a"
        assert app.gateway.model("b").aliases == ("bee", "text-embedding-3-small")
        assert [card.name for card in app.gateway.models()] == ["a", "b"]


async def test_a_models_own_settings_reach_its_lane(tmp_path: Path) -> None:
    """A table's override applies to that model only."""
    toml = '[models."small"]\nmax_batch_size = 1\n'
    async with open_loaded_app(await settings(tmp_path, toml), "small=fake:delay_ms=5", "large=fake:delay_ms=5") as app:
        for name, size in (("small", 1), ("large", 3)):
            answer = await app.gateway.run(Embed(model=name, inputs=["a", "b", "c"]), new_context())
            assert answer.facts.size == size


@pytest.mark.parametrize(
    ("served", "error"),
    [
        (["a=fake:", "a=fake:"], AddressError),
        (["fake:", "fake:slots=2"], AddressError),
        (["load=fake:"], AddressError),
        (["tei+http://a,tei+http://b"], ConfigError),
    ],
)
async def test_configuration_errors_fail_the_start(
    loaded: LoadedConfig, served: Sequence[str], error: type[Exception]
) -> None:
    """Duplicate or reserved names, and replicas without a name, fail the start."""
    with pytest.raises(error):
        async with open_app(loaded, served):
            raise AssertionError("it must not open")


async def test_the_default_model_has_its_short_name_unless_it_was_named(
    loaded: LoadedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without arguments the default model has its alias; with explicit names it may be served twice."""

    async def raise_error(*args: Any) -> Any:
        raise SourceError("not here")

    patch_opening(monkeypatch, raise_error)
    async with open_loaded_app(loaded) as app:
        assert app.gateway.model("all-MiniLM-L6-v2").name == "sentence-transformers/all-MiniLM-L6-v2"
    async with open_loaded_app(loaded, f"a={DEFAULT_MODEL}", f"b={DEFAULT_MODEL}") as app:
        assert [card.aliases for card in app.gateway.models()] == [(), ()]


async def test_a_loading_model_is_reported_and_closing_stops_it(
    loaded: LoadedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests for the loading model are ModelNotReady, other models serve; closing cancels the load."""
    begun, cancelled = asyncio.Event(), False

    async def endless(*args: Any, **named: Any) -> Any:
        nonlocal cancelled
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled = True
            raise

    patch_opening(monkeypatch, endless)
    async with open_app(loaded, [LOCAL, "good=fake:"]) as app:
        await begun.wait()
        await asyncio.sleep(0)
        assert states(app) == {"slow": "loading", "good": "ready"}
        with pytest.raises(ModelNotReady, match="is loading") as caught:
            await vector(app, "slow", "x")
        assert caught.value.retry_after
        assert len(await vector(app, "good", "x")) == 32
        assert not app.gateway.ready()
    assert cancelled


async def test_loading_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After load_timeout_s the model has failed, and the error names that setting."""

    async def endless(*args: Any, **named: Any) -> Any:
        await asyncio.Event().wait()

    patch_opening(monkeypatch, endless)
    async with open_loaded_app(await settings(tmp_path, load_timeout_s=0.05), LOCAL) as app:
        assert states(app) == {"slow": "failed"}
        assert "load_timeout_s" in str(app.gateway.model("slow").error)


async def test_closing_cancels_running_work(loaded: LoadedConfig) -> None:
    """A request in flight gets a retryable error, and every runner is closed, also after one that fails to close."""

    class Stubborn:
        """Delegates to a runner, but fails to close."""

        def __init__(self, runner: Runner) -> None:
            self._runner = runner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._runner, name)

        async def aclose(self) -> None:
            raise OSError("stuck")

    runners: list[Runner | None] = []
    with pytest.raises(OSError, match="stuck"):
        async with open_loaded_app(loaded, "a=fake:delay_ms=9000", "b=fake:", "c=fake:") as app:
            call = asyncio.create_task(app.gateway.run(Embed(model="a", inputs=["x"]), new_context()))
            await asyncio.sleep(0.01)
            middle = app.gateway.registry.find("b")
            middle.runner = cast(Runner, Stubborn(cast(Runner, middle.runner)))
            runners = [app.gateway.registry.find(name).runner for name in "ac"]
    (outcome,) = await gathered(call)
    assert getattr(outcome, "kind", None) == "unavailable"
    assert [runner.ready() for runner in runners if runner is not None] == [False, False]


async def test_local_replicas_must_hold_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models under one name would mix two spaces in one index, so they are refused before an engine is opened."""
    stored = iter(["one", "other"])
    monkeypatch.setattr(
        shoal.backends.local.open,
        "prepare_local",
        lambda *args, **options: cast(StoredModel, SimpleNamespace(space=next(stored))),
    )
    monkeypatch.setattr(shoal.backends.local.open, "hash_weights", lambda one: one.space)
    addresses = [Address(scheme="hf", target="org/one"), Address(scheme="hf", target="org/other")]
    with pytest.raises(AddressError, match=r"x: .*different weights.*separate name"):
        await open_local("x", addresses, Settings(home=str(tmp_path)))


async def test_the_default_model_can_be_disabled(tmp_path: Path) -> None:
    """A server without models is ready and states the next step; models are loaded by the API."""
    table = '[models."small"]\nbackends = ["fake:dimension=8"]\n'
    async with open_loaded_app(await settings(tmp_path, table, default_model=False)) as app:
        assert (states(app), app.gateway.ready()) == ({}, True)
        with pytest.raises(ModelNotFound, match="no model is served: start one"):
            await vector(app, "", "x")
        assert app.gateway.lifecycle is not None
        await app.gateway.lifecycle.load("small").wait()
        assert len(await vector(app, "", "x")) == 8


async def test_a_failed_load_by_api_is_reported_and_retried(
    loaded: LoadedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are prepared first: if that fails, the engines are not opened."""
    opened_: list[str] = []

    async def prepared(*args: Any) -> Any:
        raise SourceError("the hub is away")

    async def open_(name: str, *args: Any) -> Any:
        opened_.append(name)
        raise AssertionError("it has no files")

    patch_opening(monkeypatch, open_, prepared)
    async with open_loaded_app(loaded, "fake:") as app:
        assert app.gateway.lifecycle is not None
        for _ in range(2):
            with pytest.raises(SourceError, match="the hub is away"):
                await app.gateway.lifecycle.load("org/slow").wait()
        assert states(app) == {"fake": "ready"}
        assert not opened_


def test_without_triton_nothing_of_it_is_imported() -> None:
    """Importing gRPC takes a fifth of a second and 20 MB, aiohttp, for URLs of images, nearly as much."""
    code = """
import asyncio, sys
from shoal.app import open_app
from shoal.config import load

async def main():
    async with open_app(load({}, {}), ["fake:"]) as app:
        await app.wait_until_loaded()
    assert not [name for name in sys.modules if name.split(".")[0] in ("aiohttp", "grpc", "google")], "imported"

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
