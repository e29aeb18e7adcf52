"""A Runner for dual encoders: a text lane and an image lane that share a vector space."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import msgspec
import numpy as np

from shoal.core.batch_facts import merge_batch_facts
from shoal.core.closing import close_all
from shoal.core.concurrency import run_concurrently
from shoal.core.input_errors import remap_input_error
from shoal.core.lane_runner import CodecMixin
from shoal.core.protocols import ModelFacts, Pipeline, ReplicaStatus, TextCodec
from shoal.core.scheduling.lane import Lane
from shoal.errors import InternalError, ShoalError, Unsupported
from shoal.types import BatchTask, Chunk, Context, Embed, Embedded, Generate, Image, Modality, Rerank, Result


class DualEncoderRunner(CodecMixin):
    """Sends each input to the lane of its modality, runs both lanes concurrently and returns the vectors in input
    order.

    Text-only options (prompts, truncation) do not apply to the images of a mixed request. `facts.modalities` are those
    of the lanes.
    """

    def __init__(self, lanes: Mapping[Modality, Lane], facts: ModelFacts, codec: TextCodec | None = None) -> None:
        super().__init__(codec)
        self.lanes = lanes
        self._facts = facts

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def text_pipeline(self) -> Pipeline | None:
        lane = self.lanes.get("text")
        return None if lane is None else lane.pipeline

    async def run(self, task: BatchTask, ctx: Context) -> Result:
        places = _group_by_modality(task)
        if len(places) == 1:
            (modality,) = places
            return await self._find_lane(modality).run(task, ctx)
        if not isinstance(task, Embed):
            raise Unsupported(
                "texts and images cannot be classified together; send them in separate requests", param="input"
            )
        return await self._run_both(task, places, ctx)

    async def _run_both(self, task: Embed, places: Mapping[Modality, list[int]], ctx: Context) -> Embedded:
        parts = {
            modality: msgspec.structs.replace(task, inputs=[task.inputs[place] for place in some], tokenized=None)
            for modality, some in places.items()
        }
        parts["image"] = msgspec.structs.replace(parts["image"], prompt_name=None, input_type=None, truncate=None)
        found = await run_concurrently(
            *(self._run_part(modality, parts[modality], places[modality], ctx) for modality in parts)
        )
        return _merge_parts(found, list(places.values()), len(task.inputs))

    async def _run_part(self, modality: Modality, part: Embed, places: Sequence[int], ctx: Context) -> Embedded:
        try:
            return await self._find_lane(modality).run(part, ctx)
        except ShoalError as error:
            raise remap_input_error(error, places) from None

    def _find_lane(self, modality: Modality) -> Lane:
        lane = self.lanes.get(modality)
        if lane is None:  # the gateway checks the facts first
            raise InternalError(f"the model does not accept {modality} inputs")
        return lane

    def stream(self, task: Generate, ctx: Context) -> AsyncGenerator[Chunk]:
        raise Unsupported(f"the model {task.model!r} embeds texts and images; it does not generate text", param="model")

    def when_broken(self, call: Callable[[ShoalError], None]) -> None:
        called = False

        def once(error: ShoalError) -> None:
            nonlocal called
            if not called:
                called = True
                call(error)

        for lane in self.lanes.values():
            lane.when_broken(once)

    def replicas(self) -> list[ReplicaStatus]:
        return [status for lane in self.lanes.values() for status in lane.status()]

    def ready(self) -> bool:
        return all(lane.ready() for lane in self.lanes.values())

    async def aclose(self) -> None:
        await close_all(*(lane.aclose for lane in self.lanes.values()))


def _group_by_modality(task: BatchTask) -> dict[Modality, list[int]]:
    """Return the positions of the inputs of each modality that is present."""
    if isinstance(task, Rerank):
        return {"text": []}
    places: dict[Modality, list[int]] = {"text": [], "image": []}
    for place, item in enumerate(task.inputs):
        places["image" if isinstance(item, Image) else "text"].append(place)
    return {modality: some for modality, some in places.items() if some}


def _merge_parts(parts: Sequence[Embedded], places: Sequence[Sequence[int]], count: int) -> Embedded:
    vectors = np.empty((count, parts[0].vectors.shape[1]), dtype=np.float32)
    tokens = [0] * count
    for part, some in zip(parts, places, strict=True):
        vectors[some] = part.vectors
        for place, number in zip(some, part.tokens, strict=True):
            tokens[place] = number
    return Embedded(
        vectors=vectors,
        tokens=tokens,
        truncated=sum(part.truncated for part in parts),
        facts=merge_batch_facts([part.facts for part in parts], max),
        space=parts[0].space,
    )
