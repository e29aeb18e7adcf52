"""Image towers on Triton: images to tensors, tensors to vectors or scores, and the facts to show. For an image tower
beside a text tower: its endpoint, and the facts of both together."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from shoal.backends.base.limits import describe_limits
from shoal.backends.triton.engine import Endpoint, TritonEngine
from shoal.backends.triton.naming import image_folder
from shoal.backends.triton.open.probing import PROBE_S, PipelineWrapper, ProbeResult
from shoal.backends.triton.open.targets import TritonTarget
from shoal.backends.triton.pixels import read_contrast_spec, read_image_spec
from shoal.backends.triton.schema import Embedder
from shoal.core.probe import TEXTS, ProbeVectors, probe, probe_scores
from shoal.core.protocols import ModelFacts, Pipeline, Prepared
from shoal.errors import ConfigError, ShoalError
from shoal.pipelines.image import ImagePipeline
from shoal.types import BatchTask, Classify, Embed, Image, Item

IMAGE_SIDE = 32
"""Height and width of the probe's images, in pixels."""


class ImageReader:
    """Reads one image tower, as `reading.TextReader` reads a text model."""

    def __init__(self, target: TritonTarget, embedder: Embedder) -> None:
        """Raises SetupError."""
        self.target = target
        self.embedder = embedder
        self._pipeline = ImagePipeline(
            read_image_spec(embedder.name, embedder.parameters), normalize=target.table.normalize
        )

    async def probe_engine(self, engine: TritonEngine) -> ProbeResult:
        """Return the answers of one replica for a few images. Raises as the engine and the pipeline do."""
        deadline, image_probe = time.monotonic() + PROBE_S, _ImageProbe(self._pipeline)
        if self._pipeline.spec.score is not None:
            return await probe_scores(engine, image_probe, deadline, TEXTS)
        return await probe(engine, image_probe, deadline)

    def choose_pipeline(self, answered: ProbeResult) -> Pipeline:
        """Return the pipeline to serve with. Raises ConfigError if the dimension is not the configured one."""
        expected = self.target.table.dimension
        if isinstance(answered, ProbeVectors) and expected not in (None, answered.dimension):
            raise ConfigError(
                f"{self.target.name} returns vectors of {answered.dimension} dimensions, but the configured "
                f"`dimension` is {expected}: correct it or leave it out"
            )
        return self._pipeline

    def make_codec(self, pipeline: Pipeline) -> None:
        """Return None: images have no tokens to show."""

    def build_facts(self, pipeline: Pipeline, answered: ProbeResult) -> ModelFacts:
        embedder, target, spec = self.embedder, self.target, self._pipeline.spec
        return ModelFacts(
            id=target.name,
            source=target.source,
            backend="triton",
            tasks=spec.tasks,
            vectors=("dense",) if spec.score is None else (),
            labels=spec.score.labels if spec.score is not None else (),
            dimension=answered.dimension if isinstance(answered, ProbeVectors) else None,
            precision=embedder.precision,
            space=embedder.parameters.get("shoal_space", "") if spec.score is None else "",
            revision=embedder.version,
            verified=f"{len(TEXTS)} images answered, all finite",
            modalities=("image",),
            details={
                **describe_limits(target.settings),
                "model": target.endpoints[0].model,
                "servers": [endpoint.address for endpoint in target.endpoints],
                "schema": embedder.style,
                "instances": embedder.instances,
                "max_batch_size": min(embedder.max_batch_size, target.settings.max_batch_size),
                **({"activation": spec.score.activation} if spec.score is not None else {}),
            },
        )


def image_endpoint(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint of the image tower beside a text tower's. Its Control remembers pushed files."""
    model = image_folder(endpoint.model)
    return replace(endpoint, model=model, address=f"{endpoint.address} ({model})", ensemble="", load=None, unload=None)


def check_pair(text: Embedder, image: Embedder) -> None:
    """Raise ConfigError if two towers are not of one model, as an interrupted load may leave them."""
    identities = [
        [one.parameters.get(f"shoal_{key}") for key in ("name", "source", "space", "image")] for one in (text, image)
    ]
    if image.style != "pixels" or identities[0] != identities[1]:
        raise ConfigError(
            f"{text.name} and {image.name} on Triton are not the two towers of one model: load it through Shoal again"
        )


def merge_facts(text: ModelFacts, image: ModelFacts, embedder: Embedder) -> ModelFacts:
    """Return the facts of a model with two towers; `embedder` is the text tower's. Raises ConfigError if their vectors
    cannot be compared."""
    if text.dimension != image.dimension:
        raise ConfigError(
            f"{text.id} returns vectors of {text.dimension} dimensions for texts and {image.dimension} for images: "
            "load it through Shoal again"
        )
    instances = {"text_instances": text.details["instances"], "image_instances": image.details["instances"]}
    return replace(
        text,
        modalities=("text", "image"),
        contrast=read_contrast_spec(embedder.name, embedder.parameters),
        verified=f"{text.verified}; {image.verified}",
        details={**text.details, **instances, "image_model": image.details["model"]},
    )


class _ImageProbe(PipelineWrapper):
    """An image pipeline that replaces each of the probe's texts with an image."""

    def prepare(self, items: Sequence[tuple[BatchTask, Item]]) -> list[Prepared | ShoalError]:
        tasks = [_without_truncation(task) for task, _ in items]
        return self._pipeline.prepare(list(zip(tasks, probe_images(), strict=True)))


def _without_truncation(task: BatchTask) -> BatchTask:
    """Return the task without `truncate`, which does not apply to images."""
    assert isinstance(task, Embed | Classify)
    return msgspec.structs.replace(task, truncate=None)


def probe_images() -> Iterator[Image]:
    """Yield four dissimilar images: models that differ at all differ on one of them. BMP needs no library to write."""
    for paint in (
        lambda x, y: (8 * x, 8 * y, 0),
        lambda x, y: (255, 255, 255) if (x // 8 + y // 8) % 2 else (0, 0, 96),
        lambda x, y: (0, 160, 64) if (x - 16) ** 2 + (y - 16) ** 2 < 144 else (240, 200, 240),
        lambda x, y: (x * y * 7 % 256, (x + 3 * y) * 5 % 256, x * x % 256),
    ):
        rows = (bytes(part for x in range(IMAGE_SIDE) for part in paint(x, y)) for y in range(IMAGE_SIDE))
        body = b"".join(rows)
        header = struct.pack("<IiiHHIIiiII", 40, IMAGE_SIDE, IMAGE_SIDE, 1, 24, 0, len(body), 0, 0, 0, 0)
        yield Image(struct.pack("<2sIHHI", b"BM", 54 + len(body), 0, 0, 54) + header + body)
