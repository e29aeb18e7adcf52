"""Two classes of traffic on one lane, on a virtual clock: latency of interactive callers and throughput of bulk
callers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from shoal.core.scheduling.lane import Lane
from shoal.errors import Overloaded
from shoal.types import Embed, TextItem
from tests.unit.core.lanes import context

BULK_INPUTS = 2048

_numbers = count(1)


def texts(number: int, length: int) -> list[TextItem]:
    """This many distinct inputs of this length: none are coalesced."""
    return [[next(_numbers)] * length for _ in range(number)]


@dataclass(slots=True)
class TrafficResult:
    """The result of a run of traffic. `refused` counts rejected interactive requests."""

    seconds: float
    waits: list[float] = field(default_factory=list)
    refused: int = 0
    bulk_items: int = 0

    @property
    def p99_ms(self) -> float:
        return sorted(self.waits)[int(len(self.waits) * 0.99)] * 1000

    @property
    def bulk_rate(self) -> float:
        return self.bulk_items / self.seconds


class Load:
    """Traffic for a lane, to run concurrently for `seconds` of its clock; input lengths vary."""

    def __init__(self, lane: Lane, seconds: float, lengths: Sequence[int] = (16,)) -> None:
        self.lane = lane
        self.seen = TrafficResult(seconds)
        self._lengths = lengths
        self._arrivals = random.Random(7)  # its own generator: single texts must not depend on the bulk callers' draws
        self._inputs = random.Random(8)
        random.seed(9)  # the jitter of `retry_after`
        self._work: list[Coroutine[Any, Any, None]] = []

    def interactive(self, rate: float, client: str = "people") -> Load:
        """Single texts at random times, `rate` per second, whether or not earlier ones are answered."""
        self._work.append(self._people(rate, client))
        return self

    def bulk(self, clients: Sequence[str]) -> Load:
        """One caller per name, each sending 2,048 inputs as soon as its last request is answered."""
        self._work.extend(self._batcher(client) for client in clients)
        return self

    async def run(self) -> TrafficResult:
        tasks = [asyncio.create_task(work) for work in self._work]
        await asyncio.sleep(self.seen.seconds)
        parts = [pending for pending in self.lane._requests if pending.traffic == "bulk"]
        self.seen.bulk_items += sum(BULK_INPUTS - pending.unfinished for pending in parts)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.lane.aclose()
        return self.seen

    def _one(self, source: random.Random) -> TextItem:
        return texts(1, source.choice(self._lengths))[0]

    async def _people(self, rate: float, client: str) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._arrivals.expovariate(rate))
                group.create_task(self._person(client, self._one(self._arrivals)))

    async def _person(self, client: str, text: TextItem) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            await self.lane.run(Embed(model="m", inputs=[text]), context(client=client))
        except Overloaded:
            self.seen.refused += 1
        else:
            self.seen.waits.append(loop.time() - begun)

    async def _batcher(self, client: str) -> None:
        while True:
            inputs = [self._one(self._inputs) for _ in range(BULK_INPUTS)]
            try:
                await self.lane.run(Embed(model="m", inputs=inputs), context(1e6, client=client))
            except Overloaded as error:
                await asyncio.sleep(error.retry_after or 1.0)
            else:
                self.seen.bulk_items += BULK_INPUTS
