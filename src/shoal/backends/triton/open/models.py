"""Opens models on Triton servers: schemas, pipelines, engines, and the facts to show."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from shoal.backends.base.backoff import Notify, find_first, retry_pauses
from shoal.backends.triton.engine import Endpoint, Schema, TritonEngine
from shoal.backends.triton.llm_schema import LlmSchema
from shoal.backends.triton.open.images import ImageReader, check_pair, image_endpoint, merge_facts
from shoal.backends.triton.open.llm import MakeGenerationRunner, TritonGenerationRunner, open_llm
from shoal.backends.triton.open.probing import ProbeResult, check_agreement
from shoal.backends.triton.open.reading import TextReader
from shoal.backends.triton.open.targets import TritonMixin, TritonTarget, list_offers
from shoal.backends.triton.pixels import has_images
from shoal.backends.triton.schema import Embedder
from shoal.core.dual_encoder import DualEncoderRunner
from shoal.core.lane_runner import LaneRunner
from shoal.core.protocols import Engine, ModelFacts, Pipeline, TextCodec
from shoal.core.scheduling.lane import Lane
from shoal.errors import ConfigError, DeadlineExceeded, ModelNotFound, TransportFailed
from shoal.types import Modality

MakeLanes = Callable[[Mapping[Modality, tuple[Pipeline, Sequence[Engine]]], ModelFacts], dict[Modality, Lane]]
"""Makes the lane of each modality from its pipeline and engines."""


class TritonRunner(LaneRunner, TritonMixin):
    """A model on Triton that embeds or scores, behind a lane."""

    def __init__(self, lane: Lane, facts: ModelFacts, endpoints: Sequence[Endpoint], codec: TextCodec | None) -> None:
        LaneRunner.__init__(self, lane, facts, codec)
        TritonMixin.__init__(self, lane.options.model, endpoints)


class TritonDualEncoder(DualEncoderRunner, TritonMixin):
    """A model of texts and images on Triton: a tower and a lane for each. `endpoints`: those of both, texts first."""

    def __init__(
        self, lanes: Mapping[Modality, Lane], facts: ModelFacts, endpoints: Sequence[Endpoint], codec: TextCodec | None
    ) -> None:
        DualEncoderRunner.__init__(self, lanes, facts, codec)
        name, half = lanes["text"].options.model, len(endpoints) // 2
        names = [f"{name}/text_encoder"] * half + [f"{name}/image_encoder"] * half
        TritonMixin.__init__(self, name, endpoints, names)


AnyTritonRunner: TypeAlias = TritonRunner | TritonDualEncoder | TritonGenerationRunner


async def open_triton(
    target: TritonTarget, lanes: MakeLanes, talk: MakeGenerationRunner, note: Notify
) -> AnyTritonRunner:
    """Open a model's replicas; return once one of them can serve. The others join when they are up and agree with it.

    `lanes` makes lanes for vectors or scores, `talk` runners of language models. While no server is up this waits
    without limit, and `note` receives the reason. Raises SetupError if a server is up and the model cannot be served.
    """
    for pause in retry_pauses():
        number, schema, newly_loaded = await _find_first_server(target.endpoints, note)
        loaded = [target.endpoints[number]] if newly_loaded else []
        try:
            if isinstance(schema, LlmSchema):
                return await open_llm(target, talk, number, schema)
            both = has_images(schema.parameters)
            if both and target.settings.towers == "both":
                return await _open_dual_encoder(target, lanes, number, schema, loaded)
            if both and target.settings.towers == "image":
                for endpoint in loaded:
                    await endpoint.undo_load()
                return await open_triton(_image_target(target), lanes, talk, note)
            return await _open_single(target, lanes, number, schema)
        except (TransportFailed, DeadlineExceeded) as error:  # the model was lost before its first answer
            note(f"waiting for {target.endpoints[number].address}: {error.message}")
        except BaseException:  # a cancelled load must not leave anything on the server either
            for endpoint in loaded:
                await endpoint.undo_load()
            raise
        await asyncio.sleep(pause)
    raise AssertionError("the backoff is endless")


async def _open_single(target: TritonTarget, lanes: MakeLanes, number: int, embedder: Embedder) -> TritonRunner:
    """Return the runner, with replica `number` in service."""
    async with AsyncExitStack() as opened:
        one = await _open_tower(target, number, embedder, opened)
        (modality,) = one.facts.modalities
        lane = lanes({modality: (one.pipeline, one.engines)}, one.facts)[modality]
        runner = TritonRunner(lane, one.facts, target.endpoints, one.codec)
        opened.pop_all()
    return runner


async def _open_dual_encoder(
    target: TritonTarget, lanes: MakeLanes, number: int, embedder: Embedder, loaded: list[Endpoint]
) -> TritonDualEncoder:
    """Return the runner of a text tower and an image tower beside it, which is added to `loaded` if this loads it."""
    image_target = _image_target(target)
    try:
        schema, newly_loaded = await _find_schema(image_target.endpoints[number])
    except ModelNotFound as error:
        raise ConfigError(
            f"{target.name} reads texts and images, but its image tower is missing: {error.message}"
        ) from error
    if newly_loaded:
        loaded.append(image_target.endpoints[number])
    assert isinstance(schema, Embedder), "the name of an image tower never belongs to a language model"
    check_pair(embedder, schema)
    async with AsyncExitStack() as opened:
        text = await _open_tower(target, number, embedder, opened)
        image = await _open_tower(image_target, number, schema, opened)
        facts = merge_facts(text.facts, image.facts, embedder)
        parts: dict[Modality, tuple[Pipeline, Sequence[Engine]]] = {
            "text": (text.pipeline, text.engines),
            "image": (image.pipeline, image.engines),
        }
        runner = TritonDualEncoder(lanes(parts, facts), facts, [*target.endpoints, *image_target.endpoints], text.codec)
        opened.pop_all()
    return runner


def _image_target(target: TritonTarget) -> TritonTarget:
    """Return the target of a model's image towers."""
    return replace(target, endpoints=[image_endpoint(endpoint) for endpoint in target.endpoints])


class _Tower(NamedTuple):
    """The parts of one lane."""

    pipeline: Pipeline
    engines: Sequence[TritonEngine]
    facts: ModelFacts
    codec: TextCodec | None


async def _open_tower(target: TritonTarget, number: int, embedder: Embedder, opened: AsyncExitStack) -> _Tower:
    """Open one model on each server, with replica `number` in service; `opened` closes its engines."""
    model: TextReader | ImageReader
    if embedder.style == "pixels":
        model = ImageReader(target, embedder)
    else:
        model = await asyncio.to_thread(TextReader, target, embedder)
    reference: list[ProbeResult] = []

    async def admit(engine: TritonEngine) -> None:
        answered = await model.probe_engine(engine)
        if reference:
            check_agreement(reference[0], answered, engine.facts.name)

    engines = [
        TritonEngine(endpoint, f"{target.name}-{at}", embedder=embedder, admit=admit, serving=at == number)
        for at, endpoint in enumerate(target.endpoints)
    ]
    for engine in engines:
        opened.push_async_callback(engine.aclose)
    reference.append(await model.probe_engine(engines[number]))
    pipeline = await asyncio.to_thread(model.choose_pipeline, reference[0])
    facts = model.build_facts(pipeline, reference[0])
    for engine in engines:
        engine.start()
    return _Tower(pipeline, engines, facts, model.make_codec(pipeline))


async def _find_first_server(endpoints: Sequence[Endpoint], note: Notify) -> tuple[int, Schema, bool]:
    """Return the first replica that can serve, its schema, and whether it was loaded for this."""
    addresses = [endpoint.address for endpoint in endpoints]
    waits = (TransportFailed, DeadlineExceeded)  # a host that drops packets never answers
    number, (schema, loaded) = await find_first(lambda at: _find_schema(endpoints[at]), addresses, waits, note)
    return number, schema, loaded


async def _find_schema(endpoint: Endpoint) -> tuple[Schema, bool]:
    served = await endpoint.is_serving()
    try:
        return await endpoint.find(), not served
    except ConfigError:  # it is loaded now, but cannot be served
        if not served:
            await endpoint.undo_load()
        raise


__all__ = [
    "AnyTritonRunner",
    "TritonDualEncoder",
    "TritonGenerationRunner",
    "TritonRunner",
    "TritonTarget",
    "list_offers",
    "open_triton",
]
