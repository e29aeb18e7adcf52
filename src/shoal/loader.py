"""How names and addresses become runners: the loader behind the lifecycle. Part of the composition root.

A name that a client gives means, in this order: a model that was named before, a table of `shoal.toml` with `backends`,
the default model by one of its aliases, a model that Triton's repository or the store has, a pair of open_clip's names,
a repository of the hub.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from shoal.core.lifecycle import Entry, Fetched, LoadOptions, Plan, Report
from shoal.core.protocols import Runner
from shoal.errors import AddressError, ConfigError, DeadlineExceeded, InvalidValue, TransportFailed
from shoal.models.address import (
    LOCAL_SCHEMES,
    OFFERING_SCHEMES,
    OPENAI_SCHEMES,
    TEI_SCHEMES,
    TRITON_SCHEMES,
    Address,
    Served,
    check_name,
    parse_address,
    parse_served,
)
from shoal.models.open_clip_names import HUB, held_by, of_pair
from shoal.models.sources.pins import DEFAULT_ALIASES, DEFAULT_MODEL
from shoal.opening import NO_TRITON, Opening, Payload, payload_of, scripts
from shoal.row_cache import RowCaches
from shoal.settings import Settings

logger = logging.getLogger("shoal")

NAMED_SCHEMES = ("hf", "pypi", "fake")
"""What a client may name: a folder of this machine, and another server, are the operator's to name."""


class ModelLoader:
    """Loader over the store, the hub, Triton and the local engines; `opening` makes the runners."""

    def __init__(self, opening: Opening) -> None:
        self.loaded = opening.loaded
        self.host = opening.host
        self._opening = opening
        self._plans: dict[str, Plan] = {}

    def queues(self) -> list[tuple[str, int, int]]:
        """(model, items, tokens) that wait now, for the metrics."""
        return self._opening.queues()

    @property
    def caches(self) -> RowCaches:
        return self._opening.caches

    def plan(self, served: Served) -> Plan:
        """What an argument of `shoal serve` stands for. Raises AddressError and ConfigError."""
        served = _of_open_clip(served)
        name = served.name or served.addresses[0].id
        if not name:
            model = "" if served.addresses[0].scheme in TEI_SCHEMES else "#MODEL"
            raise ConfigError(f"{served}: name the model of these servers: NAME={served.addresses[0]}{model},...")
        plan = self._plan(name, Payload(served), LoadOptions())
        if plan.backend == "triton" and self.host is None and served.addresses[0].local:
            raise ConfigError(f"{served}: {NO_TRITON}")
        if plan.backend in ("triton", "openai", "tei"):
            plan = replace(plan, timeout_s=0.0)  # it is served when its server comes
        self._plans[plan.name] = plan
        return plan

    def resolve(self, name: str, options: LoadOptions) -> Plan:
        if options.backend not in ("", "local", "triton"):
            raise InvalidValue(f"backend {options.backend!r} is not known: use local or triton", param="backend")
        known = self._plans.get(name)
        try:
            payload = known.payload if known is not None else self._payload(name)
            scripts(payload.served.addresses)
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
        address = payload_of(plan).served.addresses[0]
        if not address.local or await self._without_files(plan):
            return Fetched(changed=False)
        began = int(time.time())
        source = await self._opening.source(plan)
        stored = await self._opening.prepare(plan, source, report)
        return Fetched(
            changed=stored.manifest.created >= began,
            size=stored.manifest.size,
            source=str(source) if payload_of(plan).bare else "",
        )

    async def open(self, plan: Plan, report: Report) -> Runner:
        runner = await self._opening.open(plan, report)
        self._plans[plan.name] = plan
        return runner

    async def close(self, plan: Plan, runner: Runner) -> None:
        try:
            await runner.aclose()
        finally:
            self._opening.forget(plan.name)
            if plan.backend == "triton":
                await self._unload(plan, runner)

    async def remove(self, name: str) -> bool:
        removed = False
        if self.host is not None:
            removed = await self.host.remove(name)
        stored = await asyncio.to_thread(self._opening.stored, self._kept_as(name))
        for one in stored:
            await asyncio.to_thread(self._opening.store.remove, one)
        return removed or bool(stored)

    def _kept_as(self, name: str) -> str:
        """What the files of a name go by in the store: those of a pair of open_clip's names are its repository's."""
        return name if self.loaded.meant(name) != name else of_pair(name) or name

    async def offered(self, address: Address) -> dict[str, Served | str]:
        """The models that a server has loaded, by the name to serve them under: what to serve, or why it cannot be.

        Raises TransportFailed while the server is not there, and what it says otherwise.
        """
        return await self._opening.offered(address)

    async def entries(self) -> Sequence[Entry]:
        found = {entry.name: entry for entry in await asyncio.to_thread(self._local_entries)}
        if self.host is not None:
            found |= {entry.name: entry for entry in await self.host.entries()}
        # What a server was named for is that server's: a store entry of the same name is another model's.
        found |= {
            plan.name: Entry(name=plan.name, source=plan.source, backend=plan.backend, managed=False)
            for plan in self._plans.values()
            if payload_of(plan).served.addresses[0].scheme in OFFERING_SCHEMES
        }
        return list(found.values())

    def _plan(self, name: str, payload: Payload, options: LoadOptions) -> Plan:
        served = payload.served
        table = self._opening.table(name)
        settings = self.loaded.for_model(name)
        scheme = served.addresses[0].scheme
        backend = scheme
        if scheme in LOCAL_SCHEMES:
            backend = options.backend or self._backend(settings)
        elif scheme in TRITON_SCHEMES:
            backend = "triton"
        elif scheme in OPENAI_SCHEMES:
            backend = "openai"
        elif scheme in TEI_SCHEMES:
            backend = "tei"
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
            max_streams=settings.max_streams,
            max_queued_streams=settings.max_queued_streams,
            options=options,
            payload=payload,
        )

    def _payload(self, name: str) -> Payload:
        """What a client's name means. Raises AddressError and InvalidValue."""
        meant = self.loaded.meant(name)
        if meant != name:
            return Payload(_of_open_clip(parse_served(meant)))
        if name in DEFAULT_ALIASES:
            name = DEFAULT_MODEL
        if name.startswith(HUB):
            name = f"hf:{name.removeprefix(HUB)}"
        if ":" not in name:
            check_name(name.partition("@")[0])
        address = parse_address(name)
        if address.scheme not in NAMED_SCHEMES:
            raise InvalidValue(
                f"{address.scheme}: addresses are named at the start alone, as `shoal serve {name}`", param="model"
            )
        served = Served(name=check_name(address.id), addresses=(address,))
        return Payload(_of_open_clip(served), bare=":" not in name)

    def _backend(self, settings: Settings) -> str:
        if settings.backend != "auto":
            return settings.backend
        return "triton" if self.host is not None else "local"

    async def _without_files(self, plan: Plan) -> bool:
        """Whether a load needs no files here. A server that is away has nothing to offer, as far as is known."""
        if plan.backend != "triton" or self.host is None:
            return False
        try:
            return await self._opening.in_triton(plan, self.host)
        except (TransportFailed, DeadlineExceeded):
            return False

    async def _unload(self, plan: Plan, runner: Runner) -> None:
        from shoal.triton.targets import OnTriton

        assert isinstance(runner, OnTriton)
        await runner.unload(self.loaded.settings.load_timeout_s)
        if self.host is not None:
            self.host.forget(plan.name)

    def _local_entries(self) -> list[Entry]:
        return [
            Entry(
                name=one.manifest.id,
                source=one.manifest.address,
                backend="local",
                size=one.manifest.size,
                created=one.manifest.created,
            )
            for one in self._opening.store.entries()
        ]


def _of_open_clip(served: Served) -> Served:
    """A pair of open_clip's names is the repository that holds it, and keeps its name."""
    return structs.replace(served, addresses=tuple(map(held_by, served.addresses)))
