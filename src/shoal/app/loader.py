"""How names and addresses become runners: the loader behind the lifecycle. Part of the composition root.

A name that a client gives means, in this order: a model that was named before, a table of `shoal.toml` with `backends`,
the default model by one of its aliases, a model that Triton's repository or the store has, a pair of open_clip's names,
a repository of the hub.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from shoal.app.resources import ModelResources, get_served
from shoal.backends import (
    FILE_BACKENDS,
    backend_class,
    backend_for_scheme,
    file_backend,
    load_scheme,
    parse_address,
    parse_served,
)
from shoal.core.lifecycle.lifecycle import Entry, FetchResult, LoadOptions, Plan, ProgressReporter
from shoal.core.protocols import Runner
from shoal.errors import AddressError, ConfigError, InvalidValue
from shoal.models.address import Address, ServedModel, check_name
from shoal.models.open_clip_names import HUB, resolve_pair
from shoal.models.sources.pins import DEFAULT_ALIASES, DEFAULT_MODEL, resolve_alias

CLIENT_SCHEMES = ("hf", "pypi")
"""Schemes that API clients may use; folders, other servers and scripted models are for operators only."""


class ModelLoader:
    """Loader over the store, the hub and the backends, which open runners with these resources."""

    def __init__(self, resources: ModelResources) -> None:
        self.loaded = resources.loaded
        self._resources = resources
        self._backends = resources.backends
        self._plans: dict[str, Plan] = {}

    def plan(self, served: ServedModel) -> Plan:
        """What an argument of `shoal serve` stands for. Raises AddressError and ConfigError."""
        served = _resolve_addresses(served)
        name = served.name or served.addresses[0].id
        if not name:
            model = "#MODEL" if load_scheme(served.addresses[0].scheme).needs_model else ""
            raise ConfigError(f"{served}: name the model on these servers: NAME={served.addresses[0]}{model},...")
        self._resources.serve(name)
        plan = self._plan(name, served, LoadOptions())
        if reason := self._no_files(plan):
            raise ConfigError(f"{served}: {reason}")
        if backend_class(plan.backend).remote:
            plan = replace(plan, timeout_s=0.0)  # it is served when its server comes
        self._plans[plan.name] = plan
        return plan

    def resolve(self, name: str, options: LoadOptions) -> Plan:
        if options.backend not in ("", *FILE_BACKENDS):
            known = " or ".join(FILE_BACKENDS)
            raise InvalidValue(f"unknown backend {options.backend!r}: use {known}", param="backend")
        planned = self._plans.get(name)
        try:
            served = get_served(planned) if planned is not None else self._parse(name)
            for address in served.addresses:
                backend_class(_backend_of(address)).check(address)
        except (AddressError, ConfigError) as error:
            raise InvalidValue(error.message, param="model") from None
        plan = self._plan(planned.name if planned else served.name, served, options)
        if planned is not None and plan.backend == planned.backend:
            plan = replace(plan, timeout_s=planned.timeout_s)
        if options.backend not in ("", plan.backend):
            raise InvalidValue(f"{plan.source} runs only on {plan.backend}: omit the backend", param="backend")
        if reason := self._no_files(plan):
            raise InvalidValue(reason, param="backend")
        return plan

    async def fetch(self, plan: Plan, report: ProgressReporter) -> FetchResult:
        served, target = get_served(plan), self._resources.target(plan)
        if not served.addresses[0].local or await self._backends[plan.backend].has_model(target):
            return FetchResult(changed=False)
        began = int(time.time())
        source = await self._resources.source(target)
        stored = await self._resources.prepare(target, source, report)
        return FetchResult(
            changed=stored.manifest.created >= began,
            size=await asyncio.to_thread(lambda: stored.size),  # of a graph that is used in place it asks the disk
            source=str(source) if served.name_only else "",
        )

    async def open(self, plan: Plan, report: ProgressReporter) -> Runner:
        schemes = {address.scheme for address in get_served(plan).addresses}
        if len(schemes) > 1:
            kinds = ", ".join(sorted(schemes))
            raise AddressError(f"{plan.name}: all replicas of a model must use the same backend, not {kinds}")
        runner = await self._backends[plan.backend].open(self._resources.target(plan), report)
        self._plans[plan.name] = plan
        return runner

    def check_unload(self, plan: Plan, runner: Runner) -> None:
        self._backends[plan.backend].check_unload(plan.name, runner)

    def mark_gone(self, plan: Plan, runner: Runner) -> None:
        """Take note that a model is no longer on its server; it is to be unloaded."""
        self._backends[plan.backend].mark_gone(runner)

    async def close(self, plan: Plan, runner: Runner) -> None:
        try:
            await runner.aclose()
        finally:
            self._resources.forget(plan.name)
            await self._backends[plan.backend].unload(plan.name, runner)

    async def remove(self, name: str) -> bool:
        places = reversed(self._backends.for_files(self.loaded.settings))
        return any([await place.remove(name) for place in places])

    async def list_offers(self, address: Address) -> dict[str, ServedModel | str]:
        """The models that a server has loaded, by the name to serve them under: what to serve, or why it cannot be.

        Raises TransportFailed while the server is not there, and what it says otherwise.
        """
        return await self._backends.for_address(address).offers(address)

    async def entries(self) -> Sequence[Entry]:
        found: dict[str, Entry] = {}
        for place in self._backends.for_files(self.loaded.settings):
            found |= {entry.name: entry for entry in await place.entries()}
        # What a server was named for is that server's: a store entry of the same name is another model's.
        found |= {
            plan.name: Entry(name=plan.name, source=plan.source, backend=plan.backend, managed=False)
            for plan in self._plans.values()
            if backend_class(_backend_of(get_served(plan).addresses[0])).remote
        }
        return list(found.values())

    def _plan(self, name: str, served: ServedModel, options: LoadOptions) -> Plan:
        table = self._resources.table(name)
        settings = self.loaded.for_model(name)
        backend = _backend_of(served.addresses[0])
        if served.addresses[0].local:
            chosen = settings.backend if settings.backend != "auto" else file_backend(self.loaded.settings)
            backend = options.backend or chosen
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
            resolved=not served.name_only,
            payload=served,
        )

    def _parse(self, name: str) -> ServedModel:
        """What a client's name means. Raises AddressError and InvalidValue."""
        meant = self.loaded.resolve_argument(name)
        if meant != name:
            return _resolve_addresses(parse_served(meant))
        if name.startswith(HUB):
            name = f"hf:{name.removeprefix(HUB)}"
        if ":" not in name:
            check_name(name.partition("@")[0])
        address = parse_address(name)
        if address.scheme not in CLIENT_SCHEMES:
            raise InvalidValue(
                f"{address.scheme}: only the operator may use addresses: `shoal serve {name}`, or `backends` of a "
                f"model in shoal.toml, which clients load by its name",
                param="model",
            )
        return _resolve_addresses(
            ServedModel(name=check_name(address.id), addresses=(address,), name_only="" if ":" in name else name)
        )

    def _no_files(self, plan: Plan) -> str:
        """Why a model of files cannot run where it is planned to; "" for one that can, and for others."""
        if not get_served(plan).addresses[0].local:
            return ""
        return backend_class(plan.backend).explain_no_files(self.loaded.settings)


def _backend_of(address: Address) -> str:
    name = backend_for_scheme(address.scheme)
    assert name is not None, "addresses of unknown schemes are rejected during parsing"
    return name


def _resolve_addresses(served: ServedModel) -> ServedModel:
    """With the addresses that names stand for: a pair of open_clip's names is the repository that holds it, and keeps
    its name; an alias of the default model is that model."""
    if (meant := resolve_alias(served.addresses[0])) != served.addresses[0]:
        name = meant.id if served.name == served.addresses[0].id else served.name
        return ServedModel(name=name, addresses=(meant, *served.addresses[1:]))
    return structs.replace(served, addresses=tuple(map(resolve_pair, served.addresses)))
