"""The engine over any workers of this process: checks, slots, the wide lane, warming, facts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.backends._ports import Port, checked, example
from shoal.backends._shapes import Shape, WarmUp, is_probe
from shoal.backends._slots import Slots
from shoal.core.protocols import EngineFacts, Tensors
from shoal.errors import InputRejected, TransportFailed
from shoal.types import Array

SOLO_ITEMS = 8
"""A batch of more items than these is bulk work and never runs wide."""

QUIET_S = 0.02
"""Time without a batch after which the engine counts as idle and warms one more shape."""

WARM_DEADLINE_S = 60.0


class LocalEngine:
    """An Engine over `slots`.

    `wide`: one more worker that uses all cores for a single batch; it serves a small batch that is alone, which then
    takes about half the time on two cores. Batches that come while others run use `slots`, which compute more in all.
    `warm` says which shapes to run first (None: the engine makes no kernels). `ends` are called when it is closed.
    """

    def __init__(
        self,
        facts: EngineFacts,
        ports: Sequence[Port],
        slots: Slots,
        *,
        wide: Slots | None = None,
        warm: WarmUp | None = None,
        ends: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._facts = facts
        self._ports = tuple(ports)
        self._slots = slots
        self._wide = wide
        self._warm = warm
        self._ends = tuple(ends)
        self._calls = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._last = 0.0
        self._closed = False
        self._warming: asyncio.Task[None] | None = None

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    def ready(self) -> bool:
        return not self._closed

    async def infer(
        self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        if self._closed:
            raise TransportFailed(f"{self._facts.name} is closed; load the model again")
        feeds = checked(inputs, self._ports)
        for output in outputs:
            if output not in self._facts.outputs:
                raise InputRejected(f"the graph has no output {output!r}; it has {', '.join(self._facts.outputs)}")
        self._calls += 1
        self._unused.clear()
        try:
            slots = await self._choose(next(iter(feeds.values())).shape[0])
            return await slots.run(feeds, outputs, deadline)
        finally:
            self._calls -= 1
            self._last = time.monotonic()
            if not self._calls:
                self._unused.set()

    async def _choose(self, size: int) -> Slots:
        if self._wide is None or size > SOLO_ITEMS or self._calls > 1:
            return self._slots
        await asyncio.sleep(0)  # batches of the same loop tick show themselves; then this one is not alone
        return self._wide if self._calls == 1 and self._wide.free else self._slots

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.wait((self._warming,))
        await self._unused.wait()
        for slots in self._lanes():
            await slots.drained()
            slots.clear()
        for end in self._ends:
            end()

    async def warm_up(self, seconds: float) -> None:
        """Run shapes for so long, then go on in the background whenever the engine is idle."""
        if self._warm is None or seconds <= 0:
            return
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not await self._warm_next(self._warm):
                return
        self._warming = asyncio.create_task(self._warm_idle(self._warm), name=f"warm-up of {self._facts.name}")

    async def _warm_idle(self, warm: WarmUp) -> None:
        more = True
        while more:
            await asyncio.sleep(QUIET_S)
            if not self._calls and time.monotonic() - self._last >= QUIET_S:
                more = await self._warm_next(warm)

    async def _warm_next(self, warm: WarmUp) -> bool:
        """Run the next shape on every worker, each lane's all at once: kernels are kept per stream."""
        shape = warm.next()
        if shape is None:
            return False
        times: list[float] = []
        for _ in range(3 if is_probe(shape) else 1):
            begin = time.perf_counter()
            if await self._run_everywhere(self._slots, shape):
                times.append(time.perf_counter() - begin)
        if self._wide is not None and shape.size <= SOLO_ITEMS:
            await self._run_everywhere(self._wide, shape)
        warm.record(shape, times)
        if warm.cost != self._facts.cost:
            self._facts = replace(self._facts, cost=warm.cost)
        return True

    async def _run_everywhere(self, slots: Slots, shape: Shape) -> bool:
        """Whether it went well; a shape that the graph refuses is simply not warm."""
        feeds = example(self._ports, shape.size, shape.length)
        deadline = time.monotonic() + WARM_DEADLINE_S
        runs = (slots.run(feeds, self._facts.outputs, deadline) for _ in range(slots.count))
        results = await asyncio.gather(*runs, return_exceptions=True)
        return not any(isinstance(result, BaseException) for result in results)

    def _lanes(self) -> tuple[Slots, ...]:
        return (self._slots,) if self._wide is None else (self._slots, self._wide)
