"""A front process: all surfaces, over the models of another process and of other servers. Part of the composition
root."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from shoal.app.front_tokenizers import FrontTokenizers
from shoal.app.loader import ModelLoader
from shoal.app.remote_models import FrontConfig, OpenedModels
from shoal.app.request_log import open_log
from shoal.app.resources import ModelResources, RunningLanes
from shoal.app.surfaces import build_application, open_image_reader
from shoal.app.threads import PREPARE_THREADS, open_threads
from shoal.cache import RowCaches
from shoal.config import LoadedConfig
from shoal.core.recording import Tracer
from shoal.http.hand_over import HandOver
from shoal.observability.loop_lag import measure_loop_lag
from shoal.server.garbage_collection import keep_frozen
from shoal.server.memory_allocation import keep_freed_memory
from shoal.surfaces import Application
from shoal.workers.forwarding import Forwarder
from shoal.workers.front import ModelProcess, RemoteGateway, Reporter


@dataclass(slots=True)
class Front:
    gateway: RemoteGateway
    asgi: Application


@asynccontextmanager
async def open_front(loaded: LoadedConfig, path: str, fronts: int) -> AsyncIterator[Front]:
    """Answer requests with the models of the process that listens on the Unix socket `path`, as one of `fronts`."""
    keep_freed_memory()
    settings = loaded.settings
    async with AsyncExitStack() as stack:
        log = await open_log(stack, settings)
        process = ModelProcess(path, look_up=log.look_up if log is not None else None)
        reporter = Reporter(process.notify)
        tokenizers = FrontTokenizers(open_threads(stack, "tokenize", 1))
        stack.push_async_callback(tokenizers.aclose)
        gateway = RemoteGateway(
            process,
            reporter,
            first_token_timeout_s=settings.first_token_timeout_s,
            token_timeout_s=settings.token_timeout_s,
            threads=open_threads(stack, "compare", 1),
            log=log,
            tokenizers=tokenizers,
        )
        tracer = log.tracer if log is not None else None
        opened = OpenedModels(_build_loader(stack, loaded, reporter, fronts, tracer), fronts, gateway.refresh)
        stack.push_async_callback(opened.aclose)
        connecting = asyncio.create_task(gateway.connect(opened), name="model process")
        stack.callback(connecting.cancel)
        reporting = asyncio.create_task(opened.report_replicas(process.notify), name="replicas")
        stack.callback(reporting.cancel)
        await stack.enter_async_context(measure_loop_lag(gateway.record_lag))
        await stack.enter_async_context(keep_frozen(lambda: id(gateway.registry)))
        reader = await open_image_reader(stack, settings)
        application, _ = build_application(gateway, settings, _get_metrics, reader, Forwarder(gateway), log=log)
        yield Front(gateway, application)


def _build_loader(
    stack: AsyncExitStack, loaded: LoadedConfig, reporter: Reporter, fronts: int, tracer: Tracer | None
) -> ModelLoader:
    own = FrontConfig(**{each.name: getattr(loaded, each.name) for each in fields(loaded)}, fronts=fronts)
    caches = RowCaches(Path(loaded.settings.home))
    threads = open_threads(stack, "prepare", PREPARE_THREADS)
    resources = ModelResources(own, reporter, threads, caches=caches, queues=RunningLanes(), tracer=tracer)
    stack.push_async_callback(resources.backends.aclose)
    stack.push_async_callback(caches.aclose)
    return ModelLoader(resources)


def _get_metrics(names: Collection[str]) -> bytes:
    raise HandOver
