"""Models on Triton servers, put together: schemas, pipelines, engines, and the facts to show."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from shoal.backends.triton.control import lasting
from shoal.backends.triton.engine import ANY_BATCH, RETRY_S, Schema, Target, TritonEngine
from shoal.backends.triton.llm_schema import LlmSchema
from shoal.backends.triton.schema import Embedder
from shoal.core.batched import BatchedRunner
from shoal.core.batcher import Lane
from shoal.core.probe import TEXTS, Probed, probe
from shoal.core.protocols import Engine, ModelFacts, Pipeline, TextCodec
from shoal.errors import ConfigError, DeadlineExceeded, TransportFailed
from shoal.local import limits_of
from shoal.models.foreign import Overrides, foreign_spec, spec_from_parameters, tokenizer_folder
from shoal.models.sources import Access
from shoal.models.store import Store
from shoal.models.tokenizer_file import TOKENIZER
from shoal.pipelines.codec import TokenizerCodec
from shoal.pipelines.strings import StringPipeline, StringSpec
from shoal.pipelines.text import TextPipeline
from shoal.pipelines.tokenizer import TextTokenizer
from shoal.triton.llm import Talk, TritonTalker, open_llm
from shoal.triton.targets import OnTriton, Wanted, offered
from shoal.types import TextSpec

logger = logging.getLogger("shoal.triton")

PROBE_S = 60.0
"""For the first texts of a model: a GPU may build its kernels with them."""

Note = Callable[[str], None]
"""Told what a model waits for, in words."""

MakeLane = Callable[[Pipeline, Sequence[Engine], ModelFacts], Lane]


class TritonRunner(BatchedRunner, OnTriton):
    """An embedding model on Triton behind a lane."""

    def __init__(self, lane: Lane, facts: ModelFacts, targets: Sequence[Target], codec: TextCodec | None) -> None:
        BatchedRunner.__init__(self, lane, facts, codec)
        OnTriton.__init__(self, lane.options.model, targets)


async def open_triton(wanted: Wanted, lane: MakeLane, talk: Talk, note: Note) -> TritonRunner | TritonTalker:
    """Open a model's replicas, as soon as one of them can serve; the others join when they come and agree with it.

    `lane` and `talk` make what an embedding model and a language model run behind. While no server is there this
    waits, for ever: `note` is told why. Raises SetupError when a server is there and the model cannot be served.
    """
    for pause in lasting(RETRY_S):
        number, schema, brought = await _first(wanted.targets, note)
        target = wanted.targets[number]
        try:
            if isinstance(schema, LlmSchema):
                return await open_llm(wanted, talk, number, schema)
            return await _opened(wanted, lane, number, schema)
        except (TransportFailed, DeadlineExceeded) as error:  # it went away before its first answer
            note(f"waiting for {target.address}: {error.message}")
        except BaseException:  # a cancelled load, too, leaves nothing on the server
            if brought:
                await target.take_back()
            raise
        await asyncio.sleep(pause)
    raise AssertionError("the pauses never end")


async def _opened(wanted: Wanted, lane: MakeLane, number: int, embedder: Embedder) -> TritonRunner:
    """The runner, with the replica of that number in service."""
    model = await asyncio.to_thread(_Model, wanted, embedder)
    reference: list[Probed] = []

    async def admit(engine: TritonEngine) -> None:
        probed = await probe(engine, model.provisional, time.monotonic() + PROBE_S)
        if reference:
            reference[0].check(probed, engine.facts.name)

    engines = [
        TritonEngine(target, f"{wanted.name}-{at}", embedder=embedder, admit=admit, serving=at == number)
        for at, target in enumerate(wanted.targets)
    ]
    async with AsyncExitStack() as opened:
        for engine in engines:
            opened.push_async_callback(engine.aclose)
        reference.append(await probe(engines[number], model.provisional, time.monotonic() + PROBE_S))
        pipeline = await asyncio.to_thread(model.settle, reference[0])
        facts = model.facts(pipeline, reference[0])
        for engine in engines:
            engine.start()
        runner = TritonRunner(lane(pipeline, engines, facts), facts, wanted.targets, model.codec(pipeline))
        opened.pop_all()
    return runner


async def _first(targets: Sequence[Target], note: Note) -> tuple[int, Schema, bool]:
    """The first replica that can serve, its schema, and whether it was loaded for that."""
    for pause in lasting(RETRY_S):
        for number, target in enumerate(targets):
            try:
                return number, *await _found(target)
            except (TransportFailed, DeadlineExceeded) as error:  # a host that drops packets answers nothing at all
                note(f"waiting for {target.address}: {error.message}")
        await asyncio.sleep(pause)
    raise AssertionError("the pauses never end")


async def _found(target: Target) -> tuple[Schema, bool]:
    served = await target.serving()
    try:
        return await target.find(), not served
    except ConfigError:  # it is there now, and cannot be served
        if not served:
            await target.take_back()
        raise


class _Model:
    """How a model's texts become tensors and its tensors vectors: `provisional` until the probe has told the
    dimension and whether the rows are unit vectors."""

    def __init__(self, wanted: Wanted, embedder: Embedder) -> None:
        """Raises SetupError. Reads files: call it in a thread."""
        self.wanted = wanted
        self.embedder = embedder
        self._text = self._text_spec() if embedder.style == "tokens" else None
        self._counter = None if self._text else self._tokenizer()
        self.provisional = self._pipeline(embedder.dimension or 1, unit=False)

    def settle(self, probed: Probed) -> Pipeline:
        """The pipeline to serve with. Raises ConfigError when the dimension is not the one that was expected."""
        expected = self.wanted.table.dimension
        if expected is not None and expected != probed.dimension:
            raise ConfigError(
                f"{self.wanted.name} gives vectors of {probed.dimension} dimensions, and the configuration says "
                f"{expected}: correct it, or leave it out, since the model decides"
            )
        return self._pipeline(probed.dimension, unit=probed.unit)

    def codec(self, pipeline: Pipeline) -> TextCodec | None:
        if isinstance(pipeline, TextPipeline):
            return TokenizerCodec(pipeline.tokenizer, pipeline.spec)
        if isinstance(pipeline, StringPipeline) and pipeline.tokenizer is not None:
            return TokenizerCodec(pipeline.tokenizer, pipeline.spec)
        return None

    def facts(self, pipeline: Pipeline, probed: Probed) -> ModelFacts:
        embedder, wanted = self.embedder, self.wanted
        assert isinstance(pipeline, TextPipeline | StringPipeline)
        spec = pipeline.spec
        pooling = spec.pooling if isinstance(spec, TextSpec) else ""
        return ModelFacts(
            id=wanted.name,
            source=wanted.source,
            backend="triton",
            tasks=("embed",),
            dimension=probed.dimension,
            max_input_tokens=spec.max_tokens or None,
            precision=embedder.precision,
            pooling=pooling,
            space=embedder.parameters.get("shoal_space") or space_of(wanted, embedder, pipeline),
            revision=embedder.version,
            prompts=dict(spec.prompts),
            default_prompt_name=spec.default_prompt_name,
            verified=f"{len(TEXTS)} texts answered, all finite",
            details={
                **limits_of(wanted.settings),
                "model": wanted.targets[0].model,
                "servers": [target.address for target in wanted.targets],
                "schema": embedder.style,
                "instances": embedder.instances,
                "max_batch_size": min(embedder.max_batch_size or ANY_BATCH, wanted.settings.max_batch_size),
                "usage": self._usage(pipeline),
            },
        )

    def _pipeline(self, dimension: int, *, unit: bool) -> TextPipeline | StringPipeline:
        wanted, settings = self.wanted, self.wanted.settings
        if self._text is not None:
            folder, spec = self._text
            spec = msgspec.structs.replace(spec, dimension=dimension, **self._outputs(spec, unit))
            return TextPipeline(folder, spec, truncate=settings.truncate, normalize=wanted.table.normalize)
        names = {port.canonical for port in self.embedder.outputs}
        strings = StringSpec(
            dimension=dimension,
            prompts=wanted.table.prompts,
            default_prompt_name=wanted.table.default_prompt_name,
            normalized=unit,
            max_tokens=wanted.table.max_tokens or 0,
            token_count="token_count" if "token_count" in names else "",
            nim=self.embedder.style == "nim",
        )
        return StringPipeline(
            strings, truncate=settings.truncate, normalize=wanted.table.normalize, tokenizer=self._counter
        )

    def _outputs(self, spec: TextSpec, unit: bool) -> dict[str, Any]:
        """Where the vectors are, among what the served graph answers; the rest of a TextSpec stays as it is."""
        names = {port.canonical for port in self.embedder.outputs}
        changes: dict[str, Any] = {"inputs": tuple(port.canonical for port in self.embedder.inputs)}
        if self.embedder.length:
            changes["max_tokens"] = self.embedder.length
        if "token_embeddings" in names and self.embedder.level == "token":
            return changes | {"pooled": "token_embeddings", "sentence_embedding": "token_embeddings"}
        if spec.pooled != spec.sentence_embedding and {spec.pooled, spec.sentence_embedding} <= names:
            return changes
        return changes | {
            "pooled": "sentence_embedding",
            "sentence_embedding": "sentence_embedding",
            "ends_normalized": unit,
        }

    def _text_spec(self) -> tuple[Path, TextSpec]:
        """The folder of the tokenizer, and how texts become this model's tensors."""
        wanted, embedder = self.wanted, self.embedder
        if wanted.stored is not None:
            return wanted.stored.path, wanted.stored.manifest.text_spec
        written = embedder.parameters.get("shoal_text")
        if written and wanted.table.tokenizer is None:
            source = embedder.parameters.get("shoal_source", "")
            return tokenizer_folder(source, store=self._store, access=self._access), spec_from_parameters(written)
        return self._foreign()

    def _foreign(self) -> tuple[Path, TextSpec]:
        wanted, table = self.wanted, self.wanted.table
        if table.tokenizer is None:
            raise ConfigError(
                f"{wanted.name} takes token ids, and nothing says which tokenizer makes them: set `tokenizer` in "
                f'[models."{wanted.name}"] of shoal.toml, as "hf:org/name" or a folder'
            )
        found = foreign_spec(
            table.tokenizer,
            store=self._store,
            inputs=[port.canonical for port in self.embedder.inputs],
            outputs=[port.canonical for port in self.embedder.outputs],
            dimension=self.embedder.dimension or 0,
            overrides=Overrides(
                pooling=table.pooling,
                max_tokens=table.max_tokens,
                prompts=table.prompts or None,
                default_prompt_name=table.default_prompt_name,
            ),
            access=self._access,
        )
        for note in found.notes:
            logger.warning("%s: %s", wanted.name, note)
        return found.folder, found.spec

    def _tokenizer(self) -> TextTokenizer | None:
        """For counting alone, where the model reads text itself."""
        table = self.wanted.table
        if table.tokenizer is None:
            return None
        folder = tokenizer_folder(table.tokenizer, store=self._store, access=self._access)
        return TextTokenizer(folder, TOKENIZER)

    @property
    def _store(self) -> Store:
        return Store(self.wanted.settings.home)

    @property
    def _access(self) -> Access:
        return Access(offline=self.wanted.settings.offline, hf_token=self.wanted.settings.hf_token)

    def _usage(self, pipeline: Pipeline) -> str:
        """How tokens are counted: by Shoal, by the model, or guessed from the size of the text."""
        if isinstance(pipeline, TextPipeline) or self._counter is not None:
            return "counted"
        return "reported" if isinstance(pipeline, StringPipeline) and pipeline.spec.token_count else "estimated"


def space_of(wanted: Wanted, embedder: Embedder, pipeline: TextPipeline | StringPipeline) -> str:
    """16 hex digits for a model whose weights are not known: what a vector depends on, as far as it can be seen.

    Name and version stand for the weights, so a new version is a new space; replacing the weights under one version is
    not noticed.
    """
    told = [
        wanted.targets[0].model,
        embedder.version,
        embedder.style,
        [(port.name, port.datatype) for port in (*embedder.inputs, *embedder.outputs)],
        msgspec.to_builtins(pipeline.spec),
    ]
    return hashlib.sha256(msgspec.json.encode(told)).hexdigest()[:16]


__all__ = ["TritonRunner", "TritonTalker", "Wanted", "offered", "open_triton"]
