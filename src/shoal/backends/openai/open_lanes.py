"""Opens lanes for the embeddings and scores of OpenAI-compatible servers, and probes the facts of each model."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from shoal.backends.base.backend import Target
from shoal.backends.base.http_client import Client
from shoal.backends.openai.calls import RouteCalls
from shoal.backends.openai.engine import SLOTS, Admit, UpstreamEngine
from shoal.backends.openai.routes import Route
from shoal.backends.openai.scores import LabelNames
from shoal.core.lane_runner import LaneRunner
from shoal.core.probe import (
    LEAST_COSINE,
    PAIRS,
    TEXTS,
    ProbeScores,
    ProbeVectors,
    least_cosine,
    probe,
    probe_scores,
)
from shoal.core.protocols import Engine, ModelFacts, Pipeline
from shoal.core.scheduling.lane import Lane
from shoal.errors import BackendError, ConfigError, TransportFailed
from shoal.pipelines.scores import apply_activation
from shoal.pipelines.text.codec import TokenizerCodec
from shoal.pipelines.text.string_pairs import StringPairPipeline, StringPairSpec
from shoal.pipelines.text.strings import StringPipeline, StringSpec
from shoal.pipelines.text.tokenizer import TextTokenizer
from shoal.pipelines.upstream_options import Passes
from shoal.specs import Activation
from shoal.types import TaskKind, Vectors

PROBE_S = 60.0
"""Timeout in seconds of a model's first probe: its server may have to load the model."""

QUERY_SLOTS = 8
"""Calls in flight at a server that takes one query per call, since queries of several requests cannot be batched."""

SAMPLE_IDS = [1, 2, 3]
"""Token ids that are valid in any vocabulary."""

VECTOR_OPTIONS: Passes = frozenset(
    {"dimensions", "input_type", "normalize", "prompt_name", "truncate", "truncation_direction"}
)
SCORE_OPTIONS: Passes = frozenset({"truncate", "truncation_direction"})
RERANK_OPTIONS: Passes = frozenset({"truncate", "max_document_tokens"})

PROBABILITY_MARGIN = 1e-3
"""Probabilities are clipped to this distance from 0 and 1 before comparison: half precision resolves them poorly."""

SCORE_TOLERANCE = 0.01
"""Tolerance between a server's score and the activation of its raw score."""

MakeLane = Callable[[Pipeline, Sequence[Engine], ModelFacts], Lane]


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """A model's servers in order. The one at `number` is up; the others join when they come up."""

    target: Target
    clients: Sequence[Client]
    number: int

    def make_engines(
        self, admit: Admit, *, slots: int, make_calls: Callable[[], Sequence[RouteCalls]] = tuple
    ) -> list[UpstreamEngine]:
        """Return one engine per server. `slots`: batches in flight without the setting `streams`."""
        return [
            UpstreamEngine(
                client,
                address.model,
                f"{self.target.name}-{at}",
                admit=admit,
                calls=make_calls(),
                slots=self.target.settings.streams or slots,
                serving=at == self.number,
            )
            for at, (client, address) in enumerate(zip(self.clients, self.target.addresses, strict=True))
        ]


class _EmbeddingOpener:
    """One attempt to open a lane of embeddings."""

    def __init__(self, servers: Servers, counter: TextTokenizer | None) -> None:
        self.servers = servers
        self.counter = counter
        self.ids = False
        self._probe_pipeline = StringPipeline(StringSpec(dimension=1), truncate=True)
        self._reference: list[ProbeVectors] = []

    async def open_runner(self, facts: ModelFacts, lane: MakeLane) -> LaneRunner:
        servers, target = self.servers, self.servers.target
        engines = servers.make_engines(self._admit, slots=SLOTS)
        async with AsyncExitStack() as opened:
            for engine in engines:
                opened.push_async_callback(engine.aclose)
            first = engines[servers.number]
            try:
                self._reference.append(await probe(first, self._probe_pipeline, time.monotonic() + PROBE_S))
            except BackendError as error:
                if isinstance(error, TransportFailed):
                    raise
                raise ConfigError(f"{target.name} does not embed: {error.message}") from error
            counted = first.reports_tokens
            self.ids = await self._takes_ids(first)
            pipeline = self._build_pipeline(counted=counted)
            facts = self._build_facts(facts, pipeline)
            for engine in engines:
                engine.dimension = pipeline.spec.dimension
                engine.start()
            codec = TokenizerCodec(self.counter, pipeline.spec) if self.counter is not None else None
            runner = LaneRunner(lane(pipeline, engines, facts), facts, codec)
            opened.pop_all()
        return runner

    async def _admit(self, engine: UpstreamEngine) -> None:
        probed = await probe(engine, self._probe_pipeline, time.monotonic() + PROBE_S)
        self._reference[0].check(probed, engine.facts.name)
        if self.ids and not await self._takes_ids(engine):
            raise ConfigError(
                f"{engine.facts.name} rejects token ids, unlike the other replicas: serve it under another name"
            )

    async def _takes_ids(self, engine: UpstreamEngine) -> bool:
        """Whether the server accepts token ids; with a local tokenizer, also whether they give the text's vector."""
        ids, text = SAMPLE_IDS, ""
        if self.counter is not None:
            text = TEXTS[0]
            ids = self.counter.raw.encode_batch_fast([text])[0].ids
        inputs = np.empty(1, dtype=object)
        inputs[0] = ids
        try:
            found = await engine.infer({"text": inputs}, ("embedding",), {}, time.monotonic() + PROBE_S)
        except TransportFailed:
            raise
        except BackendError:
            return False
        row = found["embedding"]
        if not np.isfinite(row).all() or row.shape[1] != self._reference[0].dimension:
            return False
        return not text or least_cosine(self._reference[0].vectors[:1], row) >= LEAST_COSINE

    def _build_pipeline(self, *, counted: bool) -> StringPipeline:
        target, probed = self.servers.target, self._reference[0]
        table, passes = target.table, frozenset(target.table.passes) & VECTOR_OPTIONS
        if table.dimension is not None and table.dimension != probed.dimension:
            raise ConfigError(
                f"{target.name} returns vectors of {probed.dimension} dimensions, but the configuration says "
                f"{table.dimension}: correct or remove `dimension`"
            )
        if table.prompts and "prompt_name" in passes:
            raise ConfigError(
                f"{target.name}: the configuration has `prompts`, and also passes prompt_name to the server: remove one"
                " of them"
            )
        spec = StringSpec(
            dimension=probed.dimension,
            prompts=table.prompts,
            default_prompt_name=table.default_prompt_name,
            normalized=probed.unit,
            max_tokens=table.max_tokens or 0,
            token_count="token_count" if counted else "",
            passes=passes,
            ids=self.ids,
        )
        return StringPipeline(
            spec, truncate=target.settings.truncate, normalize=table.normalize, tokenizer=self.counter
        )

    def _build_facts(self, facts: ModelFacts, pipeline: StringPipeline) -> ModelFacts:
        spec = pipeline.spec
        # Passed options and support of token ids do not change the vector space.
        identity = [facts.id, "openai", msgspec.to_builtins(replace(spec, ids=False, passes=frozenset()))]
        return replace(
            facts,
            tasks=("embed",),
            dimension=spec.dimension,
            prompts=dict(spec.prompts),
            default_prompt_name=spec.default_prompt_name,
            space=hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:16],
            answers=self._reference[0].digest,
            verified=f"{len(TEXTS)} texts answered, all finite",
            details={**facts.details, "usage": _usage_source(self.counter, spec.token_count), "token_ids": spec.ids},
        )


async def open_embedder(
    servers: Servers, facts: ModelFacts, counter: TextTokenizer | None, lane: MakeLane
) -> LaneRunner:
    """Open an embedding model. Raises ConfigError if it returns no vectors or contradicts the configuration;
    TransportFailed and CapacityError if its server is lost or busy."""
    return await _EmbeddingOpener(servers, counter).open_runner(facts, lane)


class Scorer(LaneRunner):
    """The runner of a model that scores. Servers reveal class names as answers contain them, so the facts have those
    known so far."""

    def __init__(self, lane: Lane, facts: ModelFacts, codec: TokenizerCodec | None, labels: LabelNames) -> None:
        self._labels = labels
        self._stated = facts
        super().__init__(lane, facts, codec)

    @property
    def facts(self) -> ModelFacts:
        if self._stated.labels != self._labels.class_names:
            self._stated = replace(self._stated, labels=self._labels.class_names)
        return self._stated

    @facts.setter
    def facts(self, facts: ModelFacts) -> None:
        self._stated = facts


class _ScoringOpener:
    """One attempt to open a lane of scores over these routes; the first is that of the model's task."""

    def __init__(
        self, servers: Servers, routes: Sequence[Route], counter: TextTokenizer | None, labels: Sequence[str]
    ) -> None:
        self.servers = servers
        self.routes = routes
        self.counter = counter
        self.ranks = routes[0].kind != "classify"
        self.labels = LabelNames(labels or (("LABEL_0",) if self.ranks else ()))
        self.raw = False
        self._inputs = PAIRS if self.ranks else TEXTS
        self._reference: list[ProbeScores] = []

    async def open_runner(self, facts: ModelFacts, lane: MakeLane) -> Scorer:
        servers = self.servers
        engines = servers.make_engines(
            self._admit,
            slots=QUERY_SLOTS if self.routes[0].kind == "rerank" else SLOTS,
            make_calls=lambda: [route.make_calls(self.labels) for route in self.routes],
        )
        async with AsyncExitStack() as opened:
            for engine in engines:
                opened.push_async_callback(engine.aclose)
            first = engines[servers.number]
            final = await self._probe_scores(first, raw=False)
            counted = first.reports_tokens
            self._reference.append(_to_logits(final))
            self.raw = await self._gives_raw(first, final)
            pipeline = self._build_pipeline(counted=counted)
            facts = self._build_facts(facts, pipeline)
            for engine in engines:
                engine.start()
            codec = TokenizerCodec(self.counter, StringSpec(dimension=0)) if self.counter is not None else None
            runner = Scorer(lane(pipeline, engines, facts), facts, codec, self.labels)
            opened.pop_all()
        return runner

    async def _admit(self, engine: UpstreamEngine) -> None:
        self._reference[0].check(_to_logits(await self._probe_scores(engine, raw=False)), engine.facts.name)

    async def _probe_scores(self, engine: UpstreamEngine, *, raw: bool) -> Vectors:
        """Return the server's scores for the probe inputs, unchanged."""
        passes: Passes = frozenset({"raw_scores"}) if raw else frozenset()
        spec = StringPairSpec(labels=("",), activation="identity", raw=not raw, passes=passes)
        pipeline = StringPairPipeline(spec, truncate=True)
        return (await probe_scores(engine, pipeline, time.monotonic() + PROBE_S, self._inputs)).scores

    async def _gives_raw(self, engine: UpstreamEngine, final: Vectors) -> bool:
        """Whether the server returns raw scores on request: one that does not know the option ignores or rejects it."""
        try:
            raw = await self._probe_scores(engine, raw=True)
        except TransportFailed:
            raise
        except BackendError:
            return False
        over: tuple[Activation, ...] = ("sigmoid", "softmax")
        return raw.shape == final.shape and any(
            np.allclose(final, apply_activation(raw, activation), atol=SCORE_TOLERANCE) for activation in over
        )

    def _build_pipeline(self, *, counted: bool) -> StringPairPipeline:
        target = self.servers.target
        kind = self.routes[0].kind
        passes = frozenset(target.table.passes) & (RERANK_OPTIONS if kind == "rerank" else SCORE_OPTIONS)
        spec = StringPairSpec(
            labels=self.labels.class_names,
            activation="identity",
            max_tokens=target.table.max_tokens or 0,
            token_count="token_count" if counted else "",
            one_query=kind == "rerank",
            passes=passes | ({"raw_scores"} if self.raw else set()),
        )
        return StringPairPipeline(spec, truncate=target.settings.truncate, tokenizer=self.counter)

    def _build_facts(self, facts: ModelFacts, pipeline: StringPairPipeline) -> ModelFacts:
        spec = pipeline.spec
        tasks: tuple[TaskKind, ...] = ("rerank", "classify") if self.ranks else ("classify",)
        return replace(
            facts,
            tasks=tasks,
            vectors=(),
            labels=self.labels.class_names,
            verified=f"{len(self._inputs)} inputs answered, all finite",
            details={
                **facts.details,
                "usage": _usage_source(self.counter, spec.token_count),
                "routes": [route.path for route in self.routes],
                "raw_scores": self.raw,
            },
        )


async def open_scorer(
    servers: Servers,
    facts: ModelFacts,
    counter: TextTokenizer | None,
    lane: MakeLane,
    *,
    routes: Sequence[Route],
    labels: Sequence[str] = (),
) -> Scorer:
    """Open a scoring model over the first route that works. `facts.tasks`: its tasks; `labels`: a classifier's classes.

    Many servers have every route for every model, and only scoring real texts shows which of them a model supports.
    Raises ConfigError if none works; TransportFailed and CapacityError as `open_embedder`.
    """
    why = "it has no route for that: check the path of its address"
    for each in _arrange_routes(routes, facts.tasks):
        try:
            return await _ScoringOpener(
                servers, each, counter, labels if each[0].kind == "classify" else ()
            ).open_runner(facts, lane)
        except BackendError as error:
            if isinstance(error, TransportFailed):
                raise
            why = error.message
    can = "rerank" if "rerank" in facts.tasks else "classify"
    raise ConfigError(f"{servers.target.name} does not {can}: {why}")


def _arrange_routes(routes: Sequence[Route], tasks: Sequence[TaskKind]) -> list[list[Route]]:
    """Return the sets of routes to try, in order: a ranking model may score single texts by another route."""
    classify = [route for route in routes if route.kind == "classify"]
    ranking = [route for route in routes if route.kind != "classify"]
    if "rerank" not in tasks:
        return [[route] for route in classify]
    return [[route, *classify] for route in ranking] + ([] if tasks == ("rerank",) else [[each] for each in classify])


def _usage_source(counter: TextTokenizer | None, token_count: str) -> str:
    return "counted" if counter is not None else "reported" if token_count else "estimated"


def _to_logits(scores: Vectors) -> ProbeScores:
    """Return final scores as logits, so that replicas are compared with the tolerances of raw scores. Scores that are
    not probabilities stay unchanged."""
    if not ((scores >= 0) & (scores <= 1)).all():
        return ProbeScores(scores)
    kept = np.clip(scores, PROBABILITY_MARGIN, 1 - PROBABILITY_MARGIN)
    return ProbeScores(np.log(kept / (1 - kept)).astype(np.float32))
