"""The table of backends: a backend is a folder and a line in the table."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal import backends
from shoal.app import open_app
from shoal.backends import (
    BACKENDS,
    FILE_BACKENDS,
    backend_class,
    file_backend,
    load_scheme,
    parse_address,
    parse_served,
)
from shoal.backends.base.address import parse_http
from shoal.backends.base.backend import Backend, Target
from shoal.config import load
from shoal.config.settings import Settings
from shoal.core.lifecycle.loading import ProgressReporter
from shoal.core.protocols import ModelFacts, Runner
from shoal.errors import AddressError
from shoal.models.address import Address, Scheme, ServedModel


@pytest.mark.parametrize("name", BACKENDS)
def test_a_folder_has_the_class_and_the_schemes_of_its_line(name: str) -> None:
    assert backend_class(name).name == name
    for scheme in BACKENDS[name]:
        assert callable(load_scheme(scheme).parse)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_line_has_every_scheme_of_the_folder(name: str) -> None:
    module = __import__(f"shoal.backends.{name}.address", fromlist=["SCHEMES"])
    assert tuple(module.SCHEMES) == BACKENDS[name]


def test_files_run_on_a_server_of_their_own_or_here() -> None:
    """Backends other than those of the setting `backend` never run file-based models."""
    assert file_backend(Settings()) == "local"
    assert file_backend(Settings(triton_url="gpu1:8001")) == "triton"
    for name in BACKENDS.keys() - FILE_BACKENDS:
        assert backend_class(name).explain_no_files(Settings(triton=True)) == f"{name} does not run file-based models"


class MadeRunner:
    """A runner that only exists."""

    facts = ModelFacts(source="made", backend="made", tasks=("embed",))

    def ready(self) -> bool:
        return True

    async def aclose(self) -> None:
        pass


class MadeBackend(Backend):
    name = "made"
    remote = True

    async def offers(self, address: Address) -> dict[str, ServedModel | str]:
        return {"one": parse_served(f"{address}#one"), "two": "it is broken"}

    async def open(self, target: Target, report: ProgressReporter) -> Runner:
        report("making it")
        runner: Any = MadeRunner()
        return runner  # type: ignore[no-any-return]

    async def unload(self, name: str, runner: Runner) -> None:
        UNLOADED.append(name)


UNLOADED: list[str] = []


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a backend, as a folder and a line in the table do."""
    package, addresses = ModuleType("shoal.backends.made"), ModuleType("shoal.backends.made.address")
    package.BACKEND = MadeBackend  # type: ignore[attr-defined]
    addresses.SCHEMES = {"made": Scheme(parse=parse_http, needs_model=True)}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, addresses.__name__, addresses)
    monkeypatch.setitem(backends.BACKENDS, "made", ("made",))


async def test_a_new_backend_is_a_folder_and_a_line(made: None, tmp_path: Path) -> None:
    """Its addresses are parsed, its models opened and unloaded, and the models on its servers are served."""
    assert parse_address("made://host/v1#m") == Address(scheme="made", target="host/v1", model="m")
    with pytest.raises(AddressError, match="write made://host#MODEL"):
        parse_served("mine=made://host")
    UNLOADED.clear()
    async with open_app(load({"home": str(tmp_path)}, {}), ["mine=made://host#m", "made://other"]) as app:
        await app.wait_until_loaded()
        cards = {card.name: card for card in app.gateway.models()}
        assert {name: card.state for name, card in cards.items()} == {"mine": "ready", "one": "ready"}
        assert app.gateway.lifecycle is not None
        assert [entry.backend for entry in await app.gateway.lifecycle.listing()] == ["made", "made"]
        await app.gateway.lifecycle.unload("mine").wait()
        assert UNLOADED == ["mine"]
