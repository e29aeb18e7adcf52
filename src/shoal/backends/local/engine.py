"""The engine on top of any workers of this process: input checks, slots, the wide lane, warm-up, facts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from shoal.backends.local.lane_choice import LENGTHS, RUNS, LaneChoice
from shoal.backends.local.shapes import Shape, WarmUp, is_probe
from shoal.backends.local.slots import Slots
from shoal.backends.local.tensor_inputs import Port, check_inputs, make_example
from shoal.core.protocols import EngineFacts, Tensors
from shoal.errors import BackendError, InputRejected, ShoalError, TransportFailed
from shoal.types import Array

logger = logging.getLogger("shoal.backends")

SOLO_ITEMS = 8
"""A batch of more items is bulk work and never runs wide."""

QUIET_S = 0.02
"""Seconds without a batch after which the engine counts as idle and warms one more shape."""

WARM_DEADLINE_S = 60.0


class Lanes(NamedTuple):
    """The workers of an engine. `wide` is one more worker, which uses all cores for a single batch. It runs a small
    batch that is alone, which takes 0.6 of the time on two idle cores, where measurement confirms that. Concurrent
    batches use `slots`, which have the higher throughput."""

    slots: Slots
    wide: Slots | None = None


class LocalEngine:
    """An Engine over `lanes`, for inputs of at most `max_length` tokens.

    `warm`: which shapes to run first. `rebuild`, for engines that a failed batch may corrupt, creates new lanes;
    batches that arrive meanwhile wait for them. `end` is called after everything is closed.
    """

    def __init__(
        self,
        facts: EngineFacts,
        ports: Sequence[Port],
        lanes: Lanes,
        *,
        max_length: int,
        warm: WarmUp,
        rebuild: Callable[[], Awaitable[Lanes]] | None = None,
        end: Callable[[], None] | None = None,
    ) -> None:
        self.facts = msgspec.structs.replace(facts, cost=warm.cost)
        self._ports = tuple(ports)
        self._lanes = lanes
        self._max_length = max_length
        self._warm = warm
        self._lane_choice = LaneChoice()
        self._rebuild = rebuild
        self._on_close = end
        self._rebuild_task: asyncio.Task[None] | None = None
        self._calls = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._last_call = 0.0
        self._closed = False
        self._warm_up_task: asyncio.Task[None] | None = None

    def ready(self) -> bool:
        return not self._closed

    def _closed_error(self) -> TransportFailed:
        return TransportFailed(f"{self.facts.name} is closed; load the model again")

    async def infer(
        self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        if self._closed:
            raise self._closed_error()
        feeds = check_inputs(inputs, self._ports, self._max_length)
        for output in outputs:
            if output not in self.facts.outputs:
                raise InputRejected(f"the graph has no output {output!r}; it has {', '.join(self.facts.outputs)}")
        self._calls += 1
        self._unused.clear()
        try:
            if self._rebuild_task is not None:
                await asyncio.wait((self._rebuild_task,), timeout=deadline - time.monotonic())
                if self._closed:
                    raise self._closed_error()
            lanes = self._lanes
            try:
                if await self._is_lone(lanes, feeds):
                    return await self._run_lone(lanes, feeds, outputs, deadline)
                return await lanes.slots.run(feeds, outputs, deadline)
            except BackendError:
                self._start_rebuild(lanes)
                raise
        finally:
            self._calls -= 1
            self._last_call = time.monotonic()
            if not self._calls:
                self._unused.set()

    async def _is_lone(self, lanes: Lanes, feeds: Tensors) -> bool:
        """Return whether a batch may take either lane: it is small, and no other one runs."""
        if lanes.wide is None or self._calls > 1 or len(next(iter(feeds.values()))) > SOLO_ITEMS:
            return False
        await asyncio.sleep(0)  # let other batches of the same event loop tick start; then this one is not alone
        return self._calls == 1 and bool(lanes.wide.free)

    async def _run_lone(
        self, lanes: Lanes, feeds: Tensors, outputs: Sequence[str], deadline: float, is_wide: bool | None = None
    ) -> dict[str, Array]:
        """Run a batch on the given or the better lane, and record its time, also if other batches have joined it."""
        shape = Shape(*(*next(iter(feeds.values())).shape, 1)[:2])
        choice = self._lane_choice.find(shape.tokens)
        if is_wide is None:
            is_wide = choice.choose()
        slots = lanes.wide if is_wide else lanes.slots
        assert slots is not None
        began = time.perf_counter()
        result = await slots.run(feeds, outputs, deadline)
        seconds, cost = time.perf_counter() - began, self.facts.cost
        choice.record(is_wide, seconds / cost.seconds(cost.work(shape.tokens, shape.length)))
        return result

    def _start_rebuild(self, lanes: Lanes) -> None:
        """Replace lanes on which a batch failed, unless that is done or under way."""
        if self._rebuild is not None and lanes is self._lanes and self._rebuild_task is None and not self._closed:
            self._rebuild_task = asyncio.create_task(
                self._rebuild_lanes(self._rebuild), name=f"rebuild {self.facts.name}"
            )

    async def _rebuild_lanes(self, rebuild: Callable[[], Awaitable[Lanes]]) -> None:
        try:
            self._lanes = await rebuild()
        except ShoalError as error:
            self._closed = True  # the model cannot be loaded any more; `ready` reports it
            logger.error(
                "%s is out of service: it cannot be rebuilt after a failed batch: %s", self.facts.name, error.message
            )
        except Exception:  # the failed lanes may return wrong results, and no caller awaits this task's error
            self._closed = True
            logger.exception("%s is out of service: it cannot be rebuilt after a failed batch", self.facts.name)
        finally:
            self._rebuild_task = None

    async def aclose(self) -> None:
        self._closed = True
        if self._warm_up_task is not None:
            self._warm_up_task.cancel()
            await asyncio.wait((self._warm_up_task,))
        await self._unused.wait()
        if self._rebuild_task is not None:
            await asyncio.wait((self._rebuild_task,))
        for slots in self._lanes:
            if slots is not None:
                await slots.drain()
                slots.clear()
        end, self._on_close = self._on_close, None
        if end is not None:
            end()

    async def warm_up(self, seconds: float) -> None:
        """Run shapes for so many seconds, then continue in the background whenever the engine is idle."""
        if seconds <= 0:
            return
        end = time.monotonic() + seconds
        while time.monotonic() < end and await self._warm_next():
            pass
        self._warm_up_task = asyncio.create_task(self._measure_idle(), name=f"warm-up of {self.facts.name}")

    async def _measure_idle(self) -> None:
        """Run the remaining shapes, then compare the lanes."""
        await self._wait_idle()
        while await self._warm_next():
            await self._wait_idle()
        if self._lanes.wide is not None:
            await self._compare_lanes(self._lanes)

    async def _wait_idle(self) -> None:
        while True:
            await asyncio.sleep(QUIET_S)
            if not self._calls and time.monotonic() - self._last_call >= QUIET_S:
                return

    async def _compare_lanes(self, lanes: Lanes) -> None:
        """Run one text of each length on both lanes in turn, while nothing else runs here."""
        has_length = any(port.has_length for port in self._ports)
        for length in sorted({min(each, self._max_length) for each in LENGTHS}) if has_length else (1,):
            feeds = make_example(self._ports, 1, length)
            with suppress(BackendError):  # a shape that the graph rejects
                for is_wide in (True, False) * RUNS:
                    await self._wait_idle()
                    deadline = time.monotonic() + WARM_DEADLINE_S
                    await self._run_lone(lanes, feeds, self.facts.outputs, deadline, is_wide)

    async def _warm_next(self) -> bool:
        """Run the next shape on all workers of a lane at once, because kernels are cached per stream."""
        warm, lanes = self._warm, self._lanes
        shape = warm.next()
        if shape is None:
            return False
        times: list[float] = []
        for _ in range(3 if is_probe(shape) else 1):
            begin = time.perf_counter()
            if await self._run_everywhere(lanes.slots, shape):
                times.append(time.perf_counter() - begin)
        if lanes.wide is not None and shape.size <= SOLO_ITEMS:
            await self._run_everywhere(lanes.wide, shape)
        warm.record(shape, times)
        if warm.cost != self.facts.cost:
            self.facts = msgspec.structs.replace(self.facts, cost=warm.cost)
        return True

    async def _run_everywhere(self, slots: Slots, shape: Shape) -> bool:
        """Return whether all runs succeeded. A shape that the graph rejects simply stays cold."""
        feeds = make_example(self._ports, shape.size, shape.length)
        deadline = time.monotonic() + WARM_DEADLINE_S
        runs = (slots.run(feeds, self.facts.outputs, deadline) for _ in range(slots.count))
        results = await asyncio.gather(*runs, return_exceptions=True)
        return not any(isinstance(result, BaseException) for result in results)
