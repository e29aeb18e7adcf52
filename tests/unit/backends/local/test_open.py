"""Opening a local model: its files, the samples of the precision check, and its engines."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

import shoal.backends.local.open
from shoal.backends import parse_address
from shoal.backends.fake.model import FakeEngine, FakeScript
from shoal.backends.local.engines import EngineOptions, PrecisionCheck
from shoal.backends.local.open import (
    SAMPLE_ROWS,
    cap_batch_tokens,
    compute_space,
    open_local,
    precision_samples,
    prepare_async,
    prepare_local,
)
from shoal.config.settings import Settings
from shoal.errors import AddressError, MissingExtra, SetupError, VerificationFailed
from shoal.models.convert.convert import convert
from shoal.models.convert.samples import TEXTS, load_single_texts, load_text_pairs
from shoal.models.convert.verify import Run
from shoal.models.progress import Progress
from shoal.models.store import Store, StoredModel
from shoal.pipelines.text.pairs import PairPipeline
from shoal.pipelines.text.tokens import TextPipeline
from shoal.specs import MultiSpec, ScoreSpec, SparseSpec, TextSpec
from tests.unit.backends.triton.open.kit import stored_model
from tests.unit.models.checkpoints import HIDDEN, checkpoint
from tests.unit.models.classifiers import classifier
from tests.unit.models.engines import RUNS

ADDRESS = parse_address("hf:org/mini")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=str(tmp_path / "home"), offline=True)


@pytest.fixture
def store(settings: Settings) -> Store:
    return Store(settings.home)


def test_every_sample_text_is_in_the_check_once(tmp_path: Path) -> None:
    """Batches are of bounded size; the last one is the longest text alone, truncated to the model's length."""
    target = tmp_path / "out"
    target.mkdir()
    spec = convert(checkpoint(tmp_path), target).spec
    *batches, longest = [
        inputs["attention_mask"] for inputs in precision_samples(TextPipeline(target, spec, truncate=False))
    ]
    assert longest.shape == (1, spec.max_tokens)
    assert sum(len(batch) for batch in batches) == len(load_single_texts())
    assert max(len(batch) for batch in batches) <= SAMPLE_ROWS
    lengths = [length for batch in batches for length in batch.sum(axis=1)]
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(("labels", "pairs"), [(1, True), (3, False)])
def test_what_scores_is_checked_with_what_it_reads(tmp_path: Path, labels: int, pairs: bool) -> None:
    """Cross-encoders are checked with pairs, other classifiers with texts."""
    target = tmp_path / "out"
    target.mkdir()
    spec = convert(classifier(tmp_path / "model", labels=labels), target).spec
    batches = precision_samples(PairPipeline(target, spec, truncate=False))
    assert batches[-1]["input_ids"].shape == (1, spec.max_tokens)
    assert (
        sum(len(inputs["input_ids"]) for inputs in batches)
        == len(load_text_pairs() if pairs else load_single_texts()) + 1
    )
    assert max(int(inputs["token_type_ids"].max()) for inputs in batches) == pairs
    assert all(set(inputs) == set(spec.inputs) for inputs in batches)


def test_pairs_of_the_check_span_what_users_send() -> None:
    """Pairs cover each kind of text: some are identical, most differ, and lengths are mixed."""
    assert {text for pair in load_text_pairs() for text in pair} > {*TEXTS}
    same = [pair for pair in load_text_pairs() if pair[0] == pair[1]]
    assert len(TEXTS) // 4 < len(same) < len(load_text_pairs()) // 3
    assert any(len(first) < 20 and len(second) > 250 for first, second in load_text_pairs())


async def test_preparing_gives_up_the_loop_and_not_its_result(
    settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in a thread, with the arguments of the call."""
    stored = await asyncio.to_thread(stored_model, store)
    seen: list[Any] = []

    def work(address: Any, chosen: Settings, *, progress: Any, stop: Any) -> StoredModel:
        seen.extend([address, chosen, progress, threading.current_thread() is threading.main_thread()])
        return stored

    monkeypatch.setattr(shoal.backends.local.open, "prepare_local", work)
    progress = Progress()
    assert await prepare_async(ADDRESS, settings, progress) is stored
    assert seen == [ADDRESS, settings, progress, False]


async def test_a_preparation_that_is_cancelled_has_ended(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled call returns only after the thread has stopped working on the files."""
    begun, over = threading.Event(), threading.Event()

    def work(*args: Any, stop: Any, **options: Any) -> Any:
        begun.set()
        try:
            stop.wait(20.0)
        finally:
            over.set()

    monkeypatch.setattr(shoal.backends.local.open, "prepare_local", work)
    running = asyncio.create_task(prepare_async(ADDRESS, settings))
    await asyncio.to_thread(begun.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert over.is_set()


def test_without_an_engine_files_are_prepared_unverified(
    settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line can fetch models on a machine without an engine."""
    request: dict[str, Any] = {}

    def prepare(address: Any, **options: Any) -> Any:
        request.update(options, address=address)

    def lacking(engine: str) -> str:
        raise MissingExtra("install an engine", extra="openvino")

    monkeypatch.setattr(shoal.backends.local.open, "prepare", prepare)
    monkeypatch.setattr(shoal.backends.local.open, "choose_engine", lacking)
    prepare_local(ADDRESS, settings, refresh=True)
    assert (request["address"], request["engine"], request["refresh"]) == (ADDRESS, None, True)
    assert request["access"].offline


def test_where_one_is_installed_they_are_verified_with_it(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is verified in f32 on the thread's own event loop, which is closed even after a failure."""
    engines: list[FakeEngine] = []
    precisions: list[str] = []

    async def open_(graph: Path, *, name: str, options: EngineOptions) -> FakeEngine:
        precisions.append(options.precision)
        engines.append(FakeEngine(FakeScript(dimension=8), name))
        return engines[-1]

    def prepare(address: Any, *, engine: Any, **options: Any) -> Any:
        run = engine(Path("model.onnx"))
        batch = {"ids": np.array([[1, 2]]), "mask": np.array([[1, 1]])}
        assert run(batch, ["embedding"])["embedding"].shape == (1, 8)
        assert engines[0].ready()
        raise SetupError("it does not agree")

    monkeypatch.setattr(shoal.backends.local.open, "prepare", prepare)
    monkeypatch.setattr(shoal.backends.local.open, "choose_engine", lambda engine: "openvino")
    monkeypatch.setattr(shoal.backends.local.open, "load_opener", lambda engine: open_)
    with pytest.raises(SetupError, match="does not agree"):
        prepare_local(ADDRESS, settings)
    assert (precisions, engines[0].ready()) == (["f32"], False)


class Openings:
    """Replaces the opening of engines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *stored: StoredModel) -> None:
        self.options: list[EngineOptions] = []
        self.engines: list[FakeEngine] = []
        self.graphs: list[Path] = []
        self.found = PrecisionCheck(key="here", figures={"mean_cosine": 0.9995})
        self.fails_at = -1
        found = iter(stored)

        async def prepared(*args: Any) -> StoredModel:
            return next(found)

        monkeypatch.setattr(shoal.backends.local.open, "prepare_async", prepared)
        monkeypatch.setattr(shoal.backends.local.open, "choose_engine", lambda engine: "openvino")
        monkeypatch.setattr(shoal.backends.local.open, "load_opener", lambda engine: self.open)

    async def open(self, graph: Path, *, name: str, options: EngineOptions) -> Any:
        if len(self.engines) == self.fails_at:
            raise SetupError("no room for another")
        self.options.append(options)
        self.graphs.append(graph)
        engine = FakeEngine(FakeScript(), name)
        checked = options.precision_check or self.found
        facts = msgspec.structs.replace(
            engine.facts,
            precision="bf16",
            details={"precision_checked": checked, "precision_reason": checked.reason, "streams": 2},
        )
        self.engines.append(engine)
        return SimpleNamespace(facts=facts, aclose=engine.aclose, ready=engine.ready)


async def test_facts_of_a_local_model(settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts come from the manifest and the engine; the precision check is stored for the next start."""
    stored = await asyncio.to_thread(stored_model, store)
    openings = Openings(monkeypatch, stored, stored)
    first = await open_local("m", [ADDRESS], settings)
    facts = first.facts
    assert (facts.id, facts.backend, facts.dimension, facts.max_input_tokens) == ("org/mini", "openvino", HIDDEN, 16)
    assert (facts.precision, facts.space) == ("bf16", compute_space(stored))
    assert facts.verified == "not verified: no engine was installed"
    assert facts.details["bf16_mean_cosine"] == 0.9995
    assert "precision_checked" not in facts.details
    tokens = await first.codec.tokenize(["fish"], add_special_tokens=False, prompt_name=None)
    assert [token.text for token in tokens[0]] == ["fish"]
    await open_local("m", [ADDRESS], settings)
    assert [options.precision_check for options in openings.options] == [
        None,
        PrecisionCheck(key="here", figures={"mean_cosine": 0.9995}),
    ]


def scoring(store: Store, address: str = "hf:org/mini", weights: str = "ab") -> StoredModel:
    """Return a stored model that scores."""
    stored = stored_model(store, address)
    spec = msgspec.structs.replace(
        stored.manifest.text_spec,
        dimension=0,
        prompts={},
        score=ScoreSpec(labels=("no", "yes"), activation="softmax"),
    )
    changes: dict[str, Any] = {"text": spec, "weights": {"model.safetensors": weights}}
    return StoredModel(stored.path, msgspec.structs.replace(stored.manifest, **changes))


async def test_facts_of_a_model_that_scores(settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The facts have labels and tasks, but no space or dimension; the stored precision check compares scores."""
    stored = await asyncio.to_thread(scoring, store)
    openings = Openings(monkeypatch, stored, stored)
    openings.found = PrecisionCheck(key="here", figures={"mean_difference": 0.002})
    local = await open_local("m", [ADDRESS], settings)
    facts = local.facts
    assert isinstance(local.pipeline, PairPipeline)
    assert (facts.tasks, facts.vectors, facts.labels) == (("classify",), (), ("no", "yes"))
    assert (facts.dimension, facts.space, facts.pooling, facts.prompts) == (None, "", "", {})
    assert (facts.details["activation"], facts.details["bf16_mean_difference"]) == ("softmax", 0.002)
    assert not {"similarity", "bf16_mean_cosine"} & set(facts.details)
    assert openings.options[0].spec == stored.manifest.text_spec
    await open_local("m", [ADDRESS], settings)
    assert openings.options[1].precision_check == PrecisionCheck(key="here", figures={"mean_difference": 0.002})


async def test_replicas_that_score_have_the_same_weights(
    settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas without a space are compared by their weights."""
    first = await asyncio.to_thread(scoring, store)
    same = await asyncio.to_thread(scoring, store, "hf:org/two")
    other = await asyncio.to_thread(scoring, store, "hf:org/three", "cd")
    Openings(monkeypatch, first, same, first, other)
    assert len((await open_local("m", [ADDRESS, ADDRESS], settings)).engines) == 2
    with pytest.raises(AddressError, match="have different weights"):
        await open_local("m", [ADDRESS, ADDRESS], settings)


@pytest.mark.parametrize("copied", [True, False])
async def test_an_engine_of_folders_gets_the_folder(
    settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, copied: bool
) -> None:
    """The engine gets the published folder, from the store or in place."""
    stored = await asyncio.to_thread(stored_model, store)
    manifest = msgspec.structs.replace(stored.manifest, source=f"file:{tmp_path}")
    expected = tmp_path
    if copied:
        expected = stored.path / "source"
        await asyncio.to_thread(expected.mkdir)
    openings = Openings(monkeypatch, StoredModel(stored.path, manifest))
    monkeypatch.setattr(shoal.backends.local.open, "choose_engine", lambda engine: "torch")
    folders: list[Path] = []
    monkeypatch.setattr(shoal.backends.local.open, "verify_published", lambda folder, *_, **__: folders.append(folder))
    await open_local("m", [ADDRESS], settings)
    assert openings.graphs == folders == [expected]


async def test_an_engine_of_folders_is_compared_once(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is compared with the numpy forward pass before it serves; the result is shown and stored."""
    address = parse_address(f"file:{await asyncio.to_thread(checkpoint, tmp_path / 'mini')}")
    stored = await asyncio.to_thread(prepare_local, address, settings)
    openings = Openings(monkeypatch, stored, stored, stored, stored)
    monkeypatch.setattr(shoal.backends.local.open, "choose_engine", lambda engine: "torch")
    broken = [True, False]

    def opened(self: object, folder: Path, *, spec: TextSpec) -> Run:
        run, wrong = RUNS["onnxruntime"](stored.graph), broken.pop(0)
        assert (folder, spec) == (tmp_path / "mini", stored.manifest.text_spec)
        return lambda inputs, outputs: {name: one[::-1] if wrong else one for name, one in run(inputs, outputs).items()}

    monkeypatch.setattr(shoal.backends.local.open._Verifier, "open", opened)
    with pytest.raises(VerificationFailed, match=r"^torch does not agree with a numpy.*with another engine"):
        await open_local("m", [address], settings)
    assert not openings.engines
    first = await open_local("m", [address], settings)
    assert first.facts.verified.startswith("torch agrees with a numpy forward pass: cosine >= ")
    again = await open_local("m", [address], settings)
    assert (again.facts.verified, broken) == (first.facts.verified, [])
    await asyncio.to_thread(Store(settings.home).note, stored, "folder", "broken")
    broken.append(True)
    with pytest.raises(VerificationFailed):
        await open_local("m", [address], settings)


async def test_the_precision_that_was_checked_is_named(
    settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The details name the precision that was checked, bf16 or fp16."""
    stored = await asyncio.to_thread(stored_model, store)
    openings = Openings(monkeypatch, stored, stored)
    openings.found = PrecisionCheck(key="here", precision="fp16", figures={"mean_cosine": 0.9999})
    first = await open_local("m", [ADDRESS], settings)
    assert first.facts.details["fp16_mean_cosine"] == 0.9999
    assert "bf16_mean_cosine" not in first.facts.details
    again = await open_local("m", [ADDRESS], settings)
    assert again.facts.details["fp16_mean_cosine"] == 0.9999


@pytest.mark.parametrize(
    ("installed", "expected"),
    [({"torch", "onnxruntime"}, "onnxruntime"), ({"torch", "openvino"}, "openvino"), ({"torch"}, None)],
)
def test_a_graph_is_verified_by_an_engine_of_graphs(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, installed: set[str], expected: str | None
) -> None:
    """If the serving engine runs folders, any installed graph engine verifies; without one, nothing is verified."""

    def choose(engine: str) -> str:
        if engine == "auto":
            return "torch"
        if engine not in installed:
            raise MissingExtra(engine, extra="local")
        return engine

    verifiers: list[str | None] = []
    monkeypatch.setattr(shoal.backends.local.open, "choose_engine", choose)
    monkeypatch.setattr(
        shoal.backends.local.open, "prepare", lambda address, *, engine, **options: verifiers.append(engine)
    )
    monkeypatch.setattr(shoal.backends.local.open._Verifier, "open", property(lambda self: self._engine))
    prepare_local(ADDRESS, settings)
    assert verifiers == [expected]


async def test_engines_that_were_opened_are_closed_when_the_next_fails(
    settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = await asyncio.to_thread(stored_model, store)
    openings = Openings(monkeypatch, stored, stored)
    openings.fails_at = 1
    with pytest.raises(SetupError, match="no room"):
        await open_local("m", [ADDRESS, ADDRESS], settings)
    assert [engine.ready() for engine in openings.engines] == [False]


def test_a_vocabulary_of_scores_bounds_the_batch(store: Store) -> None:
    """Batches are limited by the memory of [tokens, vocabulary] floats; one longest text always fits."""
    spec = msgspec.structs.replace(stored_model(store).manifest.text_spec, max_tokens=512, vocab_size=30_522)
    splade = msgspec.structs.replace(spec, sparse=SparseSpec())
    large = msgspec.structs.replace(splade, vocab_size=250_002)
    assert [cap_batch_tokens(one, 16_384) for one in (spec, splade, large)] == [16_384, 4_397, 536]
    assert cap_batch_tokens(msgspec.structs.replace(large, max_tokens=8_192), 16_384) == 8_192
    assert cap_batch_tokens(splade, 1_000) == 1_000
    assert cap_batch_tokens(msgspec.structs.replace(large, sparse=SparseSpec(per="token")), 16_384) == 16_384


def test_a_space_is_that_of_the_published_weights(store: Store) -> None:
    """The space depends on the weights and on text and vector processing, not on the graph."""
    stored = stored_model(store)
    manifest = stored.manifest
    shipped = manifest.weights | {"onnx/model.onnx": "cd"}

    def space(**changes: Any) -> str:
        return compute_space(StoredModel(stored.path, msgspec.structs.replace(manifest, **changes)))

    assert space(weights=shipped, graph_source="shipped") == space() == compute_space(stored)
    text = manifest.text_spec
    changed = [
        space(weights={"model.safetensors": "other"}),
        space(text=msgspec.structs.replace(text, pooling="cls")),
        space(text=msgspec.structs.replace(text, max_tokens=8)),
        space(text=msgspec.structs.replace(text, prompts={})),
    ]
    sparse, multi = SparseSpec(), MultiSpec(dimension=4)
    changed += [
        space(text=msgspec.structs.replace(text, sparse=sparse)),
        space(text=msgspec.structs.replace(text, sparse=SparseSpec(per="token"))),
        space(text=msgspec.structs.replace(text, multi=multi)),
        space(text=msgspec.structs.replace(text, frame_tokens=False)),
        space(text=msgspec.structs.replace(text, dropped=(3,))),
    ]
    assert len({space(), *changed}) == 10
    assert space(text=msgspec.structs.replace(text, tokens="token_embeddings")) == space()
    assert space(text=msgspec.structs.replace(text, score=ScoreSpec(labels=("a",), activation="sigmoid"))) == ""
