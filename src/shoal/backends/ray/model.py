"""A model on the replicas of a Ray Serve deployment.

Serve decides how many replicas there are and where; each batches what all fronts send it. A front is connected to all
of them. While there is none, a call of Serve's handle waits for one, by which Serve sees that one is needed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, cast

import msgspec

from shoal.backends.base.backoff import Notify
from shoal.backends.ray.cluster import Cluster, DeploymentId, DeploymentState, ReplicaAddress, is_loaded_later
from shoal.backends.ray.replica import Replica
from shoal.core.closing import close_all
from shoal.core.generation.affinity import Demand, Routing, choose, estimate_demand
from shoal.core.packed_error import PackedError
from shoal.core.protocols import ModelFacts, ReplicaStatus, Token
from shoal.core.scheduling.admission import count_items
from shoal.errors import (
    Crashed,
    ModelFailed,
    ModelNotReady,
    ShoalError,
    TransportFailed,
    Unavailable,
)
from shoal.types import BatchTask, Chunk, Context, Generate, Result

ATTEMPTS = 3
"""Replicas that a request is sent to, one after another, if each is lost before it answers."""
RETRY_S = 0.5
"""Between two failed attempts to find a replica."""
LOOK_AGAIN_S = 1.0
"""Longest time between two looks of a request that waits for a replica."""
CODEC_S = 30.0
"""Timeout of a call that tokenizes."""
ABSENT_LOOKS = 3
"""Consecutive looks at Serve's status without the deployment, after which it counts as deleted."""

logger = logging.getLogger("shoal.ray")


class RayModel:
    """A Runner. `model`: its name in the deployment. `report` sets its note, where not all is well.
    `is_gone`: its deployment was deleted by somebody else.

    All replicas in use have one vector space: while Serve replaces the replicas of one model version by those of
    another, the old ones are used to the last.
    """

    def __init__(
        self, cluster: Cluster, deployment: DeploymentId, model: str, routing: Routing, report: Notify
    ) -> None:
        self._cluster = cluster
        self.deployment = deployment
        self._model = model
        self._routing = routing
        self._report = report
        self._replicas: dict[str, Replica] = {}
        self._usable: list[Replica] = []
        self._facts: ModelFacts | None = None
        self._state: DeploymentState | None = None
        self._absent = 0
        self._changed = asyncio.Event()
        self._picks = itertools.count(1)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._broken: Callable[[ShoalError], None] | None = None
        self.is_closed = False
        self.is_gone = False

    @property
    def facts(self) -> ModelFacts:
        """The facts that its replicas state, with what Serve says in `details`."""
        assert self._facts is not None, "it is opened"
        return self._facts

    async def open(self) -> None:
        """Wait for a replica's facts, which starts one if there is none. Of a model that was loaded later, raises
        ModelFailed if Serve has given up; others are mended by deploying the application again."""
        while self._facts is None:
            if is_loaded_later(self.deployment):
                self._raise_if_failed()
            self._find_one()
            await self._wait_for_change()

    async def run(self, task: BatchTask, ctx: Context) -> Result:
        task = self._rename(task)
        demand = Demand(b"", count_items(task))
        for attempt in itertools.count(1):
            chosen = await self._choose(demand, ctx)
            try:
                return await chosen.run(task, ctx, demand, next(self._picks))
            except Crashed:
                if attempt == ATTEMPTS:
                    raise
                logger.info("%s was lost: its request goes to another replica", chosen.name)
        raise AssertionError("the loop ends by an answer or an error")

    async def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        task = self._rename(task)
        demand = estimate_demand(task, ctx, self._routing)
        for attempt in itertools.count(1):
            chosen = await self._choose(demand, ctx)
            begun = False
            try:
                async with aclosing(chosen.stream(task, ctx, demand, next(self._picks))) as chunks:
                    async for chunk in chunks:
                        begun = True
                        yield chunk
                return
            except Crashed:
                if begun or attempt == ATTEMPTS:
                    raise
                logger.info("%s was lost: its request goes to another replica", chosen.name)

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None
    ) -> list[list[Token]]:
        arguments = list(texts), add_special_tokens, prompt_name
        return cast(list[list[Token]], await self._call_codec("tokenize", *arguments))

    async def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        arguments = [list(each) for each in ids], skip_special_tokens
        return cast(list[str], await self._call_codec("decode", *arguments))

    def replicas(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(each.name, "in_service" if each in self._usable else "out_of_service", 0)
            for each in self._replicas.values()
        ]

    def when_broken(self, call: Callable[[ShoalError], None]) -> None:
        self._broken = call

    def ready(self) -> bool:
        """Whether a replica answers, or would be started for a request."""
        if any(each.is_usable for each in self._usable):
            return True
        state = self._state
        asleep = state is not None and state.status == "HEALTHY" and not state.running
        return asleep and not self._absent and not self.is_closed

    @property
    def is_calm(self) -> bool:
        """Whether its replicas are those that Serve last spoke of, and no request waits for one."""
        waits = any(not task.done() for task in self._tasks.values())
        state = self._state
        return (
            not waits
            and not self._absent
            and state is not None
            and state.status == "HEALTHY"
            and state.running == self._count_staying()
        )

    async def aclose(self) -> None:
        self.is_closed = True
        self._notify()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await close_all(*(each.aclose for each in list(self._replicas.values())))

    def note_state(self, state: DeploymentState | None) -> None:
        """Take what Serve says of the deployment; None if it does not exist."""
        if state is None:
            self._absent += 1
            if self._absent == ABSENT_LOOKS:
                self._note_deletion()
            return
        if state != self._state or self._absent:
            self._absent = 0
            self._state = state
            self._show_state()
            self._notify()
        if state.running != self._count_staying():
            self._look()

    def _count_staying(self) -> int:
        return sum(not each.is_leaving for each in self._replicas.values())

    def _note_deletion(self) -> None:
        logger.warning("the deployment %s is gone", self.deployment)
        self.is_gone = is_loaded_later(self.deployment)
        self._report("its deployment was deleted")
        self._notify()
        if self._broken is not None and self.is_gone:
            self._broken(Unavailable(f"the deployment {self.deployment} was deleted: load the model again"))

    def _show_state(self) -> None:
        state = self._state
        assert state is not None
        self._report("" if state.status == "HEALTHY" and state.running else f"its deployment is {state}")
        if self._facts is not None:
            shown = {"status": state.status, "replicas": dict(state.replicas), "message": state.message}
            details = {**self._facts.details, "ray": {"deployment": str(self.deployment), **shown}}
            self._facts = replace(self._facts, details=details)

    # Replicas

    async def _choose(self, demand: Demand, ctx: Context) -> Replica:
        """Return the replica for a request, waiting for one until the deadline."""
        usable = [each for each in self._usable if each.is_usable]
        while not usable:
            self._raise_if_failed()
            if not ctx.remaining():
                doing = f" ({self._state})" if self._state is not None else ""
                message = f"the model {self._model!r} has no replica that answers{doing}: try again soon"
                raise ModelNotReady(message, param="model", retry_after=2.0)
            self._find_one()
            await self._wait_for_change(ctx.remaining())
            usable = [each for each in self._usable if each.is_usable]
        if len(usable) == 1:
            return usable[0]
        return usable[choose([each.name for each in usable], [each.load for each in usable], demand)]

    def _raise_if_failed(self) -> None:
        state = self._state
        if self.is_closed or self._absent >= ABSENT_LOOKS:
            raise Unavailable(f"the deployment {self.deployment} is gone: deploy it again", param="model")
        if state is not None and state.failed:
            raise ModelFailed(f"Ray Serve cannot run {self.deployment}: {state}: {state.message}", param="model")

    def _find_one(self) -> None:
        """Wait for a replica in the background; the call that waits makes Serve start one."""
        self._start("wake", self._wake)

    def _look(self) -> None:
        """Ask all replicas for their addresses in the background."""
        self._start("look", self._connect_all)

    def _start(self, name: str, work: Callable[[], Any]) -> None:
        if self.is_closed or (name in self._tasks and not self._tasks[name].done()):
            return
        self._tasks[name] = asyncio.create_task(self._keep_trying(work), name=f"{name} {self.deployment}")

    async def _keep_trying(self, work: Callable[[], Any]) -> None:
        while True:
            try:
                await work()
                return
            except TransportFailed as error:
                logger.info("%s", error.message)
            except Exception:  # a bug; the next look may do better
                logger.exception("looking for the replicas of %s failed", self.deployment)
            await asyncio.sleep(RETRY_S)

    async def _wake(self) -> None:
        if any(each.is_usable for each in self._usable):
            return
        self._connect(await self._cluster.wake(self.deployment))

    async def _connect_all(self) -> None:
        for address in await self._cluster.find_replicas(self.deployment):
            self._connect(address)

    def _connect(self, address: ReplicaAddress) -> None:
        if address.replica not in self._replicas and not self.is_closed:
            self._replicas[address.replica] = Replica(address, self._note_change)

    def _note_change(self) -> None:
        """Take note that a replica came, went, or has said more."""
        for name, each in list(self._replicas.items()):
            if each.is_lost:
                del self._replicas[name]
        usable = [(each, each.facts) for each in self._replicas.values() if each.is_usable and each.facts is not None]
        spaces = {facts.space for _, facts in usable}
        if usable and (self._facts is None or self._facts.space not in spaces):
            before, self._facts = self._facts, _describe(usable[0][1], self.deployment)
            if before is not None and before.id != self._facts.id:
                logger.warning("%s is another model now: %s", self.deployment, self._facts.source)
            if self._state is not None:
                self._show_state()
        self._usable = [each for each, facts in usable if self._facts is not None and facts.space == self._facts.space]
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self, seconds: float = math.inf) -> None:
        """Return when something has changed, or after LOOK_AGAIN_S: a replica that hung goes on without a word."""
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, LOOK_AGAIN_S)):
                await self._changed.wait()

    async def _call_codec(self, method: str, *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(CODEC_S):
                try:
                    outcome = await self._cluster.call(self.deployment, method, *arguments)
                except TransportFailed:  # its replica was lost; it may be asked twice
                    outcome = await self._cluster.call(self.deployment, method, *arguments)
        except TimeoutError:
            message = f"no replica of the model {self._model!r} has answered in {CODEC_S:g} s: try again later"
            raise ModelNotReady(message, param="model", retry_after=2.0) from None
        if isinstance(outcome, PackedError):
            raise outcome.to_error()
        return outcome

    def _rename(self, task: Any) -> Any:
        """Return the task with the name that the model has in its deployment."""
        return task if task.model == self._model else msgspec.structs.replace(task, model=self._model)


def _describe(facts: ModelFacts, deployment: DeploymentId) -> ModelFacts:
    details = {**facts.details, "engine_backend": facts.backend, "ray": {"deployment": str(deployment)}}
    return replace(facts, backend="ray", details=details)
