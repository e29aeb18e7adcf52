"""A server that loads and unloads models: the real Lifecycle over a scripted loader without side effects."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from shoal.core.gateway import Gateway
from shoal.core.lifecycle.lifecycle import Entry, FetchResult, Lifecycle, LoadOptions, Plan, ProgressReporter
from shoal.core.protocols import ModelFacts, Runner
from shoal.core.registry import Registry
from shoal.errors import AddressError, Forbidden, InvalidValue, ShoalError
from shoal.models.address import check_name
from shoal.surfaces import SURFACES, Options, build_app
from tests.surfaces.surface_kit import MODEL, Answer, Exchange, RecordingRunner, Server, request_scope

FOREIGN = "made-by-hand"
OTHER = "intfloat/e5-small-v2"


@dataclass
class Scripted:
    """A loader. `hold` blocks loads and downloads, `error` makes them fail; `touched` records the calls."""

    hold: asyncio.Event | None = None
    error: ShoalError | None = None
    removal: ShoalError | None = None
    listed: list[Entry] = field(default_factory=list)
    listing_hangs: bool = False
    precision: str = ""
    fetched: set[str] = field(default_factory=set)
    touched: list[tuple[str, str]] = field(default_factory=list)
    options: list[LoadOptions] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    runners: dict[str, RecordingRunner] = field(default_factory=dict)

    def resolve(self, name: str, options: LoadOptions) -> Plan:
        address = name.removeprefix("hf:").partition("@")[0]
        served = re.sub(r":(?=[QF]\d)", "-", address)  # a quantization
        try:
            check_name(served)
        except AddressError as error:
            raise InvalidValue(error.message, param="model") from None
        return Plan(name=served, source=f"hf:{address}", backend=options.backend or "local", options=options)

    async def fetch(self, plan: Plan, report: ProgressReporter) -> FetchResult:
        report("downloading model.onnx", 30.0, 120.0)
        await self._work("fetch", plan.name)
        changed = plan.name not in self.fetched
        self.fetched.add(plan.name)
        return FetchResult(changed=changed)

    async def open(self, plan: Plan, report: ProgressReporter) -> Runner:
        report("opening", 1.0, 4.0)
        self.options.append(plan.options)
        await self._work("open", plan.name)
        self.fetched.add(plan.name)
        facts = ModelFacts(
            source=plan.source, backend="openvino", tasks=("embed",), dimension=4, precision=self.precision
        )
        self.runners[plan.name] = RecordingRunner(facts=facts)
        return self.runners[plan.name]

    def check_unload(self, plan: Plan, runner: Runner) -> None: ...

    async def close(self, plan: Plan, runner: Runner) -> None:
        self.touched.append(("close", plan.name))
        await runner.aclose()

    async def remove(self, name: str) -> bool:
        if name == FOREIGN:
            raise Forbidden(f"{name} was not made by Shoal: delete it where it was made")
        if self.removal is not None:
            raise self.removal
        self.touched.append(("remove", name))
        was_fetched = name in self.fetched
        self.fetched.discard(name)
        return was_fetched

    async def entries(self) -> Sequence[Entry]:
        if self.listing_hangs:
            await asyncio.Event().wait()
        return self.listed

    async def _work(self, what: str, name: str) -> None:
        self.touched.append((what, name))
        self.begun.set()
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            raise self.error


@dataclass
class Living:
    """A server with MODEL loaded; `touched` records later calls."""

    server: Server
    lifecycle: Lifecycle
    loader: Scripted

    async def call(self, method: str, path: str, *args: Any, **more: Any) -> Answer:
        return await self.server.call(method, path, *args, **more)

    async def manage(self, method: str, path: str, json: Any = None, **more: Any) -> Answer:
        """Send an admin request from loopback: JSON, or an empty body with the JSON content type."""
        if json is not None:
            return await self.server.call(method, path, json, **more)
        return await self.server.call(method, path, headers={"content-type": "application/json"}, **more)

    async def at(self, method: str, path: str) -> Answer:
        """Like `manage`, with the path as servers pass it: decoded and without the query."""
        headers = {"host": "localhost", "content-type": "application/json"}
        exchange = Exchange([b""])
        scope = {**request_scope(method, "/", headers), "path": path}
        await self.server.app(scope, exchange.receive, exchange.send)
        return exchange.answer()


@asynccontextmanager
async def living(loader: Scripted | None = None, *, keep_alive_s: float = 0.0, **options: Any) -> AsyncIterator[Living]:
    loader = loader or Scripted()
    hold, loader.hold = loader.hold, None
    error, loader.error = loader.error, None
    registry = Registry()
    gateway = Gateway(registry)
    gateway.lifecycle = lifecycle = Lifecycle(registry, loader, keep_alive_s=keep_alive_s)
    await lifecycle.add(loader.resolve(MODEL, LoadOptions())).wait()
    loader.hold, loader.error = hold, error
    loader.touched.clear()
    loader.options.clear()
    loader.begun.clear()
    settings = Options(**options)
    app = build_app(gateway, [make(settings) for make in SURFACES], settings)
    server = Server(app, loader.runners[MODEL], gateway, registry.find(MODEL))
    try:
        yield Living(server, lifecycle, loader)
    finally:
        if loader.hold is not None:
            loader.hold.set()
        await lifecycle.aclose()
