"""The composition root: the one module that knows concrete classes. An exit stack owns everything it starts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.backends._options import usable_cores
from shoal.config import Loaded
from shoal.core.gateway import Gateway
from shoal.core.lifecycle import Job, Lifecycle
from shoal.core.protocols import Statistics
from shoal.core.registry import Registry
from shoal.core.statistics import Counts
from shoal.core.threads import Threads
from shoal.errors import ConfigError, SetupError, ShoalError
from shoal.fetching.allowed import Allowed
from shoal.fetching.fetcher import Fetcher
from shoal.garbage import settled
from shoal.loader import ModelLoader
from shoal.models.address import OFFERING_SCHEMES, TRITON_SCHEMES, Address, Served, parse_served
from shoal.models.progress import Progress
from shoal.models.sources.pins import DEFAULT_MODEL
from shoal.observability.metrics import LoopLag, PrometheusObserver
from shoal.observability.tei_metrics import TeiMetrics
from shoal.opening import Opening
from shoal.settings import Settings
from shoal.surfaces import Front, Options, Pictures, build_app, surfaces_of
from shoal.surfaces.openapi import OpenApi
from shoal.types import ModelStats
from shoal.web import Pages

if TYPE_CHECKING:
    from shoal.triton.connections import Tritons
    from shoal.triton.host import TritonHost

logger = logging.getLogger("shoal")

PREPARE_THREADS = 2
"""Tokenising jobs side by side: two keep one going while the other's result is handed out; more would take the
processors that the engine needs."""

STATISTICS_S = 5.0
"""Between two questions to backends for their statistics: Prometheus asks every 15 s or more."""

DISCOVER_S = 10.0
"""Between looks at what a Triton server offers, for addresses that name no model."""

JOINED = "is served"

ASK_AGAIN_S = 1.0
"""Between looks for a server that is not there."""


@dataclass(slots=True)
class Running:
    """The gateway, and models that come up behind it."""

    gateway: Gateway
    observer: PrometheusObserver
    loading: Sequence[Job]
    asked: Sequence[asyncio.Event]

    async def wait_loaded(self) -> None:
        """Return when every model is ready or has failed, and every server that offers models was asked for them once;
        never raises for a model's sake."""
        events = [*(job.over for job in self.loading), *self.asked]
        await asyncio.gather(*(event.wait() for event in events))


@dataclass(slots=True)
class App(Running):
    """A running Shoal: `asgi` answers from the start."""

    asgi: Front


@asynccontextmanager
async def open_app(loaded: Loaded, served: Sequence[str], progress: Progress | None = None) -> AsyncIterator[App]:
    """Start serving these addresses over HTTP. As `open_models` otherwise."""
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(open_models(loaded, served, progress))
        gateway, observer = running.gateway, running.observer
        await stack.enter_async_context(LoopLag(observer.lagged))
        await stack.enter_async_context(settled(lambda: tuple(_states(gateway.registry))))
        asking = asyncio.create_task(_ask_backends(gateway.registry, observer), name="statistics")
        stack.push_async_callback(_cancelled, asking)
        options = Options.of(loaded.settings, observer.render, await _pictures(stack, loaded.settings))
        surfaces = surfaces_of(options)
        front = build_app(gateway, [*surfaces, OpenApi(surfaces), Pages()], options)
        yield App(gateway, observer, running.loading, running.asked, front)


async def _pictures(stack: AsyncExitStack, settings: Settings) -> Pictures:
    most = settings.image_max_mb * 2**20
    fetcher = Fetcher(Allowed.parse(settings.image_hosts), max_bytes=most, seconds=settings.image_seconds)
    stack.push_async_callback(fetcher.aclose)
    return Pictures(fetcher, max_bytes=most)


@asynccontextmanager
async def open_models(
    loaded: Loaded, served: Sequence[str], progress: Progress | None = None
) -> AsyncIterator[Running]:
    """Load the models at these addresses (none: the default model, unless `default_model` is off); on leaving,
    everything is closed, and what runs on other servers is left there.

    `progress` sees downloads and conversions, from threads.
    Raises AddressError and ConfigError for what can be seen without loading a model.
    """
    settings = loaded.settings
    registry, observer = Registry(), PrometheusObserver()
    original = TeiMetrics(observer) if settings.tei_metrics else None
    counts = Counts(original or observer)
    comparing = Threads("compare", 1)
    gateway = Gateway(
        registry,
        counts,
        first_token_timeout_s=settings.first_token_timeout_s,
        token_timeout_s=settings.token_timeout_s,
        threads=comparing,
    )
    async with AsyncExitStack() as stack:
        stack.callback(comparing.close)
        threads = Threads("prepare", PREPARE_THREADS)
        stack.callback(threads.close)
        pictures = Threads("pictures", await asyncio.to_thread(usable_cores))
        stack.callback(pictures.close)
        plans = [
            parse_served(loaded.meant(text)) for text in served or ((DEFAULT_MODEL,) if settings.default_model else ())
        ]
        tritons, host = await _tritons(stack, loaded, plans, progress)
        loader = ModelLoader(
            Opening(loaded, counts, threads, pictures=pictures, tritons=tritons, host=host, progress=progress)
        )
        stack.push_async_callback(loader.caches.aclose)
        counts.caches = loader.caches.counts
        lifecycle = gateway.lifecycle = Lifecycle(
            registry,
            loader,
            max_loaded_models=settings.max_loaded_models,
            max_loaded_bytes=settings.max_loaded_bytes,
            keep_alive_s=settings.keep_alive_s,
        )
        stack.push_async_callback(lifecycle.aclose)
        jobs = [lifecycle.add(loader.plan(plan)) for plan in plans if not _offers_all(plan)]
        asked: list[asyncio.Event] = []
        for plan in plans:
            if _offers_all(plan):
                gateway.waiting[str(plan)] = "it was not asked yet"
                asked.append(asyncio.Event())
                discovering = _discover(gateway, loader, plan.addresses[0], asked[-1])
                task = asyncio.create_task(discovering, name=f"discover {plan}")
                stack.push_async_callback(_cancelled, task)
        observer.attach(lambda: _states(registry), loader.queues, loader.caches.counts)
        if original is not None:
            original.queues, observer.more = loader.queues, original.render
        yield Running(gateway, observer, jobs, asked)


async def _tritons(
    stack: AsyncExitStack, loaded: Loaded, plans: Sequence[Served], progress: Progress | None
) -> tuple[Tritons | None, TritonHost | None]:
    """What talks to Triton, where anything does: gRPC takes a fifth of a second to import, and 20 MB."""
    settings = loaded.settings
    named = any(address.scheme in TRITON_SCHEMES for plan in plans for address in plan.addresses)
    # Tables that are not served now may be loaded by name later.
    tabled = any(one.partition(":")[0] in TRITON_SCHEMES for table in loaded.models.values() for one in table.backends)
    # Below a flag it may come from a preset or a file that is meant for other days.
    if settings.triton and settings.triton_url and loaded.sources["triton_url"].layer == "flag":
        raise ConfigError("triton starts a server of Shoal's own, and triton_url names another: choose one of them")
    if not (named or tabled or settings.triton or settings.triton_url):
        return None, None
    from shoal.backends.triton import quiet

    quiet()
    from shoal.triton.connections import Tritons
    from shoal.triton.host import TritonHost

    tritons = Tritons(settings)
    stack.push_async_callback(tritons.aclose)
    return tritons, await stack.enter_async_context(TritonHost.opened(settings, tritons, progress))


def _offers_all(served: Served) -> bool:
    """An address of a server without a model: whatever it offers is served, under the names that it has there."""
    first = served.addresses[0]
    return not served.name and len(served.addresses) == 1 and first.scheme in OFFERING_SCHEMES and not first.model


async def _discover(gateway: Gateway, loader: ModelLoader, address: Address, asked: asyncio.Event) -> None:
    """Serve the models that a server has, as they come; those that went are unloaded by whoever took them away.

    Those of the first look belong to the start: readiness waits until each has come up or failed.
    """
    assert gateway.lifecycle is not None
    told: dict[str, str] = {}
    looked = False
    while True:
        joined: list[Job] = []
        gateway.registry.told.discard(str(address))
        try:
            offered = await loader.offered(address)
            told = {name: reason for name, reason in told.items() if name in offered}
            for name, found in offered.items():
                if isinstance(found, str):
                    reason = f"is not served: {found}"
                elif gateway.registry.get(name) is not None or told.get(name) == JOINED:
                    continue  # also one that is just being unloaded, and is not to come back for that
                else:
                    reason = _joined(gateway.lifecycle, loader, found, joined)
                if told.get(name) != reason:
                    told[name] = reason
                    logger.info("%s of %s %s", name, address, reason)
            if not looked and joined:
                gateway.waiting[str(address)] = "its models are loading"
                gateway.registry.told.add(str(address))
                await asyncio.gather(*(job.over.wait() for job in joined))
            gateway.waiting.pop(str(address), None)
            looked = True
        except ShoalError as error:
            gateway.waiting[str(address)] = error.message
        except Exception as error:  # a bug, or an answer that nobody foresaw; it may be gone when it is asked again
            logger.exception("asking %s for its models failed", address)
            gateway.waiting[str(address)] = f"it could not be understood: {error!r}"
        asked.set()
        await asyncio.sleep(DISCOVER_S if str(address) not in gateway.waiting else ASK_AGAIN_S)


def _joined(lifecycle: Lifecycle, loader: ModelLoader, found: Served, jobs: list[Job]) -> str:
    """Serve a model that a server offers, by a job more, and answer what became of it; one that cannot be keeps none of
    the others away."""
    try:
        jobs.append(lifecycle.add(loader.plan(found), required=False))
    except SetupError as error:
        return f"is not served: {error.message}"
    return JOINED


async def _ask_backends(registry: Registry, observer: PrometheusObserver) -> None:
    """Keep what backends say of themselves for the next scrape, which then waits for no other machine."""
    while True:
        await asyncio.sleep(STATISTICS_S)
        told: list[tuple[str, int, ModelStats]] = []
        for model in registry:
            runner: object = model.runner
            if isinstance(runner, Statistics):
                try:
                    told += [(model.name, number, stats) for number, stats in enumerate(await runner.statistics())]
                except ShoalError:  # one that cannot be asked now is asked again soon
                    continue
                except Exception:  # as in `_discover`: the others are asked all the same
                    logger.exception("asking for the statistics of %s failed", model.name)
        observer.backends = told


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _states(registry: Registry) -> list[tuple[str, str]]:
    return [(model.name, model.state) for model in registry]
