"""A scripted loader and a gateway over it, for tests of the lifecycle of models."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from shoal.core.gateway import Gateway
from shoal.core.lifecycle.lifecycle import Entry, Event, FetchResult, Lifecycle, LoadOptions, Plan, ProgressReporter
from shoal.core.protocols import Runner
from shoal.core.registry import Registry
from shoal.errors import InvalidValue, Unavailable
from shoal.types import Embed, Embedded, TaskKind
from tests.unit.core.lanes import context
from tests.unit.core.runners import Embedder


class ClosableRunner(Embedder):
    """A runner that answers only while it is open, and counts the calls after its close."""

    def __init__(self, name: str, seconds: float, tasks: tuple[TaskKind, ...]) -> None:
        super().__init__(tasks)
        self.name = name
        self.seconds = seconds
        self.answered_closed = 0

    async def _act(self) -> None:
        self.begun += 1
        if self.closed:
            self.answered_closed += 1
        await asyncio.sleep(self.seconds)
        if self.closed:
            raise Unavailable("the runner was closed under the request")


class Loads:
    """A loader whose stages take `seconds`. `errors`: what a stage of a name raises; `log`: the calls, in order.

    A name is its source unless `sources` differs. `sizes` are the sizes; `found` maps a name to the source that a fetch
    reports.
    """

    def __init__(self) -> None:
        self.seconds = {"fetch": 1.0, "open": 1.0, "close": 1.0, "remove": 1.0}
        self.errors: dict[tuple[str, str], BaseException] = {}
        self.sources: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.found: dict[str, str] = {}
        self.on_disk: dict[str, Entry] = {}
        self.fetched: set[str] = set()
        self.log: list[tuple[str, str]] = []
        self.runners: list[ClosableRunner] = []
        self.timeout_s = 600.0
        self.resolved = True
        self.infer_s = 0.1
        self.tasks: tuple[TaskKind, ...] = ("embed", "generate")
        self.running: dict[str, str] = {}
        self.reports: dict[str, ProgressReporter] = {}

    def resolve(self, name: str, options: LoadOptions) -> Plan:
        if not name or ".." in name:
            raise InvalidValue("not a name", param="model")
        return self.plan(name.removeprefix("hf:"), backend=options.backend or "local")

    def plan(self, name: str, **fields: Any) -> Plan:
        source = self.sources.get(name, f"hf:{name}")
        fields.setdefault("backend", "local")
        return Plan(name=name, source=source, timeout_s=self.timeout_s, resolved=self.resolved, **fields)

    async def fetch(self, plan: Plan, report: ProgressReporter) -> FetchResult:
        report("downloading", 0, 100)
        await self._stage("fetch", plan.name)
        report("downloading", 100, 100)
        new = plan.name not in self.fetched
        self.fetched.add(plan.name)
        return FetchResult(changed=new, size=self.sizes.get(plan.name, 0), source=self.found.get(plan.name, ""))

    async def open(self, plan: Plan, report: ProgressReporter) -> Runner:
        self.reports[plan.name] = report
        report("opening")
        await self._stage("open", plan.name)
        self.runners.append(life := ClosableRunner(plan.name, self.infer_s, self.tasks))
        return life

    def check_unload(self, plan: Plan, runner: Runner) -> None: ...

    async def close(self, plan: Plan, runner: Runner) -> None:
        try:
            await self._stage("close", plan.name)
        finally:
            await runner.aclose()

    async def remove(self, name: str) -> bool:
        await self._stage("remove", name)
        self.on_disk.pop(name, None)
        there = name in self.fetched
        self.fetched.discard(name)
        return there

    async def entries(self) -> Sequence[Entry]:
        return [*self.on_disk.values()]

    async def _stage(self, stage: str, name: str) -> None:
        assert name not in self.running, f"{stage} of {name} beside {self.running[name]}"
        self.running[name] = stage
        self.log.append((stage, name))
        try:
            await asyncio.sleep(self.seconds[stage])
            if (stage, name) in self.errors:
                raise self.errors[stage, name]
        finally:
            del self.running[name]


class Stack:
    """A gateway, its lifecycle and the scripted loader, on the event loop's clock."""

    def __init__(self, **options: Any) -> None:
        self.loads = Loads()
        self.registry = Registry()
        clock = asyncio.get_running_loop().time
        self.gateway = Gateway(self.registry, clock=clock)
        self.lifecycle = self.gateway.lifecycle = Lifecycle(self.registry, self.loads, clock=clock, **options)

    def state(self, name: str) -> str:
        model = self.registry.get(name)
        return model.card().state if model is not None else "gone"

    def states(self, *names: str) -> list[str]:
        return [self.state(name) for name in names]

    async def loaded(self, *names: str) -> None:
        for name in names:
            await self.lifecycle.load(name).wait()

    async def ask(self, name: str, seconds: float = 30.0) -> Embedded:
        return await self.gateway.run(Embed(model=name, inputs=["x"]), context(seconds))

    def idle(self) -> bool:
        return not list(self.lifecycle._queue)


async def read(stack: Stack, into: list[Event]) -> None:
    """Collect all events until the lifecycle is closed."""
    into.extend([event async for event in stack.lifecycle.events()])
