"""Models of other servers, which every front process opens for itself. Part of the composition root."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from shoal.app import list_replicas
from shoal.app.loader import ModelLoader
from shoal.app.resources import get_served
from shoal.backends import backend_class
from shoal.config import LoadedConfig
from shoal.config.settings import Settings
from shoal.core.lifecycle.loading import Plan
from shoal.core.protocols import Runner
from shoal.core.registry import Model
from shoal.errors import ShoalError
from shoal.workers import messages
from shoal.workers.front import to_model
from shoal.workers.messages import ModelState

RETRY_S = 5.0
"""Between two attempts to open a model; meanwhile its requests take the way through the model process."""
CLOSE_POLL_S = 0.05
REPORT_S = 1.0

logger = logging.getLogger("shoal.workers")


def describe_remote(model: Model) -> bytes:
    """Return how a front opens a model of another server; b"" for models that run in Shoal's own processes.

    It changes each time the model is loaded.
    """
    plan = model.plan
    if plan is None or model.runner is None or get_served(plan).addresses[0].local:
        return b""
    return pickle.dumps((plan, id(model.runner))) if backend_class(plan.backend).remote else b""


@dataclass(frozen=True, slots=True)
class FrontConfig(LoadedConfig):
    """The configuration of one of `fronts` fronts, which has its part of what is limited for each model."""

    fronts: int = 1

    def for_model(self, name: str) -> Settings:
        settings = LoadedConfig.for_model(self, name)
        return msgspec.structs.replace(
            settings,
            max_queue_items=_share(settings.max_queue_items, self.fronts),
            cache_mb=settings.cache_mb // self.fronts,
            cache_disk_mb=0,  # its files belong to one process
        )


class OpenedModels:
    """The models that are open in this front (see workers.front.RemoteModels). It calls `changed` when there is one
    more."""

    def __init__(self, loader: ModelLoader, fronts: int, changed: Callable[[], None]) -> None:
        self._loader = loader
        self._fronts = fronts
        self._changed = changed
        self._tasks: dict[tuple[str, bytes], asyncio.Task[None]] = {}
        self._opened: dict[str, Model] = {}

    def find(self, name: str) -> Model | None:
        return self._opened.get(name)

    async def report_replicas(self, send: Callable[[messages.Replicas], None]) -> None:
        """Send the state of all replicas every REPORT_S; never returns."""
        while True:
            await asyncio.sleep(REPORT_S)
            send(messages.Replicas(list_replicas(self._opened.values())))

    def update(self, states: Sequence[ModelState]) -> None:
        wanted = {(each.name, each.remote): each for each in states if each.remote and each.state == "ready"}
        for key in self._tasks.keys() - wanted.keys():
            self._opened.pop(key[0], None)
            self._tasks.pop(key).cancel()
        for key in wanted.keys() - self._tasks.keys():
            self._tasks[key] = asyncio.create_task(self._keep_open(wanted[key]), name=f"open {key[0]}")

    async def aclose(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_open(self, state: ModelState) -> None:
        """Open a model; when this is cancelled, close it once its requests are answered."""
        plan: Plan = pickle.loads(state.remote)[0]
        runner = await self._open(plan)
        streams = _share(plan.max_streams, self._fronts), _share(plan.max_queued_streams, self._fronts)
        own = replace(plan, max_streams=streams[0], max_queued_streams=streams[1])
        self._opened[state.name] = model = to_model(state, own, runner)
        self._changed()
        try:
            await asyncio.Event().wait()
        finally:
            while model.inflight:  # noqa: ASYNC110 - a model has one callback, and it is for going idle
                await asyncio.sleep(CLOSE_POLL_S)
            await runner.aclose()

    async def _open(self, plan: Plan) -> Runner:
        while True:
            try:
                return await self._loader.open(plan, _ignore_progress)
            except ShoalError as error:
                logger.info("%s is not open in this front process yet: %s", plan.name, error.message)
            await asyncio.sleep(RETRY_S)


def _share(limit: int, fronts: int) -> int:
    return max(1, limit // fronts)


def _ignore_progress(
    stage: str, done: float | None = None, total: float | None = None, *, fraction: float | None = None
) -> None:
    """The model process reports it."""
