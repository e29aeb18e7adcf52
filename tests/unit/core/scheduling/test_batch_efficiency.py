"""Batches of four engines as they were measured, on a virtual clock: the rate under backlog, a lone client, bulk."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import count
from random import Random
from typing import Any

import msgspec
import pytest

from shoal.backends.fake.model import FakeEngine, FakeScript
from shoal.backends.local.shapes import fit_cost
from shoal.core.protocols import CostModel, Tensors
from shoal.core.scheduling.lane import Lane
from shoal.types import Array
from tests.unit.core.conftest import START, run_virtual
from tests.unit.core.lanes import context, embed, engine, make_lane

MAX_BATCH_SIZE = 64
CURVES: dict[str, dict[int, float]] = {
    "MiniLM": {
        16: 7.5, 32: 11.0, 48: 13.1, 64: 16.2, 96: 23.0, 128: 28.9, 192: 42.1, 256: 54.4, 512: 111.7, 1024: 225.0
    },
    "BERT-base": {16: 32.7, 32: 57.5, 48: 83.6, 64: 110.2, 96: 163.9, 128: 213.2, 256: 422.7, 512: 842.9, 1024: 1678.3},
    "BERT-large": {16: 121.8, 32: 220.2, 48: 311.0, 64: 414.1, 96: 611.5, 128: 784.9, 256: 1581.6},
    "GPU": {1: 3.0, 4096: 3.0, 8192: 6.0, 16384: 12.0},
}  # fmt: skip
"""Milliseconds by padded tokens. The first three: OpenVINO in f32, one of two streams, on two cores of an EPYC 9004
without AMX. The last one: as long for any batch that does not fill it."""


def measured(curve: dict[int, float], tokens: int) -> float:
    """Seconds of a batch: between two points on a line, and beyond the last one in proportion."""
    sizes = sorted(curve)
    place = bisect_left(sizes, tokens)
    if place == len(sizes):
        return curve[sizes[-1]] / 1e3 * tokens / sizes[-1]
    if place == 0:
        return curve[sizes[0]] / 1e3
    low, high = sizes[place - 1], sizes[place]
    return (curve[low] + (curve[high] - curve[low]) * (tokens - low) / (high - low)) / 1e3


class Measured(FakeEngine):
    """Takes as long as `curve` says, and up to a twentieth more or less."""

    curve: dict[int, float]
    random: Random

    async def infer(
        self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        await asyncio.sleep(measured(self.curve, inputs["ids"].size) * self.random.uniform(0.95, 1.05))
        return await super().infer(inputs, outputs, params, deadline)


def open_lane(name: str, *, guessed: bool = False) -> Lane:
    """A lane with the cost model of a warm-up, or with one that is `guessed`: the default."""
    kind = type(name, (Measured,), {"curve": CURVES[name], "random": Random(3)})
    lane = make_lane(
        FakeScript(slots=1 if name == "GPU" else 2, max_batch_size=MAX_BATCH_SIZE), engine=kind, max_queue_s=0.0
    )
    probes = [(size * length, measured(CURVES[name], size * length)) for size in (1, 4, 16) for length in (8, 32, 128)]
    cost = CostModel() if guessed else fit_cost(probes)
    engine(lane).facts = msgspec.structs.replace(engine(lane).facts, cost=cost)
    return lane


_numbers = count()


def text_of(tokens: int) -> str:
    """A text of so many tokens that no other test sends. Only its first word is new, which costs less."""
    return f"w{next(_numbers):06}" + " w000000" * (tokens - 1)


def best_rate(name: str, length: int) -> float:
    """Texts a second of the engine at its best batch size, all slots busy."""
    slots = 1 if name == "GPU" else 2
    return max(slots * size / measured(CURVES[name], size * length) for size in range(1, MAX_BATCH_SIZE + 1))


async def ask_in_turn(lane: Lane, length: int, done: list[float], ends: float, seconds: float) -> None:
    """One caller; `done` gets the time of each answer until `ends`."""
    loop = asyncio.get_running_loop()
    while loop.time() < ends:
        await lane.run(embed(text_of(length)), context(seconds))
        done.append(loop.time())


@pytest.mark.parametrize(("length", "guessed"), [(16, False), (128, False), (256, False), (128, True)])
@pytest.mark.parametrize("name", CURVES)
def test_a_backlog_runs_at_the_engines_best_rate(name: str, length: int, guessed: bool) -> None:
    """At least 95 % of the texts a second that the engine's best batch size gives, once the size has been learned; a
    little less where nothing was known of the engine, because sizes are still being tried."""
    best = best_rate(name, length)
    seconds = 3000 / best

    async def main() -> list[float]:
        lane, done = open_lane(name, guessed=guessed), list[float]()
        ends = asyncio.get_running_loop().time() + seconds
        await asyncio.gather(*(ask_in_turn(lane, length, done, ends, 100 * seconds) for _ in range(256)))
        return done

    done = run_virtual(main)
    since, until = START + seconds / 3, START + seconds
    assert sum(since < at <= until for at in done) / (until - since) >= (0.93 if guessed else 0.95) * best


@pytest.mark.parametrize("length", [16, 128, 256])
@pytest.mark.parametrize("name", CURVES)
def test_a_lone_client_waits_for_its_own_text_only(name: str, length: int) -> None:
    """After a backlog too, each of its texts is a batch of its own, and starts at once."""
    alone = measured(CURVES[name], length)

    async def main() -> list[float]:
        lane, done = open_lane(name), list[float]()
        loop = asyncio.get_running_loop()
        ends = loop.time() + 20 * alone
        await asyncio.gather(*(ask_in_turn(lane, length, [], ends, 1e4) for _ in range(128)))
        for _ in range(20):
            began = loop.time()
            await lane.run(embed(text_of(length)), context(60.0))
            done.append(loop.time() - began)
        assert list(engine(lane).batches)[-20:] == [(1, length)] * 20
        return done

    assert max(run_virtual(main)) <= 1.05 * alone + 1e-6


@pytest.mark.parametrize("length", [16, 128])
@pytest.mark.parametrize("name", CURVES)
def test_a_bulk_job_delays_single_texts_by_short_batches_only(name: str, length: int) -> None:
    """Beside a job, a short text waits for what is left of one batch of `max_batch_ms`, or of one text if that takes
    longer, however long the job's batches are when it is alone."""
    single_s, text_s = (measured(CURVES[name], tokens) for tokens in (16, length))

    async def job(lane: Lane, number: int) -> None:
        while True:
            await lane.run(embed(*(text_of(length) for _ in range(32))), context(1e4, "job"))

    async def main() -> list[float]:
        lane, took, random = open_lane(name), list[float](), Random(1)
        loop = asyncio.get_running_loop()
        jobs = [asyncio.create_task(job(lane, number)) for number in range(4)]

        async def single() -> None:
            began = loop.time()
            await lane.run(embed(text_of(16)), context(60.0, "single"))
            took.append(loop.time() - began)

        singles = []
        for _ in range(60):
            await asyncio.sleep(random.expovariate(0.1 / single_s))
            singles.append(asyncio.create_task(single()))
        await asyncio.gather(*singles)
        for each in jobs:
            each.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        return sorted(took)

    took = run_virtual(main)
    assert took[56] <= max(0.04, text_s) + 2 * single_s + text_s
