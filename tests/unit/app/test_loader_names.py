"""Meanings of model names from clients and the command line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.app.loader import ModelLoader
from shoal.backends import parse_served
from shoal.core.lifecycle.lifecycle import LoadOptions
from shoal.core.threads import Threads
from shoal.errors import ConfigError
from shoal.models.sources.pins import DEFAULT_MODEL
from shoal.models.store import Store
from tests.unit.app.test_loader import TABLES, load_config, loader_of, refusal
from tests.unit.backends.triton.open.kit import stored_model

Make = Callable[..., ModelLoader]


@pytest.fixture
def make(tmp_path: Path) -> Any:
    threads = Threads("prepare", 1)

    def make_loader(*, tables: str = TABLES, **flags: Any) -> ModelLoader:
        return loader_of(load_config(tmp_path, tmp_path / "home", tables, flags), threads)

    yield make_loader
    threads.close()


class TestNames:
    @pytest.mark.parametrize(
        ("name", "expected", "source"),
        [
            ("org/name", "org/name", "hf:org/name"),
            ("org/name@v2", "org/name", "hf:org/name@v2"),
            ("hf:org/name", "org/name", "hf:org/name"),
            ("name", "name", "hf:name"),
            ("pypi:Some_Model==1.0", "some-model", "pypi:some-model==1.0"),
            ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2", DEFAULT_MODEL),
            ("twins", "twins", "fake:dimension=8,fake:dimension=8"),
            ("far", "far", "triton://gpu1#m"),
        ],
    )
    def test_names_clients_may_use(self, make: Make, name: str, expected: str, source: str) -> None:
        plan = make().resolve(name, LoadOptions())
        assert (plan.name, plan.source) == (expected, source)

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("", "cannot name a model"),
            ("../etc", "cannot name a model"),
            ("a/b/c", "cannot name a model"),
            ("load", "reserved"),
            ("hf:load", "reserved"),
            ("ftp:x", "not a known scheme"),
            ("org/name@..", "not a revision"),
            (
                "file:/etc",
                "only the operator may use addresses: `shoal serve file:/etc`, or `backends` of a model in shoal.toml",
            ),
            ("triton://gpu1#m", "only the operator may use addresses"),
            ("tei+http://host#m", "only the operator may use addresses"),
            ("openai+http://host/v1#m", "only the operator may use addresses"),
            ("fake:labels=30000000", "only the operator may use addresses"),
            ("fake", "only the operator may use addresses"),
            ("fake:#second", "only the operator may use addresses"),
        ],
    )
    def test_names_clients_may_not_use(self, make: Make, name: str, words: str) -> None:
        """The error is InvalidValue, even where the command line raises AddressError."""
        error = refusal(lambda: make().resolve(name, LoadOptions()))
        assert words in error.message
        assert error.param == "model"

    def test_served_names_resolve_to_their_address(self, make: Make) -> None:
        """For any address: the operator's name refers to it."""
        loader = make()
        loader.plan(parse_served("mine=file:/models/x"))
        assert loader.resolve("mine", LoadOptions()).source == "file:/models/x"

    def test_tables_add_options(self, make: Make) -> None:
        plan = make(load_timeout_s=7.0).resolve("twins", LoadOptions())
        assert (plan.aliases, plan.default_for, plan.timeout_s) == (("t",), ("embed",), 7.0)
        assert (plan.backend, plan.options) == ("fake", LoadOptions())

    def test_the_default_model_keeps_its_short_name(self, make: Make) -> None:
        """Only under that name."""
        loader = make()
        assert loader.plan(parse_served(DEFAULT_MODEL)).aliases == ("all-MiniLM-L6-v2",)
        assert loader.plan(parse_served(f"mine={DEFAULT_MODEL}")).aliases == ()
        assert loader.resolve("all-MiniLM-L6-v2", LoadOptions()).aliases == ("all-MiniLM-L6-v2",)


class TestPlans:
    def test_a_start_waits_for_other_servers_without_limit(self, make: Make) -> None:
        """A load by API does not, except for a model that was named that way at startup."""
        loader = make()
        assert loader.resolve("far", LoadOptions()).timeout_s == 600.0
        assert loader.plan(parse_served("far=triton://gpu1#m")).timeout_s == 0.0
        assert loader.resolve("far", LoadOptions()).timeout_s == 0.0
        assert loader.plan(parse_served("org/name")).timeout_s == 600.0

    def test_a_single_model_server_needs_only_a_name(self, make: Make) -> None:
        plan = make().plan(parse_served("x=tei+http://a,tei+https://b:8080"))
        assert (plan.name, plan.backend, plan.timeout_s) == ("x", "tei", 0.0)
        assert plan.source == "tei+http://a,tei+https://b:8080"
        assert make().resolve("upstream", LoadOptions()).backend == "tei"

    def test_several_servers_need_a_model(self, make: Make) -> None:
        """Each server may offer different models."""
        error = refusal(lambda: make().plan(parse_served("triton://a,triton://b")), ConfigError)
        assert "NAME=triton://a#MODEL" in error.message
        error = refusal(lambda: make().plan(parse_served("tei+http://a,tei+http://b")), ConfigError)
        assert error.message.endswith("NAME=tei+http://a,...")


@pytest.mark.parametrize("tabled", [False, True])
async def test_files_of_an_open_clip_name_pair(make: Make, tmp_path: Path, tabled: bool) -> None:
    """They are stored and removed under the repository; if a table gives the name to another model, they stay."""
    pair, repository = "ViT-B-32/laion2b_s34b_b79k", "laion/CLIP-ViT-B-32-laion2B-s34B-b79K"
    table = f'[models."{pair}"]\nbackends = ["file:/models/own"]\n' if tabled else ""
    loader = await asyncio.to_thread(make, tables=TABLES + table)
    source = "file:/models/own" if tabled else f"hf:{repository}"
    assert loader.resolve(pair, LoadOptions()).source == source
    await asyncio.to_thread(stored_model, Store(tmp_path / "home"), f"hf:{repository}")
    assert not await loader.remove("ViT-B-32/datacomp_xl_s13b_b90k")
    assert await loader.remove(pair) is not tabled
    assert await loader.remove(repository) is tabled
