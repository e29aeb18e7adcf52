"""Two image models that share threads and a budget, as all models of a process do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from shoal.core.protocols import EngineFacts, Tensors
from shoal.core.scheduling.lane import Lane, LaneOptions
from shoal.core.threads import Threads
from shoal.pipelines.image import ImagePipeline
from shoal.pipelines.image.budget import Budget
from shoal.types import Array, Context, Embed, Image
from tests.unit.pipelines.image.image_kit import CLIP, drawn, saved

SPEC = msgspec.structs.replace(CLIP, size=(64, 64), crop=(64, 64), edge=64)
KEPT = 2 * 4 * 3 * 64 * 64


class Gated:
    """An engine that returns results once `gate` is open."""

    def __init__(self, *, hangs: bool) -> None:
        self.facts = EngineFacts(name="gated", inputs=("pixel_values",), outputs=("image_embeds",), max_batch_size=4)
        self.begun, self.gate = asyncio.Event(), asyncio.Event()
        if not hangs:
            self.gate.set()

    async def infer(
        self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        self.begun.set()
        async with asyncio.timeout(deadline - time.monotonic()):
            await self.gate.wait()
        return {"image_embeds": np.ones((len(inputs["pixel_values"]), SPEC.dimension), dtype=np.float32)}

    def ready(self) -> bool:
        return True

    async def aclose(self) -> None:
        pass


def embed_task(count: int, start: int = 0) -> Embed:
    """Small images, all different."""
    shades = [saved(drawn(8, 8, start + number), "PNG") for number in range(count)]
    return Embed(model="m", inputs=[Image(data) for data in shades])


def lane(budget: Budget, threads: Threads, engine: Gated) -> Lane:
    return Lane(ImagePipeline(SPEC, budget=budget), [engine], LaneOptions(model="m"), threads=threads)


async def test_an_engine_that_hangs_leaves_room_to_the_models_beside_it() -> None:
    """While 200 images wait for one model and the budget holds a fifth of them, another model keeps working. When the
    engine continues, all images are processed and all memory is returned."""
    budget, threads = Budget(40 * KEPT), Threads("images", 2)
    stuck, well = Gated(hangs=True), Gated(hangs=False)
    first, second = lane(budget, threads, stuck), lane(budget, threads, well)
    patient = Context(id="a", deadline=time.monotonic() + 60, client="a")
    waiting = asyncio.create_task(first.run(embed_task(200), patient))
    late = asyncio.create_task(first.run(embed_task(20, 200), msgspec.structs.replace(patient, client="b")))
    await stuck.begun.wait()
    answer = await second.run(embed_task(100, 300), Context(id="b", deadline=time.monotonic() + 30, client="b"))
    assert answer.vectors.shape == (100, SPEC.dimension)
    assert first.queue_size[0] < 20
    assert not waiting.done()
    late.cancel()
    stuck.gate.set()
    assert len((await waiting).vectors) == 200
    (outcome,) = await asyncio.gather(late, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError)
    for each in (first, second):
        await each.aclose()
    threads.close()
