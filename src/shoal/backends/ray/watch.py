"""Tells open models what Ray Serve says of their deployments."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from shoal.backends.ray.cluster import Cluster
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.backends.ray.model import RayModel

LOOK_S = 1.0
"""Between two looks while a model's replicas come and go."""
CALM_LOOK_S = 5.0
"""Between two looks else."""

logger = logging.getLogger("shoal.ray")


class StatusWatch:
    """Asks Ray Serve for its status while models are open, once for all of them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._models: list[RayModel] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, model: RayModel) -> None:
        """Tell a model until it is closed."""
        self._models.append(model)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="Ray Serve's status")

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._models:
            try:
                states = await self._cluster.states()
                self._models = [model for model in self._models if not model.is_closed]
                for model in self._models:
                    model.note_state(states.get(model.deployment))
            except ShoalError as error:  # the controller is restarting: replicas answer meanwhile
                logger.info("%s", error.message)
            except Exception:  # a bug; the next look may do better
                logger.exception("reading the status of Ray Serve failed")
            await asyncio.sleep(CALM_LOOK_S if all(model.is_calm for model in self._models) else LOOK_S)
