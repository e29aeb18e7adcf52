"""How a plan becomes a runner: every kind of place where a model runs. Part of the composition root."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.config import Loaded
from shoal.core.batched import BatchedRunner
from shoal.core.batcher import Lane, LaneOptions
from shoal.core.generation import GenerationRunner
from shoal.core.loading import Plan, Report
from shoal.core.planner import Limits
from shoal.core.protocols import ChatPipeline, Engine, ModelFacts, Observer, Pipeline, Runner, TextGenerator
from shoal.core.routing import ByTask
from shoal.core.threads import Threads
from shoal.core.towers import TowersRunner
from shoal.errors import AddressError, ConfigError
from shoal.llm.options import NOTHING, generation_options
from shoal.models.address import OPENAI_SCHEMES, TEI_SCHEMES, TRITON_SCHEMES, Address, Served, parse_address
from shoal.models.progress import Progress
from shoal.models.store import Store, Stored
from shoal.row_cache import RowCaches
from shoal.settings import PICTURES_TIMES, ModelTable, Settings
from shoal.specs import ContrastSpec
from shoal.types import Modality, TaskKind

if TYPE_CHECKING:
    from shoal.backends.fake import FakeScript
    from shoal.triton.connections import Tritons
    from shoal.triton.host import TritonHost
    from shoal.triton.targets import Wanted

NO_TRITON = "there is no Triton to load into: start Shoal with --triton, or name one with --triton-url"

PROGRESS_S = 0.1
"""Between two reports of bytes: more are more than anybody looks at."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A plan's own. `bare`: the caller gave a name alone, so that a model of that name which is there already is
    meant."""

    served: Served
    bare: bool = False


def payload_of(plan: Plan) -> Payload:
    assert isinstance(plan.payload, Payload)
    return plan.payload


class Opening:
    """Opens runners.

    `threads` prepare texts, `pictures` what is heavier (None: the same ones). `tritons`: the connections to Triton
    servers; what they need is only imported where some are. `host` is the Triton that models are loaded into, None
    where there is none. `progress` sees downloads and conversions, from threads.
    """

    def __init__(
        self,
        loaded: Loaded,
        observer: Observer,
        threads: Threads,
        *,
        pictures: Threads | None = None,
        tritons: Tritons | None = None,
        host: TritonHost | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.loaded = loaded
        self.host = host
        self.store = Store(loaded.settings.home)
        self.caches = RowCaches(Path(loaded.settings.home))
        self._tritons = tritons
        self._progress = progress
        self._observer = observer
        self._threads = threads
        self._pictures = pictures or threads
        self._lanes: dict[str, Sequence[Lane]] = {}

    def queues(self) -> list[tuple[str, int, int]]:
        """(model, items, tokens) that wait now, for the metrics."""
        every = [(name, [lane.queued for lane in lanes]) for name, lanes in self._lanes.items()]
        return [(name, sum(items for items, _ in each), sum(tokens for _, tokens in each)) for name, each in every]

    def forget(self, name: str) -> None:
        """A model's runner is closed."""
        self._lanes.pop(name, None)
        self.caches.close(name)

    def table(self, name: str) -> ModelTable:
        return self.loaded.models.get(name) or ModelTable()

    async def open(self, plan: Plan, report: Report) -> Runner:
        """As Loader.open."""
        served = payload_of(plan).served
        scheme = served.addresses[0].scheme
        if len({address.scheme for address in served.addresses}) > 1:
            kinds = ", ".join(sorted({address.scheme for address in served.addresses}))
            raise AddressError(f"{plan.name}: the replicas of one model must be of one kind, not {kinds}")
        settings = self.loaded.for_model(plan.name)
        if scheme == "fake":
            return self._open_fake(plan.name, settings, served.addresses)
        if scheme in OPENAI_SCHEMES:
            return await self._open_upstream(plan, settings, report)
        if scheme in TEI_SCHEMES:
            return await self._open_tei(plan, settings, report)
        if scheme in TRITON_SCHEMES:
            return await self._open_remote(plan, settings, served.addresses, report)
        if plan.backend == "triton":
            return await self._open_in_triton(plan, settings, report)
        return await self._open_local(plan, settings, report)

    async def offered(self, address: Address) -> dict[str, Served | str]:
        """As ModelLoader.offered."""
        if address.scheme in OPENAI_SCHEMES:
            from shoal.llm import upstream

            return await upstream.offered(address, self.loaded.settings)
        if address.scheme in TEI_SCHEMES:
            from shoal import tei

            return await tei.offered(address, self.loaded.settings)
        from shoal.triton.targets import offered

        target = await self._connections.target(address, ModelTable(), self.loaded.settings)
        return await offered(target, address, self.loaded.models)

    async def source(self, plan: Plan) -> Address:
        """The address of a plan; for a bare name, that of the model in the store which has it."""
        payload = payload_of(plan)
        address = payload.served.addresses[0]
        if not payload.bare or address.revision:
            return address
        for stored in await asyncio.to_thread(self.stored, plan.name):
            return parse_address(stored.manifest.address)
        return address

    def stored(self, name: str) -> list[Stored]:
        """Entries of the store that go by a name. Blocks."""
        return [one for one in self.store.entries() if name in (one.manifest.id, one.manifest.address)]

    async def prepare(self, plan: Plan, address: Address, report: Report) -> Stored:
        """The model's files in the store, fetched and converted if need be."""
        from shoal.local import prepared

        return await prepared(address, self.loaded.for_model(plan.name), self._reporter(report))

    async def in_triton(self, plan: Plan, host: TritonHost) -> bool:
        """Whether the model is in Triton's repository, to be used as it is: one that Shoal did not make, under a bare
        name, or one that another Shoal made of files which are not here."""
        if payload_of(plan).bare and await host.foreign(plan.name):
            return True
        source = await self.source(plan)
        if await asyncio.to_thread(self.store.find, source) is not None:
            return False
        return await host.usable(plan.name, source)

    def _open_fake(self, name: str, settings: Settings, addresses: Sequence[Address]) -> Runner:
        from shoal.backends.fake import CONVERSATION, FakeEngine, FakePipeline, FakeTalker
        from shoal.llm.chat import chat_pipeline

        given = scripts(addresses)
        engines = [FakeEngine(script, f"fake-{number}") for number, script in enumerate(given)]
        talkers = [FakeTalker(script, f"fake-{number}") for number, script in enumerate(given)]
        if given[0].labels:
            tasks: tuple[TaskKind, ...] = ("rerank", "classify") if given[0].labels == 1 else ("classify",)
            scores = ModelFacts(
                source="fake",
                backend="fake",
                tasks=tasks,
                max_input_tokens=512,
                vectors=(),
                labels=given[0].label_names,
                modalities=given[0].modalities,
            )
            return BatchedRunner(self._lane(name, settings, FakePipeline(given[0]), engines, scores), scores)
        embeds = ModelFacts(
            source="fake",
            backend="fake",
            tasks=("embed",),
            dimension=given[0].dimension,
            max_input_tokens=512,
            vectors=given[0].kinds,
            modalities=given[0].modalities,
            contrast=ContrastSpec(scale=10.0) if given[0].images else None,
        )
        talks = ModelFacts(source="fake", backend="fake", tasks=("generate",), adapters=talkers[0].facts.adapters)
        pipeline = chat_pipeline(None, settings, template=CONVERSATION)
        lane = self._lane(name, settings, FakePipeline(given[0]), engines, embeds)
        return ByTask([BatchedRunner(lane, embeds), self._talker(name, settings, pipeline, talkers, talks)])

    async def _open_upstream(self, plan: Plan, settings: Settings, report: Report) -> Runner:
        from shoal.llm.upstream import Wanted, open_upstream

        table = self.table(plan.name)
        wanted = Wanted(
            name=plan.name,
            source=plan.source,
            addresses=payload_of(plan).served.addresses,
            settings=settings,
            table=table,
            passes=frozenset(table.passes),
        )
        return await open_upstream(wanted, partial(self._lane, plan.name, settings), report)

    async def _open_tei(self, plan: Plan, settings: Settings, report: Report) -> Runner:
        from shoal.tei import Wanted, open_tei

        wanted = Wanted(
            name=plan.name,
            source=plan.source,
            addresses=payload_of(plan).served.addresses,
            settings=settings,
            table=self.table(plan.name),
        )
        return await open_tei(wanted, partial(self._lane, plan.name, settings), report)

    async def _open_local(self, plan: Plan, settings: Settings, report: Report) -> Runner:
        addresses = payload_of(plan).served.addresses
        if len(addresses) == 1:
            addresses = (await self.source(plan),)
        stored = await self.prepare(plan, addresses[0], report)
        if stored.manifest.generation is not None:
            if len(addresses) > 1:
                raise AddressError(f"{plan.name}: a local language model has one address: it batches by itself")
            return await self._open_llm(plan, stored, settings)
        table = self.table(plan.name)
        if stored.manifest.image is not None:
            return await self._open_towers(plan, addresses, settings, table, report)
        from shoal.local import open_local

        local = await open_local(plan.name, addresses, settings, self._reporter(report), table=table)
        lane = self._lane(plan.name, settings, local.pipeline, local.engines, local.facts)
        return BatchedRunner(lane, local.facts, local.codec)

    async def _open_towers(
        self, plan: Plan, addresses: Sequence[Address], settings: Settings, table: ModelTable, report: Report
    ) -> Runner:
        from shoal.local import prepared
        from shoal.towers import open_towers

        stored = [await prepared(address, settings, self._reporter(report)) for address in addresses]
        towers = await open_towers(plan.name, stored, settings, table)
        return TowersRunner(self._lanes_of(plan.name, settings, towers.parts, towers.facts), towers.facts, towers.codec)

    async def _open_llm(self, plan: Plan, stored: Stored, settings: Settings) -> Runner:
        from shoal.llm.chat import generation_sampling
        from shoal.llm.local import open_llm

        table = self.table(plan.name)
        recommended = await asyncio.to_thread(generation_sampling, stored.path)
        pipeline, generator, facts = await open_llm(plan.name, stored, settings, table)
        try:
            return self._talker(plan.name, settings, pipeline, [generator], facts, recommended)
        except BaseException:  # the table asks for sampling that there is not: its process is nobody's then
            await generator.aclose()
            raise

    async def _open_remote(
        self, plan: Plan, settings: Settings, addresses: Sequence[Address], report: Report
    ) -> Runner:
        from shoal.triton.targets import Wanted

        table = self.table(plan.name)
        targets = [await self._connections.target(address, table, settings) for address in addresses]
        wanted = Wanted(name=plan.name, source=plan.source, targets=targets, settings=settings, table=table)
        return await self._open_wanted(wanted, report)

    async def _open_in_triton(self, plan: Plan, settings: Settings, report: Report) -> Runner:
        """A model of files, put into the Triton in use; one that is there already under a bare name is taken as it
        is."""
        host = self.host
        if host is None:
            raise ConfigError(NO_TRITON)
        if len(payload_of(plan).served.addresses) > 1:
            raise ConfigError(f"{plan.name}: in Triton a model has one address, and instances: set triton_instances")
        await host.reached(report)
        if await self.in_triton(plan, host):
            return await self._open_held(plan, settings, None, report)
        stored = await self.prepare(plan, await self.source(plan), report)
        if stored.manifest.generation is not None:
            raise ConfigError(
                f"{plan.name} is a language model, which Shoal does not write into Triton: run it here with "
                f'`backend = "local"` in [models."{plan.name}"], or see docs/triton-llm.md for Triton\'s own way'
            )
        report("writing the model into Triton's repository")
        new = await host.held(plan.name) is None
        try:
            await host.publish(plan.name, stored, settings, text_in=plan.options.text_in)
            return await self._open_held(plan, settings, stored, report)
        except BaseException:  # a cancelled load, too, leaves nothing half-made
            if new:  # an older entry may be in use by others
                await host.take_back(plan.name, settings)
            raise

    async def _open_held(self, plan: Plan, settings: Settings, stored: Stored | None, report: Report) -> Runner:
        """A model that lies in Triton's repository, or was pushed. `stored`: what it was made from here."""
        from shoal.triton.targets import Wanted

        host = self.host
        assert host is not None
        report("waiting for Triton to load the model")
        table = self.table(plan.name)
        wanted = Wanted(
            name=plan.name,
            source=plan.source,
            targets=[await host.target(plan.name, table, settings)],
            settings=settings,
            table=table,
            stored=stored,
        )
        return await self._open_wanted(wanted, report)

    async def _open_wanted(self, wanted: Wanted, report: Report) -> Runner:
        name, settings = wanted.name, wanted.settings

        def talk(pipeline: ChatPipeline, generators: Sequence[TextGenerator], facts: ModelFacts) -> GenerationRunner:
            return self._talker(name, settings, pipeline, generators, facts)

        from shoal.triton.models import open_triton

        return await open_triton(wanted, partial(self._lanes_of, name, settings), talk, report)

    @property
    def _connections(self) -> Tritons:
        assert self._tritons is not None, "addresses of Triton servers come with connections to them"
        return self._tritons

    def _reporter(self, report: Report) -> Progress:
        return _Reporter(asyncio.get_running_loop(), report, self._progress or Progress())

    def _lane(
        self, name: str, settings: Settings, pipeline: Pipeline, engines: Sequence[Engine], facts: ModelFacts
    ) -> Lane:
        return self._lanes_of(name, settings, {"text": (pipeline, engines)}, facts)["text"]

    def _lanes_of(
        self,
        name: str,
        settings: Settings,
        parts: Mapping[Modality, tuple[Pipeline, Sequence[Engine]]],
        facts: ModelFacts,
    ) -> dict[Modality, Lane]:
        """A lane for each modality of a model, with one cache for all."""
        limits = Limits(
            settings.max_batch_size,
            settings.max_batch_tokens,
            settings.max_batch_ms,
            settings.max_wait_time_ms,
            settings.max_age_ms,
        )
        longer = replace(limits, max_batch_ms=settings.max_batch_ms * PICTURES_TIMES)
        options = LaneOptions(
            model=name,
            limits=limits,
            max_items=settings.max_queue_items,
            space=facts.space,
            cache=self.caches.open(
                name, settings, facts, "+".join(one[0].facts.precision for _, one in parts.values())
            ),
        )
        lanes = {
            modality: Lane(
                pipeline,
                engines,
                replace(options, limits=longer) if modality == "image" else options,
                threads=self._pictures if pipeline.work == "heavy" else self._threads,
                observer=self._observer,
            )
            for modality, (pipeline, engines) in parts.items()
        }
        self._lanes[name] = list(lanes.values())
        return lanes

    def _talker(
        self,
        name: str,
        settings: Settings,
        pipeline: ChatPipeline,
        generators: Sequence[TextGenerator],
        facts: ModelFacts,
        recommended: Mapping[str, Any] = NOTHING,
    ) -> GenerationRunner:
        """`recommended`: sampling that the model's own files ask for, below the table's."""
        able, table = generators[0].facts, self.table(name)
        options = generation_options(name, settings, table, able, self._threads, recommended)
        own = {"parameters": sorted(able.parameters), **pipeline.details}
        return GenerationRunner(pipeline, generators, replace(facts, details={**facts.details, **own}), options)


def scripts(addresses: Sequence[Address]) -> list[FakeScript]:
    """Of the scripted models among the addresses. Raises AddressError for an option that they do not have."""
    from shoal.backends.fake import FakeScript

    return [FakeScript.parse(dict(address.options)) for address in addresses if address.scheme == "fake"]


class _Reporter(Progress):
    """Progress from a thread to a job's report on the loop, and to whoever else wants to see it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, report: Report, also: Progress) -> None:
        self._loop = loop
        self._report = report
        self._also = also
        self._last = 0.0
        self._lock = threading.Lock()

    def fetched(self, what: str, done: int, total: int | None) -> None:
        self._also.fetched(what, done, total)
        with self._lock:
            now = time.monotonic()
            if now - self._last < PROGRESS_S and done != total:
                return
            self._last = now
        self._tell(f"downloading {what}", float(done), None if total is None else float(total))

    def worked(self, stage: str, fraction: float) -> None:
        self._also.worked(stage, fraction)
        self._tell(stage, fraction=fraction)

    def noted(self, line: str) -> None:
        self._also.noted(line)

    def _tell(
        self, stage: str, done: float | None = None, total: float | None = None, fraction: float | None = None
    ) -> None:
        try:
            self._loop.call_soon_threadsafe(partial(self._report, stage, done, total, fraction=fraction))
        except RuntimeError:  # the loop is closed: nobody listens any more
            return
