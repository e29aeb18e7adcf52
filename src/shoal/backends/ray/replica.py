"""The link to one replica of a deployment."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import cast

import msgspec

from shoal.backends.ray.cluster import ReplicaAddress
from shoal.core.generation.affinity import Demand, Load
from shoal.core.protocols import ModelFacts
from shoal.core.recording import current_trace, name_error, record_attempt
from shoal.types import BatchTask, Chunk, Context, Generate, Result
from shoal.workers import messages
from shoal.workers.front import ModelProcess

UNREACHABLE_S = 0.5
"""Time for which a replica that cannot be reached is not tried again."""

logger = logging.getLogger("shoal.ray")


class Replica:
    """A replica that is connected, or being connected to. `changed` is called when it can be used and when it cannot;
    `is_lost`: it will not come back. `facts`: of its one model, None until it has said them."""

    def __init__(self, address: ReplicaAddress, changed: Callable[[], None]) -> None:
        self.name = address.replica
        self.address = address
        self.facts: ModelFacts | None = None
        self.is_lost = False
        self._usable = False
        self._requests = self._tokens = self._last_pick = 0
        self._changed = changed
        self._process = ModelProcess(
            (address.host, address.port),
            token=address.token,
            name=f"the replica {address.replica}",
            follows=True,
        )
        self._process.when_changed(self._mirror)
        self._task = asyncio.create_task(self._run(), name=f"replica {address.replica}")

    @property
    def is_usable(self) -> bool:
        return self._usable and not self._process.is_leaving and self._process.is_responsive()

    @property
    def is_leaving(self) -> bool:
        return self._process.is_leaving

    @property
    def load(self) -> Load:
        return Load(self._requests, self._tokens, self._last_pick)

    async def run(self, task: BatchTask, ctx: Context, demand: Demand, pick: int) -> Result:
        """Run a task. Raises Crashed if the replica is lost before its answer."""
        with self._attempt(demand, pick):
            message = messages.Run(self._process.new_number(), task, _to_far(ctx))
            return cast(Result, await self._process.call(message, ctx.deadline))

    async def stream(self, task: Generate, ctx: Context, demand: Demand, pick: int) -> AsyncGenerator[Chunk]:
        """Generate. Raises as `run`."""
        with self._attempt(demand, pick):
            async with aclosing(self._process.stream(task, _to_far(ctx), ctx.deadline)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @contextmanager
    def _attempt(self, demand: Demand, pick: int) -> Iterator[None]:
        """Count a request while it is at the replica, and note it for `shoal explain` and traces."""
        started, failed = time.monotonic(), ""
        self._requests += 1
        self._tokens += demand.tokens
        self._last_pick = pick
        try:
            yield
        except BaseException as error:
            failed = name_error(error)
            raise
        finally:
            self._requests -= 1
            self._tokens -= demand.tokens
            record_attempt(self.name, started, time.monotonic(), failed)

    async def _run(self) -> None:
        try:
            try:
                await self._process.run_once()
            except OSError as error:
                logger.info("%s cannot be reached at %s:%d: %s", self.name, self.address.host, self.address.port, error)
            if self.facts is None:
                await asyncio.sleep(UNREACHABLE_S)
        finally:
            self.is_lost = True
            self._changed()

    def _mirror(self, state: messages.Models | None) -> None:
        model = state.models[0] if state is not None and state.models else None
        self._usable = model is not None and model.usable
        if model is not None:
            self.facts = model.facts or self.facts
        self._changed()


def _to_far(ctx: Context) -> Context:
    """Return the context for another machine, whose clock is not this one's: `deadline` is the time that is left. Its
    `trace` is that of the task in this process, of which the replica's is a part."""
    return msgspec.structs.replace(ctx, deadline=ctx.remaining(), trace=current_trace())
