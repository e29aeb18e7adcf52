"""Opens models of text-embeddings-inference servers: reads the server's info, builds the runner and the facts."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import msgspec

from shoal.backends.base.backend import Target
from shoal.backends.base.backoff import Notify, find_first, retry_pauses
from shoal.backends.base.http_client import Client
from shoal.backends.base.limits import describe_limits
from shoal.backends.base.served_name import served_name
from shoal.backends.base.tokenizer import load_tokenizer
from shoal.backends.tei.codec import TeiCodec
from shoal.backends.tei.engine import SLOTS, TeiEngine
from shoal.backends.tei.http_link import HttpLink
from shoal.backends.tei.info import Info
from shoal.backends.tei.link import Link
from shoal.backends.tei.vocabulary import find_vocab_size
from shoal.config.settings import Settings
from shoal.core.closing import close_all
from shoal.core.lane_runner import LaneRunner
from shoal.core.probe import (
    PAIRS,
    TEXTS,
    ProbeScores,
    ProbeSparseVectors,
    ProbeVectors,
    probe,
    probe_scores,
    probe_sparse,
)
from shoal.core.protocols import Engine, ModelFacts, Pipeline, Runner
from shoal.core.scheduling.lane import Lane
from shoal.errors import (
    AddressError,
    BackendError,
    CapacityError,
    ConfigError,
    DeadlineExceeded,
    EngineFailed,
    InputRejected,
    TransportFailed,
)
from shoal.models.address import Address, ServedModel, check_name
from shoal.pipelines.text.string_pairs import StringPairPipeline, StringPairSpec
from shoal.pipelines.text.strings import StringPipeline, StringSpec
from shoal.pipelines.text.tokenizer import TextTokenizer

ASK_S = 10.0
PROBE_S = 60.0
"""Timeout in seconds of a model's first probe."""

RECHECK_TIMEOUT_S = 2.0
"""Timeout in seconds of one probe input to a server in service; a busy server is checked later."""

TRUNCATION_OPTIONS = frozenset({"truncate", "truncation_direction"})
VECTOR_OPTIONS = frozenset({"prompt_name", "normalize", "dimensions"})

MakeLane = Callable[[Pipeline, Sequence[Engine], ModelFacts], Lane]

ProbeResult = ProbeVectors | ProbeSparseVectors | ProbeScores


class TeiModel(LaneRunner):
    """The runner of one model, with its connections."""

    def __init__(self, lane: Lane, facts: ModelFacts, codec: TeiCodec, connections: AsyncExitStack) -> None:
        super().__init__(lane, facts, codec)
        self._connections = connections

    async def aclose(self) -> None:
        await close_all(super().aclose, self._connections.aclose)


async def open_tei(target: Target, lane: MakeLane, note: Notify) -> Runner:
    """Open a model once one of its servers reports its info; the others join when they come up and agree.

    Waits without limit while no server answers, and passes the reason to `note`. Raises SetupError if a server answers
    and the model cannot be served.
    """
    async with AsyncExitStack() as opened:
        links = []
        for address in target.addresses:
            links.append(make_link(address, target.settings))
            opened.push_async_callback(links[-1].aclose)
        counter = await asyncio.to_thread(load_tokenizer, target.settings, target.table)
        for pause in retry_pauses():
            number, info = await _find_first_server(target, links, note)
            try:
                return await _ModelOpener(target, links, number, info, counter).open_model(lane, opened)
            except (BackendError, CapacityError) as error:  # lost, busy or failed before its first answer
                note(f"waiting for {target.addresses[number]}: {error.message}")
            await asyncio.sleep(pause)
    raise AssertionError("the retry loop never ends")


async def list_offers(address: Address, settings: Settings) -> dict[str, ServedModel | str]:
    """Return the model of a server by served name: the model, or the reason it cannot be served.

    Raises TransportFailed, DeadlineExceeded and EngineFailed if the server is unavailable, ConfigError for another kind
    of server.
    """
    link = make_link(address, settings)
    try:
        info = await link.info(time.monotonic() + ASK_S)
    finally:
        await link.aclose()
    name = served_name(info.model_id or info.served_name)
    try:
        return {check_name(name): ServedModel(name=name, addresses=(address,))}
    except AddressError as error:
        return {info.model_id: f"{error.message}; give it a name: NAME={address}"}


def make_link(address: Address, settings: Settings) -> Link:
    """Return the link to a server. Raises ConfigError for a key that cannot be sent in a header."""
    scheme, key, patience_s = address.scheme.removeprefix("tei+"), settings.upstream_api_key, settings.connect_timeout_s
    if scheme in ("http", "https"):
        return HttpLink(Client(f"{scheme}://{address.target}", key=key, connect_timeout_s=patience_s))
    from shoal.backends.tei.grpc_link import GrpcLink

    return GrpcLink(address.target, tls=scheme == "grpcs", key=key, connect_timeout_s=patience_s)


async def _find_first_server(target: Target, links: Sequence[Link], note: Notify) -> tuple[int, Info]:
    """Return the index and the info of the first server that answers."""

    async def ask(number: int) -> Info:
        info = await links[number].info(time.monotonic() + ASK_S)
        check_model(target.addresses[number], info)
        return info

    return await find_first(ask, target.addresses, (TransportFailed, DeadlineExceeded, EngineFailed), note)


def check_model(address: Address, info: Info) -> None:
    """Raise ConfigError if the server has another model than its address names."""
    if address.model and address.model not in (info.model_id, info.served_name, served_name(info.model_id)):
        raise ConfigError(
            f"{address}: the server has {info.model_id}, not {address.model}: correct the address, or remove its #model"
        )


class _ModelOpener:
    """One attempt to open a model: `number` is the index of the server that answered with `info`."""

    def __init__(
        self, target: Target, links: Sequence[Link], number: int, info: Info, counter: TextTokenizer | None
    ) -> None:
        self.target = target
        self.links = links
        self.number = number
        self.info = info
        self.counter = counter
        # The default for requests: truncate only if neither the operator of Shoal nor that of the server disabled it.
        self.truncate = target.settings.truncate and info.auto_truncate
        self.max_tokens = target.table.max_tokens or info.max_input_length or 0
        self.reference: ProbeResult | None = None
        self.vocab_size: int | None = None
        self._probe_indices = itertools.cycle(range(len(PAIRS if info.kind == "reranker" else TEXTS)))

    async def open_model(self, lane: MakeLane, connections: AsyncExitStack) -> TeiModel:
        target, number = self.target, self.number
        engines = [
            TeiEngine(
                link,
                self.info,
                f"{target.name}-{at}",
                admit=self._admit,
                same=self._verify_same_model,
                slots=target.settings.streams or SLOTS,
                serving=at == number,
            )
            for at, link in enumerate(self.links)
        ]
        async with AsyncExitStack() as opened:
            for engine in engines:
                opened.push_async_callback(engine.aclose)
            try:
                self.reference = await self._probe(engines[number])
            except InputRejected as error:  # every model accepts these texts: a retry is pointless
                raise ConfigError(f"{target.name} rejects the probe inputs: {error.message}") from error
            link = self.links[number]
            if isinstance(link, HttpLink) and self.info.kind == "embedding" and self.counter is None:
                most = self.info.max_client_batch_size
                self.vocab_size = await find_vocab_size(link, most, time.monotonic() + ASK_S)
            if isinstance(self.reference, ProbeVectors):
                for engine in engines:
                    engine.dimension = self.reference.dimension
            pipeline = self._build_pipeline(self.reference)
            facts = self._build_facts(pipeline, self.reference)
            for engine in engines:
                engine.start()
            model = TeiModel(lane(pipeline, engines, facts), facts, TeiCodec(engines), connections.pop_all())
            opened.pop_all()
        return model

    async def _admit(self, engine: TeiEngine) -> None:
        """Raise ConfigError if the server does not have this model, or no longer has it."""
        info, name = engine.info, engine.facts.name
        if (info.kind, info.labels) != (self.info.kind, self.info.labels):
            raise ConfigError(
                f"{name} at {engine.link.base} is a model of another kind ({info.kind}) than the other replicas"
                f" ({self.info.kind}), or has other labels: serve it under a separate name, or reload the model"
            )
        probed = await self._probe(engine)
        reference = self.reference
        # Models of the same kind, which was compared above, have the same type of answer.
        reference.check(probed, name)  # type: ignore[union-attr,arg-type]

    async def _verify_same_model(self, engine: TeiEngine) -> None:
        """Raise ConfigError if the server's answer to one probe input has changed. Each call uses the next input."""
        place = next(self._probe_indices)
        reference = self.reference
        probed = await self._probe(engine, slice(place, place + 1), RECHECK_TIMEOUT_S)
        reference.of(place).check(probed, engine.facts.name)  # type: ignore[union-attr,arg-type]

    async def _probe(self, engine: TeiEngine, part: slice = slice(None), patience_s: float = PROBE_S) -> ProbeResult:
        """Return the server's answers to the probe inputs, or to a slice of them."""
        deadline = time.monotonic() + patience_s
        kind = self.info.kind
        if kind == "splade":
            return await probe_sparse(engine, self._string_pipeline(1, prompts=False), deadline, TEXTS[part])
        if kind == "embedding":
            return await probe(engine, self._string_pipeline(1, prompts=False), deadline, TEXTS[part])
        return await probe_scores(
            engine, self._pair_pipeline(), deadline, (PAIRS if kind == "reranker" else TEXTS)[part]
        )

    def _build_pipeline(self, probed: ProbeResult) -> Pipeline:
        if not self.info.embeds:
            return self._pair_pipeline(self.counter)
        dimension = probed.dimension if isinstance(probed, ProbeVectors) else 1
        configured = self.target.table.dimension
        if isinstance(probed, ProbeVectors) and configured is not None and configured != dimension:
            raise ConfigError(
                f"{self.target.name} returns vectors of {dimension} dimensions, but the configuration says "
                f"{configured}: correct or remove `dimension`"
            )
        return self._string_pipeline(dimension)

    def _string_pipeline(self, dimension: int, *, prompts: bool = True) -> StringPipeline:
        """Return the pipeline for texts. Configured prompts are prepended here; without any, the server gets the names
        of its own prompts. `prompts` False: neither, for a probe."""
        table, kind = self.target.table, self.info.kind
        own = prompts and bool(table.prompts)
        spec = StringSpec(
            dimension=dimension,
            prompts=table.prompts if own else {},
            default_prompt_name=table.default_prompt_name if own else None,
            max_tokens=self.max_tokens,
            kinds=self.info.vectors,
            sparse="sparse",
            tokens="tokens",
            token_count="token_count",
            passes=(TRUNCATION_OPTIONS | VECTOR_OPTIONS) - ({"prompt_name"} if own else set()),
            ids=kind == "embedding",
        )
        counter = self.counter if prompts else None
        return StringPipeline(
            spec, truncate=self.truncate, normalize=table.normalize, tokenizer=counter, vocab_size=self.vocab_size
        )

    def _pair_pipeline(self, counter: TextTokenizer | None = None) -> StringPairPipeline:
        """Return the pipeline for scores. They are requested raw, so that raw and activated scores share calls; the
        activation is the server's own: sigmoid for one label, softmax for several."""
        labels = self.info.labels
        spec = StringPairSpec(
            labels=labels,
            activation="sigmoid" if len(labels) == 1 else "softmax",
            max_tokens=self.max_tokens,
            output="scores",
            token_count="token_count",
            raw=True,
            passes=TRUNCATION_OPTIONS,
        )
        return StringPairPipeline(spec, truncate=self.truncate, tokenizer=counter)

    def _build_facts(self, pipeline: Pipeline, probed: ProbeResult) -> ModelFacts:
        target, info = self.target, self.info
        spec = pipeline.spec if isinstance(pipeline, StringPipeline) else None
        identity = [info.model_id, info.revision, "tei", info.pooling, msgspec.to_builtins(spec, order="deterministic")]
        counted = "counted" if self.counter is not None else "reported"
        return ModelFacts(
            id=info.model_id,
            source=target.source,
            backend="tei",
            tasks=info.tasks,
            vectors=info.vectors,
            labels=info.labels,
            dimension=probed.dimension if isinstance(probed, ProbeVectors) else None,
            max_input_tokens=self.max_tokens or None,
            precision=info.dtype,
            pooling=info.pooling,
            revision=info.revision,
            space=hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:16] if spec is not None else "",
            prompts=dict(spec.prompts) if spec is not None else {},
            default_prompt_name=spec.default_prompt_name if spec is not None else None,
            answers="" if isinstance(probed, ProbeScores) else probed.digest,
            verified=f"{len(PAIRS if info.kind == 'reranker' else TEXTS)} inputs answered, all finite",
            details={
                **describe_limits(target.settings),
                "truncate": self.truncate,
                "usage": counted,
                "servers": [str(address) for address in target.addresses],
                "server_version": info.version,
                "max_client_batch_size": info.max_client_batch_size,
                "max_concurrent_requests": info.max_concurrent_requests,
            },
        )
