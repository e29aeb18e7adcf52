"""A front process: all surfaces, over the models of another process. Part of the composition root."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from shoal.app.surfaces import build_application, open_image_reader
from shoal.config import LoadedConfig
from shoal.http.hand_over import HandOver
from shoal.observability.metrics import measure_loop_lag
from shoal.server.garbage_collection import keep_frozen
from shoal.server.memory_allocation import keep_freed_memory
from shoal.surfaces import Application
from shoal.workers.forwarding import Forwarder
from shoal.workers.front import RemoteGateway


@dataclass(slots=True)
class Front:
    gateway: RemoteGateway
    asgi: Application


@asynccontextmanager
async def open_front(loaded: LoadedConfig, path: str) -> AsyncIterator[Front]:
    """Answer requests with the models of the process that listens on the Unix socket `path`."""
    keep_freed_memory()
    async with AsyncExitStack() as stack:
        gateway = RemoteGateway(path)
        connecting = asyncio.create_task(gateway.connect(), name="model process")
        stack.callback(connecting.cancel)
        await stack.enter_async_context(measure_loop_lag(gateway.record_lag))
        await stack.enter_async_context(keep_frozen(lambda: id(gateway.registry)))
        reader = await open_image_reader(stack, loaded.settings)
        application, _ = build_application(gateway, loaded.settings, _get_metrics, reader, Forwarder(gateway))
        yield Front(gateway, application)


def _get_metrics() -> bytes:
    raise HandOver
