"""Models of texts and images for the fake Triton server, as Shoal writes them, and their expected answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.text_format import Parse

from shoal.backends import parse_address
from shoal.backends.triton.open.host import build_entry_spec
from shoal.backends.triton.repository_entry import triton_models
from shoal.config.settings import Settings
from shoal.kserve import protocol_pb2 as pb
from shoal.models.manifest import ImagePart, Manifest, measure
from shoal.models.store import Store, StoredModel
from shoal.pipelines.image import ImagePipeline
from shoal.specs import ContrastSpec, ImageSpec, TextSpec
from shoal.types import Array, Embed, Image
from tests.fakes import triton_codec
from tests.fakes.triton import FakeModel, FakeTriton, reply
from tests.unit.backends.triton.open.kit import DIMENSION, table
from tests.unit.models import checkpoints

NAME, TEXT, IMAGE = "org/mini", "org~mini", "org~mini~~image"
SPEC = ImageSpec(size=(4, 6), dimension=DIMENSION, resize="squash", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
CONTRAST = ContrastSpec(scale=50.0)


def stored_towers(store: Store, *, texts: bool = True, image: ImageSpec = SPEC, created: int = 1) -> StoredModel:
    """Return a stored model with invalid graphs."""
    parsed = parse_address("hf:org/mini")
    with store.working(parsed) as partial:
        (partial / "model.onnx").write_bytes(b"text graph")
        (partial / "image.onnx").write_bytes(b"image graph")
        checkpoints.tokenizer("bert").save(str(partial / "tokenizer.json"))
        text = TextSpec(
            tokenizer="tokenizer.json",
            inputs=("input_ids",),
            dimension=DIMENSION,
            max_tokens=16,
            sentence_embedding="text_embeds",
            pooled="text_embeds",
            ends_normalized=False,
        )
        manifest = Manifest(
            id=parsed.id,
            address="hf:org/mini",
            source="hf:org/mini@main",
            revision="main",
            converter=1,
            graph="model.onnx" if texts else "image.onnx",
            graph_source="built",
            weights={"model.safetensors": "ab"},
            conversion="built",
            parameters=1,
            text=text if texts else None,
            image=ImagePart(graph="image.onnx", spec=image),
            contrast=CONTRAST if texts else None,
            created=created,
            files=measure(partial),
        )
        return store.commit(partial, parsed, manifest)


def tower_of(config: pb.ModelConfig, *, seed: int = 0, **fields: Any) -> FakeModel:
    """Return a model with that configuration, which answers by its input tensor."""
    output = config.output[0].name

    def answer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        (array,) = triton_codec.read_inputs(request).values()
        rows = read(array, seed) if array.dtype.kind == "i" else vectors_of(array, config, seed)
        return reply(request, final=None, **{output: rows.astype(np.float32)})

    return FakeModel(config.name, config=config, answer=answer, **fields)


def read(ids: Array, seed: int) -> Array:
    """Return `mean_of` without the padding after a text, where ids are 0."""
    counted = (ids != 0)[..., None]
    return np.asarray((table(seed=seed)[ids] * counted).sum(1) / counted.sum(1))


def vectors_of(pixels: Array, config: pb.ModelConfig, seed: int = 0) -> Array:
    width = config.output[0].dims[0]
    flat = pixels.reshape(len(pixels), -1)
    return np.asarray(flat @ np.random.default_rng(seed).standard_normal((flat.shape[1], width)))


def expected(image: Image, seed: int = 0) -> Array:
    """Return the vector of an image."""
    (prepared,) = ImagePipeline(SPEC).prepare([(Embed(model="", inputs=[image]), image)])
    assert not isinstance(prepared, Exception)
    config = pb.ModelConfig()
    config.output.add(dims=[DIMENSION])
    return np.asarray(vectors_of(prepared.tensors["pixel_values"][None], config, seed)[0])


async def added(triton: FakeTriton, stored: StoredModel, settings: Settings | None = None, **fields: Any) -> None:
    """Add the models of an entry to a server."""
    spec = await asyncio.to_thread(build_entry_spec, NAME, stored, settings or Settings())
    for model in triton_models(spec):
        triton.add(tower_of(model.config, **fields))


def loads(triton: FakeTriton, folder: Path, failing: Mapping[str, str] | None = None) -> None:
    """Let a server load models from a repository's folder, or pushed ones. `failing`: reasons for failing loads, by
    model name."""
    load = triton._load

    def look_and_load(request: Any) -> Any:
        name = request.model_name
        pushed = "config" in request.parameters
        if not pushed and not (folder / name / "config.pbtxt").is_file():
            triton.models.pop(name, None)
        elif not pushed and name not in triton.models:
            config = Parse((folder / name / "config.pbtxt").read_text(), pb.ModelConfig())
            triton.add(tower_of(config, loaded=False))
        if name in triton.models:
            triton.models[name].load_error = (failing or {}).get(name, "")
        return load(request)

    triton._load = look_and_load  # type: ignore[method-assign]
