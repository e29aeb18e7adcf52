"""How names and addresses become runners: the loader behind the lifecycle. Part of the composition root.

A name that a client gives means, in this order: a model that was named before, a table of `shoal.toml` with `backends`,
the default model by one of its aliases, a model that Triton's repository or the store has, a repository of the hub.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shoal.config import Loaded
from shoal.core.batched import BatchedRunner
from shoal.core.batcher import Lane, LaneOptions
from shoal.core.lifecycle import Entry, Fetched, LoadOptions, Plan, Report
from shoal.core.planner import Limits
from shoal.core.protocols import Engine, ModelFacts, Observer, Pipeline, Runner
from shoal.core.routing import ByTask
from shoal.core.threads import Threads
from shoal.errors import AddressError, ConfigError, DeadlineExceeded, InvalidValue, TransportFailed
from shoal.models.address import LOCAL_SCHEMES, TRITON_SCHEMES, Address, Served, check_name, parse_address, parse_served
from shoal.models.progress import Progress
from shoal.models.sources.pins import DEFAULT_ALIASES, DEFAULT_MODEL
from shoal.models.store import Store, Stored
from shoal.settings import ModelTable, Settings

if TYPE_CHECKING:
    from shoal.backends.fake import FakeScript
    from shoal.triton.connections import Tritons
    from shoal.triton.host import TritonHost
    from shoal.triton.models import Wanted

logger = logging.getLogger("shoal")

SERVED_SCHEMES = (*LOCAL_SCHEMES, *TRITON_SCHEMES, "fake")
"""Kinds of addresses that have a backend in this version; the grammar knows more."""

NAMED_SCHEMES = ("hf", "pypi", "fake")
"""What a client may name: a folder of this machine, and another server, are the operator's to name."""

NO_TRITON = "there is no Triton to load into: start Shoal with --triton, or name one with --triton-url"

PROGRESS_S = 0.1
"""Between two reports of bytes: more are more than anybody looks at."""


@dataclass(frozen=True, slots=True)
class _Payload:
    """`bare`: the caller gave a name alone, so that a model of that name which is there already is meant."""

    served: Served
    bare: bool = False


class ModelLoader:
    """Loader over the store, the hub, Triton and the local engines.

    `tritons`: the connections to Triton servers; what they need is only imported where some are. `host` is the Triton
    that models are loaded into, None where there is none. `progress` sees downloads and
    conversions, from threads.
    """

    def __init__(
        self,
        loaded: Loaded,
        observer: Observer,
        threads: Threads,
        *,
        tritons: Tritons | None = None,
        host: TritonHost | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.loaded = loaded
        self._tritons = tritons
        self.host = host
        self._progress = progress
        self._observer = observer
        self._threads = threads
        self._store = Store(loaded.settings.home)
        self._lanes: dict[str, Lane] = {}
        self._plans: dict[str, Plan] = {}

    def queues(self) -> list[tuple[str, int, int]]:
        """(model, items, tokens) that wait now, for the metrics."""
        return [(name, *lane.queued) for name, lane in self._lanes.items()]

    def plan(self, served: Served) -> Plan:
        """What an argument of `shoal serve` stands for. Raises AddressError and ConfigError."""
        _check_schemes(served)
        name = served.name or served.addresses[0].id
        if not name:
            raise ConfigError(f"{served}: name the model of these servers: NAME={served.addresses[0]}#MODEL,...")
        plan = self._plan(name, _Payload(served), LoadOptions())
        if plan.backend == "triton":
            if self.host is None and served.addresses[0].local:
                raise ConfigError(f"{served}: {NO_TRITON}")
            plan = replace(plan, timeout_s=0.0)  # it is served when its server comes
        self._plans[plan.name] = plan
        return plan

    def resolve(self, name: str, options: LoadOptions) -> Plan:
        if options.backend not in ("", "local", "triton"):
            raise InvalidValue(f"backend {options.backend!r} is not known: use local or triton", param="backend")
        known = self._plans.get(name)
        try:
            payload = known.payload if known is not None else self._payload(name)
            _check_schemes(payload.served)
            _scripts(payload.served.addresses)
        except (AddressError, ConfigError) as error:
            raise InvalidValue(error.message, param="model") from None
        plan = self._plan(known.name if known else payload.served.name, payload, options)
        if known is not None and plan.backend == known.backend:
            plan = replace(plan, timeout_s=known.timeout_s)
        if options.backend not in ("", plan.backend):
            raise InvalidValue(f"{plan.source} runs on {plan.backend} alone: leave the backend out", param="backend")
        if plan.backend == "triton" and self.host is None and payload.served.addresses[0].local:
            raise InvalidValue(NO_TRITON, param="backend")
        return plan

    async def fetch(self, plan: Plan, report: Report) -> Fetched:
        address = self._served(plan).addresses[0]
        if not address.local or await self._without_files(plan):
            return Fetched(changed=False)
        began = int(time.time())
        stored = await self._prepare(plan, await self._source(plan), report)
        return Fetched(changed=stored.manifest.created >= began, size=stored.manifest.size)

    async def open(self, plan: Plan, report: Report) -> Runner:
        served = self._served(plan)
        scheme = served.addresses[0].scheme
        if len({address.scheme for address in served.addresses}) > 1:
            kinds = ", ".join(sorted({address.scheme for address in served.addresses}))
            raise AddressError(f"{plan.name}: the replicas of one model must be of one kind, not {kinds}")
        settings = self.loaded.for_model(plan.name)
        if scheme == "fake":
            runner: Runner = self._open_fake(plan.name, settings, served.addresses)
        elif scheme in TRITON_SCHEMES:
            runner = await self._open_remote(plan, settings, served.addresses, report)
        elif plan.backend == "triton":
            runner = await self._open_in_triton(plan, settings, report)
        else:
            runner = await self._open_local(plan, settings, report)
        self._plans[plan.name] = plan
        return runner

    async def close(self, plan: Plan, runner: Runner) -> None:
        try:
            await runner.aclose()
        finally:
            self._lanes.pop(plan.name, None)
            if plan.backend == "triton":
                await self._unload(plan, runner)

    async def remove(self, name: str) -> bool:
        removed = False
        if self.host is not None:
            removed = await self.host.remove(name)
        stored = await asyncio.to_thread(self._stored, name)
        for one in stored:
            await asyncio.to_thread(self._store.remove, one)
        return removed or bool(stored)

    async def offered(self, address: Address) -> dict[str, Served | str]:
        """The models that a server has loaded, by the name to serve them under: what to serve, or why it cannot be.

        Raises TransportFailed while the server is not there, and what it says otherwise.
        """
        from shoal.triton.models import offered

        return await offered(await self._connections.target(address, ModelTable(), self.loaded.settings), address)

    async def entries(self) -> Sequence[Entry]:
        found = {entry.name: entry for entry in await asyncio.to_thread(self._local_entries)}
        if self.host is not None:
            found |= {entry.name: entry for entry in await self.host.entries()}
        # What a server was named for is that server's: a store entry of the same name is another model's.
        found |= {
            plan.name: Entry(name=plan.name, source=plan.source, backend=plan.backend, managed=False)
            for plan in self._plans.values()
            if self._served(plan).addresses[0].scheme in TRITON_SCHEMES
        }
        return list(found.values())

    def _plan(self, name: str, payload: _Payload, options: LoadOptions) -> Plan:
        served = payload.served
        table = self._table(name)
        settings = self.loaded.for_model(name)
        scheme = served.addresses[0].scheme
        backend = scheme
        if scheme in LOCAL_SCHEMES:
            backend = options.backend or self._backend(settings)
        elif scheme in TRITON_SCHEMES:
            backend = "triton"
        aliases = set(table.aliases)
        if [str(address) for address in served.addresses] == [DEFAULT_MODEL] and name == served.addresses[0].id:
            aliases.update(DEFAULT_ALIASES)
        return Plan(
            name=name,
            source=",".join(map(str, served.addresses)),
            backend=backend,
            aliases=tuple(sorted(aliases)),
            default_for=table.default_for,
            timeout_s=settings.load_timeout_s,
            options=options,
            payload=payload,
        )

    def _payload(self, name: str) -> _Payload:
        """What a client's name means. Raises AddressError and InvalidValue."""
        meant = self.loaded.meant(name)
        if meant != name:
            return _Payload(parse_served(meant))
        if name in DEFAULT_ALIASES:
            name = DEFAULT_MODEL
        if ":" not in name:
            check_name(name.partition("@")[0])
        address = parse_address(name)
        if address.scheme not in NAMED_SCHEMES:
            raise InvalidValue(
                f"{address.scheme}: addresses are named at the start alone, as `shoal serve {name}`", param="model"
            )
        return _Payload(Served(name=check_name(address.id), addresses=(address,)), bare=":" not in name)

    def _backend(self, settings: Settings) -> str:
        if settings.backend != "auto":
            return settings.backend
        return "triton" if self.host is not None else "local"

    def _table(self, name: str) -> ModelTable:
        return self.loaded.models.get(name) or ModelTable()

    @staticmethod
    def _served(plan: Plan) -> Served:
        assert isinstance(plan.payload, _Payload)
        return plan.payload.served

    def _open_fake(self, name: str, settings: Settings, addresses: Sequence[Address]) -> Runner:
        from shoal.backends.fake import FakeEngine, FakePipeline, FakeTalker

        scripts = _scripts(addresses)
        engines = [FakeEngine(script, f"fake-{number}") for number, script in enumerate(scripts)]
        facts = ModelFacts(
            source="fake", backend="fake", tasks=("embed",), dimension=scripts[0].dimension, max_input_tokens=512
        )
        lane = self._lane(name, settings, FakePipeline(scripts[0]), engines, facts)
        return ByTask([BatchedRunner(lane, facts), FakeTalker(scripts[0])])

    async def _open_local(self, plan: Plan, settings: Settings, report: Report) -> Runner:
        addresses = self._served(plan).addresses
        if len(addresses) == 1:
            addresses = (await self._source(plan),)
        from shoal.local import open_local

        local = await open_local(plan.name, addresses, settings, self._reporter(report))
        lane = self._lane(plan.name, settings, local.pipeline, local.engines, local.facts)
        return BatchedRunner(lane, local.facts, local.codec)

    async def _open_remote(
        self, plan: Plan, settings: Settings, addresses: Sequence[Address], report: Report
    ) -> Runner:
        from shoal.triton.models import Wanted

        table = self._table(plan.name)
        targets = [await self._connections.target(address, table, settings) for address in addresses]
        wanted = Wanted(name=plan.name, source=plan.source, targets=targets, settings=settings, table=table)
        return await self._open_wanted(wanted, report)

    async def _open_in_triton(self, plan: Plan, settings: Settings, report: Report) -> Runner:
        """A model of files, put into the Triton in use; one that is there already under a bare name is taken as it
        is."""
        host = self.host
        if host is None:
            raise ConfigError(NO_TRITON)
        if len(self._served(plan).addresses) > 1:
            raise ConfigError(f"{plan.name}: in Triton a model has one address, and instances: set triton_instances")
        await host.reached(report)
        if await self._in_triton(plan, host):
            return await self._open_held(plan, settings, None, report)
        stored = await self._prepare(plan, await self._source(plan), report)
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
        from shoal.triton.models import Wanted

        host = self.host
        assert host is not None
        report("waiting for Triton to load the model")
        target = await host.target(plan.name, self._table(plan.name), settings)
        wanted = Wanted(
            name=plan.name,
            source=plan.source,
            targets=[target],
            settings=settings,
            table=self._table(plan.name),
            stored=stored,
        )
        return await self._open_wanted(wanted, report)

    async def _in_triton(self, plan: Plan, host: TritonHost) -> bool:
        """Whether the model is in Triton's repository, to be used as it is: one that Shoal did not make, under a bare
        name, or one that another Shoal made of files which are not here."""
        assert isinstance(plan.payload, _Payload)
        if plan.payload.bare and await host.foreign(plan.name):
            return True
        source = await self._source(plan)
        if await asyncio.to_thread(self._store.find, source) is not None:
            return False
        return await host.usable(plan.name, source)

    async def _without_files(self, plan: Plan) -> bool:
        """Whether a load needs no files here. A server that is away has nothing to offer, as far as is known."""
        if plan.backend != "triton" or self.host is None:
            return False
        try:
            return await self._in_triton(plan, self.host)
        except (TransportFailed, DeadlineExceeded):
            return False

    async def _open_wanted(self, wanted: Wanted, report: Report) -> Runner:
        def lane(pipeline: Pipeline, engines: Sequence[Engine], facts: ModelFacts) -> Lane:
            return self._lane(wanted.name, wanted.settings, pipeline, engines, facts)

        from shoal.triton.models import open_triton

        return await open_triton(wanted, lane, report)

    async def _unload(self, plan: Plan, runner: Runner) -> None:
        from shoal.triton.models import TritonRunner

        assert isinstance(runner, TritonRunner)
        await runner.unload(self.loaded.settings.load_timeout_s)
        if self.host is not None:
            self.host.forget(plan.name)

    @property
    def _connections(self) -> Tritons:
        assert self._tritons is not None, "addresses of Triton servers come with connections to them"
        return self._tritons

    async def _source(self, plan: Plan) -> Address:
        """The address of a plan; for a bare name, that of the model in the store which has it."""
        assert isinstance(plan.payload, _Payload)
        address = plan.payload.served.addresses[0]
        if not plan.payload.bare or address.revision:
            return address
        for stored in await asyncio.to_thread(self._stored, plan.name):
            return parse_address(stored.manifest.address)
        return address

    async def _prepare(self, plan: Plan, address: Address, report: Report) -> Stored:
        from shoal.local import prepared

        return await prepared(address, self.loaded.for_model(plan.name), self._reporter(report))

    def _stored(self, name: str) -> list[Stored]:
        return [one for one in self._store.entries() if name in (one.manifest.id, one.manifest.address)]

    def _local_entries(self) -> list[Entry]:
        return [
            Entry(
                name=one.manifest.id,
                source=one.manifest.address,
                backend="local",
                size=one.manifest.size,
                created=one.manifest.created,
            )
            for one in self._store.entries()
        ]

    def _reporter(self, report: Report) -> Progress:
        return _Reporter(asyncio.get_running_loop(), report, self._progress or Progress())

    def _lane(
        self, name: str, settings: Settings, pipeline: Pipeline, engines: Sequence[Engine], facts: ModelFacts
    ) -> Lane:
        limits = Limits(
            settings.max_batch_size,
            settings.max_batch_tokens,
            settings.max_batch_ms,
            settings.max_wait_time_ms,
            settings.max_age_ms,
        )
        options = LaneOptions(model=name, limits=limits, max_items=settings.max_queue_items, space=facts.space)
        lane = Lane(pipeline, engines, options, threads=self._threads, observer=self._observer)
        self._lanes[name] = lane
        return lane


def _check_schemes(served: Served) -> None:
    """Raise ConfigError for an address that nothing here can serve."""
    for address in served.addresses:
        if address.scheme not in SERVED_SCHEMES:
            known = ", ".join(f"{scheme}:" for scheme in SERVED_SCHEMES)
            raise ConfigError(
                f"{address}: this version has no backend for {address.scheme}: addresses; it serves {known}"
            )


def _scripts(addresses: Sequence[Address]) -> list[FakeScript]:
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
        self._tell(stage, fraction, 1.0)

    def noted(self, line: str) -> None:
        self._also.noted(line)

    def _tell(self, stage: str, done: float | None, total: float | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._report, stage, done, total)
        except RuntimeError:  # the loop is closed: nobody listens any more
            return
