"""The composition root: the one module that knows concrete classes. An exit stack owns everything it starts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from shoal.config import Loaded
from shoal.core.batched import BatchedRunner
from shoal.core.batcher import Lane, LaneOptions
from shoal.core.gateway import Gateway
from shoal.core.planner import Limits
from shoal.core.protocols import Engine, ModelFacts, Pipeline, Runner
from shoal.core.registry import Model, Registry
from shoal.core.routing import ByTask
from shoal.core.threads import Threads
from shoal.errors import AddressError, ConfigError, InternalError, SetupError, ShoalError
from shoal.models.address import LOCAL_SCHEMES, Address, Served, parse_served
from shoal.models.progress import Progress
from shoal.models.sources.pins import DEFAULT_ALIASES, DEFAULT_MODEL
from shoal.observability.metrics import LoopLag, PrometheusObserver
from shoal.settings import Settings
from shoal.surfaces import SURFACES, Front, Options, build_app
from shoal.surfaces.openapi import OpenApi
from shoal.web import Pages

logger = logging.getLogger("shoal")

SERVED_SCHEMES = (*LOCAL_SCHEMES, "fake")
"""Kinds of addresses that have a backend in this version; the grammar knows more."""

PREPARE_THREADS = 2
"""Tokenising jobs side by side: two keep one going while the other's result is handed out; more would take the
processors that the engine needs."""


@dataclass(slots=True)
class App:
    """A running Shoal: `asgi` answers from the start, models come up behind it."""

    gateway: Gateway
    asgi: Front
    loading: Sequence[asyncio.Task[None]]

    async def wait_loaded(self) -> None:
        """Return when every model is ready or has failed; never raises for a model's sake."""
        await asyncio.gather(*self.loading)


@asynccontextmanager
async def open_app(loaded: Loaded, served: Sequence[str], progress: Progress | None = None) -> AsyncIterator[App]:
    """Start serving these addresses (none: the default model); on leaving, everything is closed.

    `progress` sees downloads and conversions, from threads.
    Raises AddressError and ConfigError for what can be seen without loading a model.
    """
    registry, observer = Registry(), PrometheusObserver()
    gateway = Gateway(registry, observer)
    async with AsyncExitStack() as stack:
        threads = Threads("prepare", PREPARE_THREADS)
        stack.callback(threads.close)
        composer = _Composer(loaded, observer, threads, progress)
        plans = [parse_served(text) for text in served or (DEFAULT_MODEL,)]
        models = [_register(registry, loaded, plan) for plan in plans]
        tasks = [
            asyncio.create_task(_load(model, composer, plan), name=f"load {model.name}")
            for model, plan in zip(models, plans, strict=True)
        ]
        stack.push_async_callback(_close, registry, tasks)
        observer.attach(lambda: _states(registry), composer.queues)
        await stack.enter_async_context(LoopLag(observer.lagged))
        options = Options.of(loaded.settings, observer.render)
        surfaces = [make(options) for make in SURFACES]
        front = build_app(gateway, [*surfaces, OpenApi(surfaces), Pages()], options)
        yield App(gateway, front, tasks)


def _register(registry: Registry, loaded: Loaded, served: Served) -> Model:
    for address in served.addresses:
        if address.scheme not in SERVED_SCHEMES:
            known = ", ".join(f"{scheme}:" for scheme in SERVED_SCHEMES)
            raise ConfigError(
                f"{address}: this version has no backend for {address.scheme}: addresses; it serves {known}"
            )
    name = served.name or served.addresses[0].id
    table = loaded.models.get(name)
    aliases = set(table.aliases if table else ())
    if [str(address) for address in served.addresses] == [DEFAULT_MODEL] and name == served.addresses[0].id:
        aliases.update(DEFAULT_ALIASES)
    model = Model(name, tuple(sorted(aliases)), table.default_for if table else ())
    registry.add(model)
    return model


async def _load(model: Model, composer: _Composer, served: Served) -> None:
    """Bring one model up; whatever goes wrong becomes the model's state, never an exception of the server."""
    try:
        async with asyncio.timeout(composer.loaded.for_model(model.name).load_timeout_s):
            model.loaded(await composer.open(model.name, served))
        logger.info("%s is ready", model.name)
    except TimeoutError:
        model.failed(SetupError("loading took longer than load_timeout_s: give it more time, or `shoal pull` it first"))
    except ShoalError as error:
        model.failed(error)
    except Exception as error:  # a fault of one model's files or libraries must not take the others down
        logger.exception("loading %s failed in an unforeseen way", model.name)
        model.failed(InternalError(f"loading failed: {error!r}"))


async def _close(registry: Registry, tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with AsyncExitStack() as stack:  # one that fails to close must not keep the others open
        for model in registry:
            if model.runner is not None:
                stack.push_async_callback(model.runner.aclose)


def _states(registry: Registry) -> list[tuple[str, str]]:
    return [(model.name, model.state) for model in registry]


class _Composer:
    """Turns addresses into runners."""

    def __init__(
        self, loaded: Loaded, observer: PrometheusObserver, threads: Threads, progress: Progress | None
    ) -> None:
        self.loaded = loaded
        self._progress = progress
        self._observer = observer
        self._threads = threads
        self._lanes: list[Lane] = []

    def queues(self) -> list[tuple[str, int, int]]:
        """(model, items, tokens) that wait now, for the metrics."""
        return [(lane.options.model, *lane.queued) for lane in self._lanes]

    async def open(self, name: str, served: Served) -> Runner:
        """A runner for a name and its replicas. Raises SetupError."""
        schemes = {address.scheme for address in served.addresses}
        if len(schemes) > 1:
            raise AddressError(
                f"{name}: the replicas of one model must be of one kind, not {', '.join(sorted(schemes))}"
            )
        scheme = schemes.pop()
        settings = self.loaded.for_model(name)
        if scheme == "fake":
            return self._open_fake(name, settings, served.addresses)
        return await self._open_local(name, settings, served.addresses)

    def _open_fake(self, name: str, settings: Settings, addresses: Sequence[Address]) -> Runner:
        from shoal.backends.fake import FakeEngine, FakePipeline, FakeScript, FakeTalker

        scripts = [FakeScript.parse(dict(address.options)) for address in addresses]
        engines = [FakeEngine(script, f"fake-{number}") for number, script in enumerate(scripts)]
        facts = ModelFacts(
            source="fake", backend="fake", tasks=("embed",), dimension=scripts[0].dimension, max_input_tokens=512
        )
        lane = self._lane(name, settings, FakePipeline(scripts[0]), engines, facts)
        return ByTask([BatchedRunner(lane, facts), FakeTalker(scripts[0])])

    async def _open_local(self, name: str, settings: Settings, addresses: Sequence[Address]) -> Runner:
        from shoal.local import open_local

        local = await open_local(name, addresses, settings, self._progress)
        lane = self._lane(name, settings, local.pipeline, local.engines, local.facts)
        return BatchedRunner(lane, local.facts, local.codec)

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
        self._lanes.append(lane)
        return lane
