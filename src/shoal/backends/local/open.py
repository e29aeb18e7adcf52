"""Opens local models: files in the store, a pipeline for texts or pairs, engines, and the facts to show.

Part of the composition root, used by `app` and the command line.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from shoal.backends.base.limits import describe_limits
from shoal.backends.base.prompts import apply_prompts
from shoal.backends.local.attention import read_attention
from shoal.backends.local.compile import QUANTIZED_GROUP
from shoal.backends.local.engines import (
    ENGINES,
    FOLDER_ENGINES,
    EngineOptions,
    PrecisionCheck,
    choose_engine,
    load_opener,
)
from shoal.config.settings import IMAGE_BATCH_MS_FACTOR, ModelTable, Settings
from shoal.core.protocols import Engine, EngineFacts, ModelFacts, Tensors
from shoal.decoding import converter
from shoal.downloads.cancellation import run_in_thread
from shoal.downloads.disk import disk_error
from shoal.errors import AddressError, MissingExtra, ShoalError
from shoal.models.address import Address, parse_source
from shoal.models.convert.as_published import verify_published
from shoal.models.convert.export import ExportResult, can_export, export
from shoal.models.convert.export_dual_encoder import ExportedTowers, can_export_towers, export_towers
from shoal.models.convert.samples import LONGEST, load_single_texts, load_text_pairs
from shoal.models.convert.variants import VARIANTS, Variant, make_variant, measure_parity, variant_path
from shoal.models.convert.verify import Run
from shoal.models.manifest import Verdict
from shoal.models.prepare import SOURCE, Fallbacks, prepare
from shoal.models.progress import Progress, Stop
from shoal.models.sources import Access
from shoal.models.space import hash_weights, stored_space
from shoal.models.store import Store, StoredModel
from shoal.pipelines.text.codec import TokenizerCodec
from shoal.pipelines.text.pairs import PairPipeline
from shoal.pipelines.text.tokens import TextPipeline
from shoal.specs import TextSpec
from shoal.types import Array, BatchTask, Classify, Embed, Item

_log = logging.getLogger(__name__)

Report: TypeAlias = Callable[[str, float], None]
"""Receives a stage of a conversion, and how much of it is done."""

VERIFY_DEADLINE_S = 120.0

LOGITS_BYTES = 512 * 2**20
"""Maximum bytes of a batch's scores over the vocabulary."""

ANY_LENGTH = 2**20
"""No limit on length: comparison samples are already cut to the model's own length."""

PARITY_FIELDS = ("min_cosine", "mean_cosine", "max_difference", "speed", "bytes")
"""Fields of a variant's Parity that the facts' details show."""

SAMPLE_ROWS = 32
"""Rows per batch in the precision check. They are neighbors in length, so that little is padding."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A local model that is ready to be served: the parts of a lane and a runner."""

    pipeline: TextPipeline | PairPipeline
    codec: TokenizerCodec
    engines: Sequence[Engine]
    facts: ModelFacts


def prepare_local(
    address: Address,
    settings: Settings,
    *,
    progress: Progress | None = None,
    stop: Stop | None = None,
    refresh: bool = False,
) -> StoredModel:
    """Fetch and convert a model as needed, and return its entry in the store. Blocks.

    The model is verified if an engine is installed. Raises SetupError.
    """
    ways = _conversion_options(settings)
    with ExitStack() as stack:
        try:
            verifier = stack.enter_context(_Verifier(choose_graph_engine(settings.engine)))
        except MissingExtra:
            verifier = None
        return prepare(
            address,
            store=Store(settings.home),
            access=Access(offline=settings.offline, hf_token=settings.hf_token),
            engine=None if verifier is None else verifier.open,
            progress=progress,
            stop=stop,
            refresh=refresh,
            ways=ways,
        )


def _conversion_options(settings: Settings) -> Fallbacks:
    """Return how to handle architectures without a graph. PyTorch exports one if the extra for it is installed; an
    engine that runs folders needs none."""

    limits: dict[str, Any] = {
        "max_memory_mb": settings.convert_max_memory_mb,
        "timeout_s": settings.convert_timeout_s,
    }

    def run_export(folder: Path, into: Path, report: Report, stop: Stop) -> ExportResult:
        return export(folder, into, progress=report, stop=stop, **limits)

    def run_towers_export(folder: Path, into: Path, report: Report, stop: Stop) -> ExportedTowers:
        return export_towers(folder, into, progress=report, stop=stop, **limits)

    try:
        folders = choose_engine(settings.engine) in FOLDER_ENGINES
    except MissingExtra:  # models may be fetched before an engine is installed
        folders = False
    able = settings.convert == "auto" and can_export()
    exports_images = settings.convert == "auto" and can_export_towers()
    return Fallbacks(
        run_export if able else None, folders=folders, towers=run_towers_export if exports_images else None
    )


def choose_graph_engine(engine: str) -> str:
    """Return the engine for verification: the serving engine, or any that runs graphs if that one runs folders. Raises
    MissingExtra and ConfigError."""
    chosen = choose_engine(engine)
    if chosen not in FOLDER_ENGINES:
        return chosen
    *others, last = ENGINES
    for name in others:
        try:
            return choose_engine(name)
        except MissingExtra:
            continue
    return choose_engine(last)


async def prepare_async(address: Address, settings: Settings, progress: Progress | None = None) -> StoredModel:
    """Run `prepare_local` in a thread. A canceled call returns once the thread has stopped."""
    stop = Stop()
    return await run_in_thread(partial(prepare_local, address, settings, progress=progress, stop=stop), stop.set)


async def open_local(
    name: str,
    addresses: Sequence[Address],
    settings: Settings,
    progress: Progress | None = None,
    *,
    table: ModelTable | None = None,
) -> LocalModel:
    """Open every replica of a model; all must be the same model. Only the prompts of `table` are used. Raises
    SetupError."""
    stored = [await prepare_async(address, settings, progress) for address in addresses]
    engine = choose_engine(settings.engine)
    if engine in FOLDER_ENGINES:
        stored = await asyncio.to_thread(_compare_with_reference, stored, engine, settings)
    if table is not None:
        stored = [apply_prompts(one, table) for one in stored]
    check_same_model(name, stored)
    spec = stored[0].manifest.text_spec
    pipeline = await asyncio.to_thread(_build_pipeline, stored[0].path, spec, settings)
    samples = await asyncio.to_thread(precision_samples, pipeline)
    parity = await asyncio.to_thread(_measure_variant, stored, engine, settings, samples)
    if (variant := _variant(engine, settings)) is not None:
        _log.info("%s: %s", name, _describe_variant(variant, parity))
    engines: list[Engine] = []
    async with AsyncExitStack() as opened:
        for number, one in enumerate(stored):
            spec = one.manifest.text_spec
            place = await asyncio.to_thread(_engine_path, engine, one, _variant(engine, settings))
            options = engine_options(settings, samples, spec)
            options = replace(options, attention=await asyncio.to_thread(read_attention, one.path / SOURCE, spec))
            engines.append(await open_engine(engine, place, one, f"{name}-{number}", settings.home, options))
            opened.push_async_callback(engines[-1].aclose)
        opened.pop_all()
    facts = _build_facts(stored[0], engine, engines[0].facts, settings, parity)
    facts = replace(facts, takes_instruction=pipeline.takes_instruction)
    return LocalModel(pipeline, TokenizerCodec(pipeline.tokenizer, spec), engines, facts)


def check_same_model(name: str, stored: Sequence[StoredModel]) -> None:
    """Raise AddressError if the replicas are not the same model."""
    if len({hash_weights(one) for one in stored}) > 1:
        raise AddressError(f"{name}: these addresses have different weights: serve each under a separate name")


def _build_pipeline(folder: Path, spec: TextSpec, settings: Settings) -> TextPipeline | PairPipeline:
    if spec.score is not None:
        return PairPipeline(folder, spec, truncate=settings.truncate)
    return TextPipeline(folder, spec, truncate=settings.truncate)


def engine_options(settings: Settings, samples: Sequence[Tensors], spec: TextSpec | None) -> EngineOptions:
    """Return the options for loading a model's graph: a text graph with a `spec`, an image graph without."""
    return EngineOptions(
        precision=settings.precision,
        streams=settings.streams,
        threads=settings.threads,
        max_batch_size=settings.max_batch_size,
        max_batch_tokens=settings.max_batch_tokens
        if spec is None
        else cap_batch_tokens(spec, settings.max_batch_tokens),
        max_batch_ms=settings.max_batch_ms * (IMAGE_BATCH_MS_FACTOR if spec is None else 1),
        max_length=1 if spec is None else spec.max_tokens,
        samples=samples,
        spec=spec,
        cuda_graphs=settings.cuda_graphs,
    )


async def open_engine(
    engine: str,
    place: Path,
    stored: StoredModel,
    name: str,
    home: str,
    options: EngineOptions,
    *,
    noted: str = "precision",
) -> Engine:
    """Open the graph or folder at `place` of a stored model. The result of the precision check is stored with the model
    under the name `noted`, so that it runs once."""
    store = Store(home)
    kept = (await asyncio.to_thread(store.notes, stored)).get(noted)
    options = replace(options, precision_check=_CHECKED(kept) if kept else None)
    opened = await load_opener(engine)(place, name=name, options=options)
    checked = opened.facts.details.get("precision_checked")
    reason = opened.facts.details.get("precision_reason")
    if reason:
        _log.info("%s: precision %s (%s)", name, opened.facts.precision, reason)
    if isinstance(checked, PrecisionCheck) and checked != options.precision_check:
        await asyncio.to_thread(store.note, stored, noted, asdict(checked))
    return opened


def describe_engine(stored: StoredModel, settings: Settings) -> dict[str, str]:
    """Return the `engine` and `precision` that these settings give a stored model, in words, with what was measured on
    this machine; empty for a language model, which has settings of its own."""
    if stored.manifest.generation is not None:
        return {}
    try:
        engine = choose_engine(settings.engine)
    except MissingExtra as error:
        engine = f"none: {error.message}"
    kept = Store(settings.home).notes(stored).get("precision")
    measured = _CHECKED(kept).reason if kept else "not compared on this machine yet"
    return {"engine": engine, "precision": f"{settings.precision}; {measured}"}


def cap_batch_tokens(spec: TextSpec, max_batch_tokens: int) -> int:
    """Return the maximum padded tokens of a batch, `max_batch_tokens` or fewer.

    A model that scores the whole vocabulary at every token (SPLADE) has [tokens, vocabulary] floats in memory at once,
    so it takes fewer, but at least one longest text.
    """
    if spec.sparse is None or spec.sparse.per == "token" or not spec.vocab_size:
        return max_batch_tokens
    return min(max_batch_tokens, max(spec.max_tokens, LOGITS_BYTES // (4 * spec.vocab_size)))


def _variant(engine: str, settings: Settings) -> Variant | None:
    """Return the graph variant for the configured precision, or None. Engines that run folders have no graph and no
    variant."""
    precision: str = settings.precision
    return None if engine in FOLDER_ENGINES else next((one for one in VARIANTS if one == precision), None)


def _is_grouped(engine: str, variant: Variant) -> bool:
    """Whether an engine gets int8 weights in groups. ONNX Runtime would widen them: 0.8 times the speed of f32, where
    one scale per column is 1.3 times as fast."""
    return engine == "openvino" and variant == "int8"


def _measure_variant(
    stored: Sequence[StoredModel], engine: str, settings: Settings, samples: Sequence[Tensors]
) -> dict[str, Any]:
    """Create the configured variant and measure it against f32, once per machine. Returns the figures for the facts'
    details. Blocks. Raises SetupError."""
    variant = _variant(engine, settings)
    if variant is None:
        return {}
    store = Store(settings.home)
    figures: dict[str, Any] = {}
    with _Verifier(engine) as verifier:
        for one in stored:
            try:
                make_variant(one, variant, store=store, grouped=_is_grouped(engine, variant))
            except OSError as error:
                error.filename = error.filename or one.path
                raise disk_error(error, f"the {variant} weights of {one.manifest.id}") from error
            found = measure_parity(
                one,
                variant,
                store=store,
                engine=f"{engine} {_package_version(engine)}, {os.cpu_count()} cores",
                samples=samples,
                grouped=_is_grouped(engine, variant),
                open_graph=verifier.open,
            )
            figures = msgspec.to_builtins(found)
    return {f"{variant}_{name}": figures[name] for name in PARITY_FIELDS if figures[name] is not None}


def _package_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a build with another name, such as onnxruntime-gpu
        return ""


class _FolderVerdict(msgspec.Struct, frozen=True):
    """The stored verdict on a model in an engine that runs folders. `key`: the engine and its version. `verdict` is
    None for an architecture without a reference to compare with."""

    key: str = ""
    verdict: Verdict | None = None


_FOLDER_VERDICT = converter(_FolderVerdict)
_CHECKED = converter(PrecisionCheck)


def _compare_with_reference(stored: Sequence[StoredModel], engine: str, settings: Settings) -> list[StoredModel]:
    """Return the models with their verdict in an engine that runs folders, instead of the graph's. Each is compared in
    f32 with the numpy forward pass if that supports the architecture, once per engine version. Blocks. Raises
    SetupError."""
    store = Store(settings.home)
    key = f"{engine} {_package_version(engine)}, transformers {_package_version('transformers')}"
    found = []
    for one in stored:
        try:
            kept = _FOLDER_VERDICT(store.notes(one).get("folder"))
        except msgspec.ValidationError:
            kept = _FolderVerdict()
        if kept.key != key:
            with _Verifier(engine) as verifier:
                place, spec = _engine_path(engine, one, None), one.manifest.text_spec
                run = partial(verifier.open, place, spec=spec)
                kept = _FolderVerdict(key, verify_published(place, one.path, spec, engine=engine, run=run))
            store.note(one, "folder", msgspec.to_builtins(kept))
        verdict = kept.verdict or one.manifest.verification
        found.append(replace(one, manifest=msgspec.structs.replace(one.manifest, verification=verdict)))
    return found


def _describe_variant(variant: Variant, parity: Mapping[str, Any]) -> str:
    """Describe the cost of a variant."""
    speed = ", ".join(
        f"{times:g} times as fast as f32 ({batch})" for batch, times in parity[f"{variant}_speed"].items()
    )
    moved = parity.get(f"{variant}_max_difference")
    if moved is not None:
        return f"{variant} weights: {speed}; scores move by {moved:.4f} of their range"
    mean, minimum = parity[f"{variant}_mean_cosine"], parity[f"{variant}_min_cosine"]
    words = f"{variant} weights: {speed}; mean cosine to f32 {mean:.4f}, minimum {minimum:.4f}"
    return words + ("; indexes of other vectors must be embedded again" if variant == "int8" else "")


def _engine_path(engine: str, stored: StoredModel, variant: Variant | None) -> Path:
    """Return what the engine runs: the stored graph, its variant, or the published folder."""
    if engine not in FOLDER_ENGINES:
        return variant_path(stored, variant, grouped=_is_grouped(engine, variant)) if variant else stored.graph
    kept = stored.path / SOURCE
    return kept if kept.is_dir() else Path(parse_source(stored.manifest.source).target)


def precision_samples(pipeline: TextPipeline | PairPipeline) -> list[Tensors]:
    """Return the sample texts or pairs, prepared like users' inputs, shortest first. The longest has a batch of its
    own."""
    score = pipeline.spec.score
    task: BatchTask = Embed(model="", inputs=[], truncate=True, outputs=pipeline.spec.kinds[:1])
    items: tuple[Item, ...] = (*load_single_texts(), LONGEST)
    if score is not None:
        task = Classify(model="", inputs=[], truncate=True)
        items = (*load_text_pairs(), (LONGEST, LONGEST)) if score.pairs else items
    answers = pipeline.prepare([(task, item) for item in items])
    *rest, longest = sorted((one for one in answers if not isinstance(one, ShoalError)), key=lambda one: one.cost)
    nothing = EngineFacts(name="samples", inputs=(), outputs=())
    starts = range(0, len(rest), SAMPLE_ROWS)
    return [pipeline.collate(batch, nothing) for batch in [*(rest[at : at + SAMPLE_ROWS] for at in starts), [longest]]]


def _build_facts(
    stored: StoredModel, engine: str, engine_facts: EngineFacts, settings: Settings, parity: Mapping[str, Any]
) -> ModelFacts:
    manifest = stored.manifest
    spec = manifest.text_spec
    details: dict[str, Any] = {
        "parameters": manifest.parameters,
        "graph": manifest.graph_source,
        **({"similarity": spec.similarity} if spec.score is None else {"activation": spec.score.activation}),
        "length_buckets": engine_facts.length_buckets,
        **engine_details(engine_facts),
        **parity,
        **describe_limits(settings),
    }
    return ModelFacts(
        id=manifest.id,
        source=manifest.source,
        backend=engine,
        tasks=spec.tasks,
        vectors=spec.kinds,
        labels=spec.score.labels if spec.score else (),
        dimension=spec.dimension or None,
        max_input_tokens=spec.max_tokens,
        precision=engine_facts.precision,
        pooling=spec.pooling if spec.score is None else "",
        normalized=spec.ends_normalized,
        space=compute_space(stored, engine_facts.precision, engine),
        revision=manifest.revision,
        prompts=spec.prompts,
        default_prompt_name=spec.default_prompt_name,
        embedding_tasks=spec.embedding_tasks,
        verified=manifest.verification.text if manifest.verification else "not verified: no engine was installed",
        details=details,
    )


def engine_details(facts: EngineFacts) -> dict[str, Any]:
    """Return an engine's details, with the figures of its precision check in place of the check itself."""
    details = {key: value for key, value in facts.details.items() if not isinstance(value, PrecisionCheck)}
    checked = facts.details.get("precision_checked")
    if isinstance(checked, PrecisionCheck):
        details |= {f"{checked.precision}_{name}": value for name, value in checked.figures.items()}
    return details


def compute_space(stored: StoredModel, precision: str = "", engine: str = "") -> str:
    """Return `stored_space`, for the precision that an engine runs the model in.

    int8 weights count as other weights: they change some of the ten nearest neighbors. Each engine multiplies int8
    weights differently (OpenVINO by int8 inputs, in groups of a fixed size), so the digits then cover the engine's name
    too: the vectors of two engines have a cosine of 0.991 at worst.
    """
    space = stored_space(stored)
    if not space or precision != "int8":
        return space
    how = f"{engine} {QUANTIZED_GROUP}" if engine == "openvino" else engine
    return hashlib.sha256(f"{space} int8 {how}".encode()).hexdigest()[:16]


class _Verifier:
    """Opens graphs and folders in f32 to compare them with a reference. It has its own event loop, because its callers
    are threads."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._stack = ExitStack()

    def __enter__(self) -> _Verifier:
        self._runner = self._stack.enter_context(asyncio.Runner())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, graph: Path, precision: Literal["f32"] | Variant = "f32", *, spec: TextSpec | None = None) -> Run:
        longest = spec.max_tokens if spec is not None else ANY_LENGTH
        options = EngineOptions(precision=precision, streams=1, max_length=longest, warm_up_s=0, spec=spec)
        engine = self._runner.run(load_opener(self._engine)(graph, name="verify", options=options))
        self._stack.callback(lambda: self._runner.run(engine.aclose()))

        def run(inputs: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
            return self._runner.run(engine.infer(inputs, outputs, {}, time.monotonic() + VERIFY_DEADLINE_S))

        return run
