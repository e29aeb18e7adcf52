"""Opens local models that take images: a pipeline and engines for each tower, and the facts to show.

Part of the composition root.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shoal.backends.base.limits import describe_limits
from shoal.backends.base.prompts import apply_prompts
from shoal.backends.local.open import (
    check_same_model,
    choose_graph_engine,
    compute_space,
    engine_details,
    engine_options,
    open_engine,
    precision_samples,
)
from shoal.config.settings import ModelTable, Settings
from shoal.core.protocols import Engine, ModelFacts, Pipeline, Tensors
from shoal.errors import ConfigError
from shoal.models.convert.variants import VARIANTS
from shoal.models.store import StoredModel
from shoal.pipelines.text.codec import TokenizerCodec
from shoal.pipelines.text.tokens import TextPipeline
from shoal.specs import ImageSpec
from shoal.types import Modality

SAMPLES = 16
"""Images for the precision check of an image tower."""


class Tower(NamedTuple):
    """One tower: the parts of a lane."""

    pipeline: Pipeline
    engines: Sequence[Engine]


@dataclass(frozen=True, slots=True)
class DualEncoder:
    """A model for images that is ready to be served. `codec` belongs to its text tower, if there is one."""

    parts: Mapping[Modality, Tower]
    facts: ModelFacts
    codec: TokenizerCodec | None


async def open_dual_encoder(
    name: str, stored: Sequence[StoredModel], settings: Settings, table: ModelTable
) -> DualEncoder:
    """Open every replica of the towers that the setting `towers` selects; all must be the same model. Raises
    SetupError."""
    engine = choose_graph_engine(settings.engine)
    if settings.precision in VARIANTS:
        raise ConfigError(
            f'{name}: precision {settings.precision} is for text-only models: set `precision = "auto"` in '
            f'[models."{name}"]'
        )
    stored = [apply_prompts(one, table) if one.manifest.text is not None else one for one in stored]
    check_same_model(name, stored)
    modalities = _select_towers(name, stored[0], settings)
    parts: dict[Modality, Tower] = {}
    async with AsyncExitStack() as opened:
        for modality in modalities:
            opening = _open_text_tower if modality == "text" else _open_image_tower
            parts[modality] = await opening(engine, name, stored, settings, opened)
        opened.pop_all()
    pipeline = parts["text"].pipeline if "text" in parts else None
    codec = None
    if isinstance(pipeline, TextPipeline):
        codec = TokenizerCodec(pipeline.tokenizer, stored[0].manifest.text_spec)
    return DualEncoder(parts, _build_facts(stored[0], engine, parts, settings), codec)


def _select_towers(name: str, stored: StoredModel, settings: Settings) -> list[Modality]:
    manifest = stored.manifest
    has: dict[Modality, bool] = {"text": manifest.text is not None, "image": manifest.image is not None}
    modalities = [modality for modality, there in has.items() if there and settings.towers in ("both", modality)]
    if not modalities:
        raise ConfigError(f"{name} has no {settings.towers} tower: remove `towers` from its settings")
    return modalities


async def _open_text_tower(
    engine: str, name: str, stored: Sequence[StoredModel], settings: Settings, opened: AsyncExitStack
) -> Tower:
    spec = stored[0].manifest.text_spec
    pipeline = await asyncio.to_thread(TextPipeline, stored[0].path, spec, truncate=settings.truncate)
    samples = await asyncio.to_thread(precision_samples, pipeline)
    engines: list[Engine] = []
    for number, one in enumerate(stored):
        options = engine_options(settings, samples, spec)
        label = f"{name}-text-{number}"
        engines.append(await open_engine(engine, one.path / one.manifest.graph, one, label, settings.home, options))
        opened.push_async_callback(engines[-1].aclose)
    return Tower(pipeline, engines)


async def _open_image_tower(
    engine: str, name: str, stored: Sequence[StoredModel], settings: Settings, opened: AsyncExitStack
) -> Tower:
    from shoal.pipelines.image import ImagePipeline  # import Pillow only for models that need it

    first = stored[0].manifest.image
    assert first is not None
    pipeline = await asyncio.to_thread(ImagePipeline, first.spec)
    options = engine_options(settings, _make_sample_images(first.spec), None)
    engines: list[Engine] = []
    for number, one in enumerate(stored):
        image = one.manifest.image
        assert image is not None
        label = f"{name}-image-{number}"
        place = one.path / image.graph
        engines.append(await open_engine(engine, place, one, label, settings.home, options, noted="image_precision"))
        opened.push_async_callback(engines[-1].aclose)
    return Tower(pipeline, engines)


def _make_sample_images(spec: ImageSpec) -> list[Tensors]:
    """Return smooth images with some grain, as a preprocessor outputs them. Pure noise would have no edges."""
    random = np.random.default_rng(0)
    height, width = spec.size
    rows, columns = np.mgrid[0:height, 0:width] / max(height, width)
    waves = random.uniform(1, 9, (SAMPLES, 3, 2, 1, 1))
    phases = random.uniform(0, 6, (SAMPLES, 3, 1, 1))
    pixels = 0.5 + 0.4 * np.sin(waves[:, :, 0] * rows + waves[:, :, 1] * columns + phases)
    pixels += random.normal(0, 0.04, pixels.shape)
    mean, std = (np.reshape(value, (1, 3, 1, 1)) for value in (spec.mean, spec.std))
    values = ((pixels * 255 * spec.rescale - mean) / std).astype(np.float32)
    return [{spec.input: values[: SAMPLES // 2]}, {spec.input: values[SAMPLES // 2 :]}]


def _build_facts(stored: StoredModel, engine: str, parts: Mapping[Modality, Tower], settings: Settings) -> ModelFacts:
    manifest = stored.manifest
    image = manifest.image
    assert image is not None
    text = manifest.text if "text" in parts else None
    score = image.spec.score
    found = {modality: part.engines[0].facts for modality, part in parts.items()}
    precisions = {modality: facts.precision for modality, facts in found.items()}
    details: dict[str, Any] = {
        "parameters": manifest.parameters,
        "graph": manifest.graph_source,
        **({"image_size": list(image.spec.size)} if "image" in parts else {}),
        **{f"{modality}_precision": precision for modality, precision in precisions.items()},
        **{
            (key if modality == "text" or len(parts) == 1 else f"image_{key}"): value
            for modality, facts in found.items()
            for key, value in engine_details(facts).items()
        },
        **describe_limits(settings),
    }
    verdicts = [manifest.verification] if text is not None else []
    verdicts += [image.verification] if "image" in parts else []
    return ModelFacts(
        id=manifest.id,
        source=manifest.source,
        backend=engine,
        tasks=image.spec.tasks,
        vectors=() if score is not None else ("dense",),
        labels=score.labels if score is not None else (),
        dimension=image.spec.dimension or None,
        max_input_tokens=text.max_tokens if text is not None else None,
        precision="+".join(dict.fromkeys(precisions.values())),
        pooling=text.pooling if text is not None else "",
        normalized=text is None or text.ends_normalized,
        space=compute_space(stored),
        revision=manifest.revision,
        prompts=text.prompts if text is not None else {},
        default_prompt_name=text.default_prompt_name if text is not None else None,
        verified="; ".join(one.text if one else "not verified: no engine was installed" for one in verdicts),
        modalities=tuple(parts),
        contrast=manifest.contrast if len(parts) > 1 else None,
        details=details,
    )
