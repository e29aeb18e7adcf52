"""Local models, put together: files in the store, a text pipeline, engines, and the facts to show. Part of the
composition root, used by `app` and by the command line."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.backends import Checked, EngineOptions, choose, opener
from shoal.core.protocols import Engine, EngineFacts, ModelFacts, Tensors
from shoal.errors import AddressError, MissingExtra, ShoalError
from shoal.models.address import Address
from shoal.models.prepare import prepare
from shoal.models.progress import Progress, Stop
from shoal.models.samples import LONGEST, TEXTS
from shoal.models.sources import Access
from shoal.models.store import Store, Stored
from shoal.models.verify import Run
from shoal.pipelines.codec import TokenizerCodec
from shoal.pipelines.text import TextPipeline
from shoal.settings import Settings
from shoal.types import Array, Embed, TextSpec

VERIFY_DEADLINE_S = 120.0

SAMPLE_ROWS = 16
"""Of a batch in the precision check: neighbours in length, so that little of it is padding."""


@dataclass(frozen=True, slots=True)
class Local:
    """A local model, ready to be served: everything a lane and a runner are made of."""

    pipeline: TextPipeline
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
) -> Stored:
    """The model in the store, fetched and converted if need be, and verified where an engine is installed. Blocks.

    Raises SetupError.
    """
    with ExitStack() as stack:
        try:
            verifier = stack.enter_context(_Verifier(choose(settings.engine)))
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
        )


async def prepared(address: Address, settings: Settings, progress: Progress | None = None) -> Stored:
    """`prepare_local` in a thread. When it is cancelled, it returns once the thread has stopped."""
    stop = Stop()
    work = asyncio.create_task(asyncio.to_thread(prepare_local, address, settings, progress=progress, stop=stop))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.gather(work, return_exceptions=True)
        raise


async def open_local(
    name: str, addresses: Sequence[Address], settings: Settings, progress: Progress | None = None
) -> Local:
    """Open every replica of a model; they must be the same model. Raises SetupError."""
    stored = [await prepared(address, settings, progress) for address in addresses]
    if len({space_of(one) for one in stored}) > 1:
        raise AddressError(f"{name}: these addresses do not hold the same weights: serve each under a name of its own")
    engine = choose(settings.engine)
    pipeline = await asyncio.to_thread(
        TextPipeline, stored[0].path, stored[0].manifest.embedder, truncate=settings.truncate
    )
    samples = await asyncio.to_thread(precision_samples, pipeline)
    engines: list[Engine] = []
    async with AsyncExitStack() as opened:
        for number, one in enumerate(stored):
            engines.append(await _open_engine(engine, one, f"{name}-{number}", settings, samples))
            opened.push_async_callback(engines[-1].aclose)
        opened.pop_all()
    facts = _facts(stored[0], engine, engines[0].facts, settings)
    return Local(pipeline, TokenizerCodec(pipeline.tokenizer, stored[0].manifest.embedder), engines, facts)


async def _open_engine(
    engine: str, stored: Stored, name: str, settings: Settings, samples: Sequence[Tensors]
) -> Engine:
    store = Store(settings.home)
    kept = (await asyncio.to_thread(store.notes, stored)).get("precision")
    options = EngineOptions(
        precision=settings.precision,
        streams=settings.streams,
        threads=settings.threads,
        max_batch_size=settings.max_batch_size,
        max_batch_tokens=settings.max_batch_tokens,
        max_batch_ms=settings.max_batch_ms,
        max_length=stored.manifest.embedder.max_tokens,
        samples=samples,
        checked=msgspec.convert(kept, Checked) if kept else None,
    )
    opened = await opener(engine)(stored.graph, name=name, options=options)
    checked = opened.facts.details.get("precision_checked")
    if isinstance(checked, Checked) and checked != options.checked:
        await asyncio.to_thread(store.note, stored, "precision", {"key": checked.key, "min_cosine": checked.min_cosine})
    return opened


def precision_samples(pipeline: TextPipeline) -> list[Tensors]:
    """The sample texts as users' texts are run, shortest first; the longest of all has a batch of its own."""
    task = Embed(model="", inputs=[], truncate=True)
    answers = pipeline.prepare([(task, text) for text in (*TEXTS, LONGEST)])
    *rest, longest = sorted((one for one in answers if not isinstance(one, ShoalError)), key=lambda one: one.cost)
    nothing = EngineFacts(name="samples", inputs=(), outputs=())
    starts = range(0, len(rest), SAMPLE_ROWS)
    return [pipeline.collate(batch, nothing) for batch in [*(rest[at : at + SAMPLE_ROWS] for at in starts), [longest]]]


def _facts(stored: Stored, engine: str, engine_facts: EngineFacts, settings: Settings) -> ModelFacts:
    manifest = stored.manifest
    spec = manifest.embedder
    details: dict[str, Any] = {
        "parameters": manifest.parameters,
        "graph": manifest.graph_source,
        "similarity": spec.similarity,
        "length_buckets": engine_facts.length_buckets,
        **{key: value for key, value in engine_facts.details.items() if not isinstance(value, Checked)},
        **limits_of(settings),
    }
    if isinstance(checked := engine_facts.details.get("precision_checked"), Checked):
        details["bf16_min_cosine"] = checked.min_cosine
    return ModelFacts(
        id=manifest.id,
        source=manifest.source,
        backend=engine,
        tasks=("embed",),
        dimension=spec.dimension,
        max_input_tokens=spec.max_tokens,
        precision=engine_facts.precision,
        pooling=spec.pooling,
        space=space_of(stored),
        revision=manifest.revision,
        prompts=spec.prompts,
        default_prompt_name=spec.default_prompt_name,
        verified=manifest.verification.text if manifest.verification else "not verified: no engine was installed",
        details=details,
    )


def limits_of(settings: Settings) -> dict[str, Any]:
    """The settings of a model that its clients may want to know, for the details of its facts."""
    return {
        "max_batch_size": settings.max_batch_size,
        "max_batch_tokens": settings.max_batch_tokens,
        "max_queue_items": settings.max_queue_items,
        "truncate": settings.truncate,
    }


def space_of(stored: Stored) -> str:
    """16 hex digits that are equal only for vectors that may share an index.

    They cover the weights as published (not the converted graph, whose bytes may change with the converter; not a
    shipped graph beside safetensors, which holds the same weights) and what the text specification does to a vector.
    """
    spec: TextSpec = stored.manifest.embedder
    weights = stored.manifest.weights
    told = [
        sorted(digest for file, digest in weights.items() if file.endswith(".safetensors")) or sorted(weights.values()),
        spec.pooling,
        spec.modules,
        sorted(spec.prompts.items()),
        spec.default_prompt_name,
        spec.include_prompt,
        spec.lower_case,
        spec.max_tokens,
    ]
    return hashlib.sha256(msgspec.json.encode(told)).hexdigest()[:16]


class _Verifier:
    """Opens graphs in f32 for the comparison with a second path, on an event loop of its own: callers are threads."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._stack = ExitStack()

    def __enter__(self) -> _Verifier:
        self._runner = self._stack.enter_context(asyncio.Runner())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, graph: Path) -> Run:
        options = EngineOptions(precision="f32", streams=1, warm_up_s=0)
        engine = self._runner.run(opener(self._engine)(graph, name="verify", options=options))
        self._stack.callback(lambda: self._runner.run(engine.aclose()))

        def run(inputs: dict[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
            return self._runner.run(engine.infer(inputs, outputs, {}, time.monotonic() + VERIFY_DEADLINE_S))

        return run
