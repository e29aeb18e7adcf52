"""The composition root: the one module that knows concrete classes. An exit stack owns everything it starts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.app.discovery import Discovery, offers_all
from shoal.app.loader import ModelLoader
from shoal.app.request_log import open_log
from shoal.app.resources import ModelResources, RunningLanes
from shoal.app.surfaces import build_application, open_desk, open_image_reader, start_desk
from shoal.app.threads import PREPARE_THREADS, open_threads
from shoal.backends import BACKENDS, FILE_BACKENDS, backend_class, backend_for_scheme, parse_served
from shoal.cache import RowCaches
from shoal.config import LoadedConfig
from shoal.core.gateway import Gateway
from shoal.core.lifecycle.lifecycle import Job, Lifecycle
from shoal.core.protocols import ReplicaStatus, Replicated, Statistics
from shoal.core.recording import RequestLog
from shoal.core.registry import Model, Registry
from shoal.core.statistics import Counts
from shoal.errors import ShoalError
from shoal.machine_limits import usable_cores
from shoal.models.address import ServedModel
from shoal.models.progress import Progress
from shoal.models.sources.pins import DEFAULT_MODEL
from shoal.observability.foreign_metrics import ForeignMetrics, ProxyMetrics, TeiMetrics
from shoal.observability.loop_lag import measure_loop_lag
from shoal.observability.metrics import PrometheusObserver
from shoal.server.garbage_collection import keep_frozen
from shoal.server.memory_allocation import keep_freed_memory
from shoal.surfaces import Application, Options
from shoal.types import ModelStats

if TYPE_CHECKING:
    from grpc import GenericRpcHandler

logger = logging.getLogger("shoal")

STATISTICS_INTERVAL_S = 5.0
"""Between two questions to backends for their statistics: Prometheus asks every 15 s or more."""


@dataclass(slots=True)
class RunningModels:
    """The gateway, and models that come up behind it. `counts` is the gateway's observer, and passes on to others.
    `queues`: what waits in the models' lanes."""

    gateway: Gateway
    observer: PrometheusObserver
    counts: Counts
    loading: Sequence[Job]
    first_checks: Sequence[asyncio.Event]
    foreign: Sequence[ForeignMetrics]
    queues: RunningLanes

    def metrics(self, names: Collection[str] = ()) -> bytes:
        """Shoal's own metrics, and those by other servers' names; or only Shoal's that are named. It reads /proc: call
        it in a thread."""
        if names:
            return self.observer.render(names)
        return self.observer.render() + b"".join(each.render() for each in self.foreign)

    async def wait_until_loaded(self) -> None:
        """Return when every model is ready or has failed, and every server that offers models was asked for them once;
        never raises for a model's sake."""
        events = [*(job.done_event for job in self.loading), *self.first_checks]
        await asyncio.gather(*(event.wait() for event in events))


@dataclass(slots=True)
class App(RunningModels):
    """A running Shoal: `asgi` answers from the start. `options`: those of its surfaces. `log`: its last requests."""

    asgi: Application
    options: Options
    log: RequestLog | None

    def build_grpc_calls(self) -> GenericRpcHandler:
        """Build the calls of KServe v2 over gRPC."""
        from shoal.surfaces.kserve.grpc_calls import KServeCalls  # late: gRPC takes 0.2 s to import

        return KServeCalls(self.gateway, self.options)


@asynccontextmanager
async def open_app(
    loaded: LoadedConfig,
    served: Sequence[str],
    progress: Progress | None = None,
    other_pids: Callable[[], Iterable[int]] = tuple,
    other_replicas: Callable[[], Iterable[tuple[str, ReplicaStatus]]] = tuple,
) -> AsyncIterator[App]:
    """Start serving these addresses over HTTP. As `open_models` otherwise."""
    keep_freed_memory()
    async with AsyncExitStack() as stack:
        log = await open_log(stack, loaded.settings)
        models = open_models(loaded, served, progress, other_pids, log, other_replicas=other_replicas)
        running = await stack.enter_async_context(models)
        gateway, observer = running.gateway, running.observer
        await stack.enter_async_context(measure_loop_lag(observer.record_lag))
        await stack.enter_async_context(keep_frozen(lambda: tuple(_list_states(gateway.registry))))
        asking = asyncio.create_task(_poll_statistics(gateway.registry, observer), name="statistics")
        stack.push_async_callback(_cancel, asking)
        reader = await open_image_reader(stack, loaded.settings)
        desk = open_desk(stack, gateway, loaded.settings)
        front, options = build_application(gateway, loaded.settings, running.metrics, reader, desk=desk, log=log)
        start_desk(desk, front)
        of_models = {each.name: getattr(running, each.name) for each in fields(RunningModels)}
        yield App(**of_models, asgi=front, options=options, log=log)


@asynccontextmanager
async def open_models(
    loaded: LoadedConfig,
    served: Sequence[str],
    progress: Progress | None = None,
    other_pids: Callable[[], Iterable[int]] = tuple,
    log: RequestLog | None = None,
    *,
    other_replicas: Callable[[], Iterable[tuple[str, ReplicaStatus]]] = tuple,
) -> AsyncIterator[RunningModels]:
    """Load the models at these addresses (none: the default model, unless `default_model` is off); on leaving,
    everything is closed, and what runs on other servers is left there.

    `progress` sees downloads and conversions, from threads. `other_pids`: processes that belong to this server,
    `other_replicas`: replicas that they call. `log` records the tasks.
    Raises AddressError and ConfigError for what can be seen without loading a model.
    """
    settings = loaded.settings
    registry, queues, caches = Registry(), RunningLanes(), RowCaches(Path(settings.home))
    observer = PrometheusObserver(
        models=lambda: _list_states(registry),
        queues=queues.lengths,
        caches=caches.counts,
        replicas=lambda: [*list_replicas(registry), *other_replicas()],
        other_pids=other_pids,
    )
    foreign: list[ForeignMetrics] = [TeiMetrics(observer, queues.lengths)] if settings.tei_metrics else []
    if settings.proxy_metrics:
        foreign.append(ProxyMetrics(foreign[0] if foreign else observer, queues.lengths))
    counts = Counts(foreign[-1] if foreign else observer, caches.counts)
    async with AsyncExitStack() as stack:
        comparing = open_threads(stack, "compare", 1)
        threads = open_threads(stack, "prepare", PREPARE_THREADS)
        image_threads = open_threads(stack, "images", await asyncio.to_thread(usable_cores))
        plans = [
            parse_served(loaded.resolve_argument(text))
            for text in served or ((DEFAULT_MODEL,) if settings.default_model else ())
        ]
        resources = ModelResources(
            loaded,
            counts,
            threads,
            caches=caches,
            queues=queues,
            image_threads=image_threads,
            progress=progress,
            tracer=log.tracer if log is not None else None,
        )
        stack.push_async_callback(resources.backends.aclose)
        for name in _initial_backends(loaded, plans):
            await resources.backends[name].start()
        loader = ModelLoader(resources)
        stack.push_async_callback(caches.aclose)
        lifecycle = Lifecycle(
            registry,
            loader,
            max_loaded_models=settings.max_loaded_models,
            max_loaded_bytes=settings.max_loaded_bytes,
            keep_alive_s=settings.keep_alive_s,
        )
        gateway = Gateway(
            registry,
            counts,
            lifecycle=lifecycle,
            first_token_timeout_s=settings.first_token_timeout_s,
            token_timeout_s=settings.token_timeout_s,
            threads=comparing,
            log=log,
        )
        stack.push_async_callback(lifecycle.aclose)
        named = [loader.plan(plan) for plan in plans if not offers_all(plan)]
        for planned in named:
            if backend_class(planned.backend).remote:
                registry.awaited_servers.expect(planned.name)
        jobs = [lifecycle.add(planned) for planned in named]
        discoveries = [Discovery(plan.addresses[0], loader, lifecycle, registry) for plan in plans if offers_all(plan)]
        for plan, discovery in zip(filter(offers_all, plans), discoveries, strict=True):
            task = asyncio.create_task(discovery.run(), name=f"discover {plan}")
            stack.push_async_callback(_cancel, task)
        yield RunningModels(
            gateway, observer, counts, jobs, [discovery.first_check for discovery in discoveries], foreign, queues
        )


def _initial_backends(loaded: LoadedConfig, plans: Sequence[ServedModel]) -> list[str]:
    """The backends that are begun before any model: those of models that are served, of tables, which may be loaded by
    name later, and of the settings."""
    schemes = {address.scheme for plan in plans for address in plan.addresses}
    schemes |= {one.partition(":")[0] for table in loaded.models.values() for one in table.backends}
    named = {backend_for_scheme(scheme) for scheme in schemes}
    return [
        name
        for name in BACKENDS
        if name in named or (name in FILE_BACKENDS and not backend_class(name).explain_no_files(loaded.settings))
    ]


async def _poll_statistics(registry: Registry, observer: PrometheusObserver) -> None:
    """Keep what backends say of themselves for the next scrape, which then waits for no other machine."""
    while True:
        await asyncio.sleep(STATISTICS_INTERVAL_S)
        statistics: list[tuple[str, int, ModelStats]] = []
        for model in registry:
            runner: object = model.runner
            if isinstance(runner, Statistics):
                try:
                    statistics += [
                        (model.name, number, stats) for number, stats in enumerate(await runner.statistics())
                    ]
                except ShoalError:  # one that cannot be asked now is asked again soon
                    continue
                except Exception:  # as in `Discovery`: the others are asked all the same
                    logger.exception("reading the statistics of %s failed", model.name)
        observer.record_backends(statistics)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def list_replicas(models: Iterable[Model]) -> list[tuple[str, ReplicaStatus]]:
    """Return the replicas of these models, each with its model's name."""
    runners: list[tuple[str, object]] = [(model.name, model.runner) for model in models]
    return [(name, each) for name, runner in runners if isinstance(runner, Replicated) for each in runner.replicas()]


def _list_states(registry: Registry) -> list[tuple[str, str]]:
    return [(model.name, model.state) for model in registry]
