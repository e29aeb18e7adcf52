"""Text models on Triton: requests to tensors, tensors to vectors or scores, and the facts to show."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from shoal.backends.base.limits import describe_limits
from shoal.backends.triton.engine import DEFAULT_BATCH_SIZE, TritonEngine
from shoal.backends.triton.open.probing import PROBE_S, ProbeResult, probe_model
from shoal.backends.triton.open.scores import TextScorePipeline, read_head, score_spec
from shoal.backends.triton.open.specs import check_tokenizer, find_spec, make_access, open_store
from shoal.backends.triton.open.targets import TritonTarget
from shoal.backends.triton.schema import LOGITS, SENTENCE, TOKENS, Embedder
from shoal.core.probe import PAIRS, TEXTS, ProbeScores, ProbeVectors, probe_token
from shoal.core.protocols import ModelFacts, Pipeline, TextCodec
from shoal.errors import ConfigError, EngineFailed, InputRejected
from shoal.models.prepare import SOURCE
from shoal.models.remote_text_models import spec_from_parameters, tokenizer_folder
from shoal.models.tokenizer_file import TOKENIZER
from shoal.pipelines.text.codec import TokenizerCodec
from shoal.pipelines.text.padding import ADAPTERS
from shoal.pipelines.text.pairs import PairPipeline
from shoal.pipelines.text.strings import StringPipeline, StringSpec
from shoal.pipelines.text.tokenizer import TextTokenizer
from shoal.pipelines.text.tokens import TextPipeline
from shoal.specs import ScoreSpec, TextSpec
from shoal.types import TaskKind, VectorKind

ServedPipeline: TypeAlias = TextPipeline | PairPipeline | StringPipeline | TextScorePipeline


class TextReader:
    """Reads one model. `probe_pipeline` serves the probe, which determines what the schema leaves open; `kinds`: its
    vectors, none if it scores; `pairs`: it is probed with pairs of texts."""

    def __init__(self, target: TritonTarget, embedder: Embedder) -> None:
        """Raises SetupError. Reads files: call it in a thread."""
        self.target = target
        self.embedder = embedder
        self._spec_source = find_spec(target, embedder) if embedder.style == "tokens" else None
        self._is_own_model = target.stored is not None or "shoal_text" in embedder.parameters
        self._head = self._spec_source.head if self._spec_source is not None else None
        self._counter = None if self._spec_source else self._load_tokenizer()
        self.probe_pipeline = self._build_pipeline(embedder.dimension, unit=False, final=False)
        spec = self.probe_pipeline.spec
        self.kinds: Sequence[VectorKind] = spec.kinds if isinstance(spec, TextSpec | StringSpec) else ()
        self.pairs = _takes_pairs(self.probe_pipeline)

    async def probe_engine(self, engine: TritonEngine) -> ProbeResult:
        """Return the answers of one replica for a few inputs. Raises as the engine and the pipeline do."""
        found = await probe_model(engine, self.probe_pipeline, self.kinds, pairs=self.pairs)
        if isinstance(self.probe_pipeline, TextPipeline) and not self._is_own_model and self.kinds:
            await self._check_vocabulary(engine, self.probe_pipeline)
        return found

    async def _check_vocabulary(self, engine: TritonEngine, pipeline: TextPipeline) -> None:
        """Raise ConfigError if the model fails on the last token of a tokenizer that the configuration names."""
        size = pipeline.spec.vocab_size or pipeline.tokenizer.vocab_size
        try:
            await probe_token(engine, pipeline, time.monotonic() + PROBE_S, size - 1, self.kinds[0])
        except (InputRejected, EngineFailed) as error:
            raise ConfigError(
                f"{self.target.name}: the tokenizer of {self.target.table.tokenizer} does not match the model: it has "
                f"{size} tokens, and the model fails on the last one ({error.message}); set `tokenizer` to the model's "
                f'own in [models."{self.target.name}"] of shoal.toml'
            ) from error

    def choose_pipeline(self, answered: ProbeResult) -> Pipeline:
        """Return the pipeline to serve with. Raises ConfigError if the dimension or number of labels is unexpected."""
        if isinstance(answered, ProbeScores):
            return self._build_pipeline(answered.scores.shape[1], unit=False)
        if not isinstance(answered, ProbeVectors) or "dense" not in self.kinds:
            return self.probe_pipeline
        expected = self.target.table.dimension
        if expected is not None and expected != answered.dimension:
            raise ConfigError(
                f"{self.target.name} returns vectors of {answered.dimension} dimensions, but the configured "
                f"`dimension` is {expected}: correct it or leave it out"
            )
        return self._build_pipeline(answered.dimension, unit=answered.unit)

    def make_codec(self, pipeline: Pipeline) -> TextCodec | None:
        if isinstance(pipeline, TextPipeline | PairPipeline):
            return TokenizerCodec(pipeline.tokenizer, pipeline.spec)
        if isinstance(pipeline, StringPipeline) and pipeline.tokenizer is not None:
            return TokenizerCodec(pipeline.tokenizer, pipeline.spec)
        return None

    def build_facts(self, pipeline: Pipeline, answered: ProbeResult) -> ModelFacts:
        embedder, target = self.embedder, self.target
        assert isinstance(pipeline, ServedPipeline)
        spec = pipeline.spec
        scores = find_score(pipeline)
        prompt_spec = spec if isinstance(spec, TextSpec | StringSpec) else None
        dense = "dense" in self.kinds and isinstance(answered, ProbeVectors)
        return ModelFacts(
            id=target.name,
            source=target.source,
            backend="triton",
            tasks=list_tasks(pipeline),
            vectors=tuple(self.kinds),
            labels=scores.labels if scores is not None else (),
            dimension=answered.dimension if dense and isinstance(answered, ProbeVectors) else None,
            max_input_tokens=spec.max_tokens or None,
            precision=embedder.precision,
            pooling=spec.pooling if isinstance(spec, TextSpec) and scores is None else "",
            normalized=not isinstance(spec, TextSpec) or spec.ends_normalized,
            space=self._vector_space(pipeline) if scores is None else "",
            revision=embedder.version,
            prompts=dict(prompt_spec.prompts) if prompt_spec is not None else {},
            default_prompt_name=prompt_spec.default_prompt_name if prompt_spec is not None else None,
            verified=f"{len(PAIRS if self.pairs else TEXTS)} {'pairs' if self.pairs else 'texts'} answered, all finite",
            embedding_tasks=spec.embedding_tasks if isinstance(spec, TextSpec) else (),
            takes_instruction=pipeline.takes_instruction,
            details={
                **describe_limits(target.settings),
                "model": target.endpoints[0].model,
                "servers": [endpoint.address for endpoint in target.endpoints],
                "schema": embedder.style,
                "instances": embedder.instances,
                "max_batch_size": min(embedder.max_batch_size or DEFAULT_BATCH_SIZE, target.settings.max_batch_size),
                "usage": self._usage_source(pipeline),
                **({"activation": scores.activation} if scores is not None else {}),
            },
        )

    def _build_pipeline(self, size: int | None, *, unit: bool, final: bool = True) -> ServedPipeline:
        """Build a pipeline. `size`: of a dense vector, or the number of scores, None while unknown. `final` False: for
        the probe."""
        target, settings, embedder = self.target, self.target.settings, self.embedder
        normalize = target.table.normalize
        if self._spec_source is not None:
            folder, spec = self._spec_source.folder, self._with_inputs(self._spec_source.spec)
            if spec.score is not None:
                return PairPipeline(folder, self._with_labels(spec, size), truncate=settings.truncate)
            if spec.dimension:
                spec = msgspec.structs.replace(spec, dimension=size or 1, **self._output_changes(spec, unit))
            return TextPipeline(folder, spec, truncate=settings.truncate, normalize=normalize)
        if embedder.outputs[0].canonical == LOGITS:
            return TextScorePipeline(
                score_spec(target.name, target.table, embedder, self._head, size),
                pair=embedder.style == "pairs",
                truncate=settings.truncate,
                final=final,
                max_tokens=target.table.max_tokens or 0,
                tokenizer=self._counter,
            )
        names = {port.canonical for port in embedder.outputs}
        strings = StringSpec(
            dimension=size or 1,
            prompts=target.table.prompts,
            default_prompt_name=target.table.default_prompt_name,
            normalized=unit,
            max_tokens=target.table.max_tokens or 0,
            token_count="token_count" if "token_count" in names else "",
            nim=embedder.style == "nim",
        )
        return StringPipeline(strings, truncate=settings.truncate, normalize=normalize, tokenizer=self._counter)

    def _with_inputs(self, spec: TextSpec) -> TextSpec:
        """Return the spec with the served graph's inputs and, if it takes only one, its length. A graph without the
        adapters' input has no tasks."""
        changes: dict[str, Any] = {"inputs": tuple(port.canonical for port in self.embedder.inputs)}
        if ADAPTERS not in changes["inputs"]:
            changes |= {"embedding_tasks": (), "default_embedding_task": None}
        if self.embedder.length:
            changes["max_tokens"] = self.embedder.length
        return msgspec.structs.replace(spec, **changes)

    def _with_labels(self, spec: TextSpec, size: int | None) -> TextSpec:
        """Return the spec with one label per score; an entry that Shoal wrote has its own."""
        if self._is_own_model:
            return spec
        score = score_spec(self.target.name, self.target.table, self.embedder, self._head, size)
        return msgspec.structs.replace(spec, score=score)

    def _output_changes(self, spec: TextSpec, unit: bool) -> dict[str, Any]:
        """Return the changes to a TextSpec that select the dense vectors among the served graph's outputs."""
        names = {port.canonical for port in self.embedder.outputs}
        if TOKENS in names and self.embedder.level == "token":
            return {"pooled": TOKENS, "sentence_embedding": TOKENS}
        own = {spec.pooled, spec.sentence_embedding}
        if own != {SENTENCE} and own <= names:
            return {}
        return {"pooled": SENTENCE, "sentence_embedding": SENTENCE, "ends_normalized": unit}

    def _load_tokenizer(self) -> TextTokenizer | None:
        """Return a tokenizer to count with, if the model reads text. Its files may define the scores."""
        target = self.target
        if target.table.tokenizer is None:
            return None
        folder = tokenizer_folder(target.table.tokenizer, store=open_store(target), access=make_access(target))
        if "shoal_text" in self.embedder.parameters:
            spec = spec_from_parameters(self.embedder.parameters["shoal_text"])
            check_tokenizer(target, self.embedder, folder, spec)
        if self.embedder.outputs[0].canonical == LOGITS:
            self._head = read_head(folder / SOURCE)
        return TextTokenizer(folder, TOKENIZER)

    def _vector_space(self, pipeline: ServedPipeline) -> str:
        known = (
            self._spec_source.space if self._spec_source is not None else self.embedder.parameters.get("shoal_space")
        )
        return known or compute_space(self.target, self.embedder, pipeline)

    def _usage_source(self, pipeline: Pipeline) -> str:
        """Return how tokens are counted: by Shoal, by the model, or estimated from the size of the text."""
        if isinstance(pipeline, TextPipeline | PairPipeline) or self._counter is not None:
            return "counted"
        return "reported" if isinstance(pipeline, StringPipeline) and pipeline.spec.token_count else "estimated"


def find_score(pipeline: ServedPipeline) -> ScoreSpec | None:
    """Return a model's ScoreSpec, None for a model of vectors."""
    if isinstance(pipeline, TextScorePipeline):
        return pipeline.score
    return pipeline.spec.score if isinstance(pipeline, PairPipeline) else None


def list_tasks(pipeline: ServedPipeline) -> tuple[TaskKind, ...]:
    scores = find_score(pipeline)
    if scores is None:
        return ("embed",)
    reads_pairs = not isinstance(pipeline, TextScorePipeline) or pipeline.pair
    return ("rerank", "classify") if len(scores.labels) == 1 and reads_pairs else ("classify",)


def _takes_pairs(pipeline: ServedPipeline) -> bool:
    if isinstance(pipeline, TextScorePipeline):
        return pipeline.pair
    scores = find_score(pipeline)
    return scores is not None and scores.pairs


def compute_space(target: TritonTarget, embedder: Embedder, pipeline: ServedPipeline) -> str:
    """Return the space of a model with unknown weights, 16 hex digits: a hash of what its vectors visibly depend on.

    Name and version stand for the weights, so a new version is a new space; weights replaced under one version are not
    detected.
    """
    identity = [
        target.endpoints[0].model,
        embedder.version,
        embedder.style,
        [(port.name, port.datatype) for port in (*embedder.inputs, *embedder.outputs)],
        msgspec.to_builtins(pipeline.spec),
    ]
    return hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:16]
