"""Local models that take images: towers loaded, facts and vectors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import shoal.backends.local.open
import shoal.backends.local.open_dual_encoder
from shoal.app import open_models
from shoal.config import load
from shoal.core.dual_encoder import DualEncoderRunner
from shoal.core.gateway import Gateway
from shoal.core.protocols import ModelFacts
from shoal.errors import InvalidValue, ModelFailed
from shoal.models.convert.verify import min_cosine
from shoal.models.store import Store
from shoal.types import Context, Embed, Embedded, Image, Item
from tests.unit.backends.local.dual_encoder_kit import expected
from tests.unit.models.engines import RUNS, has_bf16
from tests.unit.models.tower_checkpoints import FAMILIES, towers
from tests.unit.pipelines.image.image_kit import image_files

IMAGES = [Image(data) for data in image_files().values()]
TEXTS = ["a cat", "cats, dogs! and so on and on for longer than the model reads", "b"]
ENGINES = sorted(RUNS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "m")


def written(folder: Path, family: str = "clip", scale: float = 1.0) -> Path:
    """Write a model. `scale`: factor of a projection, so that two models differ."""
    folder.mkdir()
    towers(folder, family)
    tensors = load_file(folder / "model.safetensors")
    if family == "clip":
        tensors["visual_projection.weight"] *= scale
    save_file(tensors, folder / "model.safetensors")
    return folder


@asynccontextmanager
async def opened(home: Path, *models: str, **settings: Any) -> AsyncIterator[Gateway]:
    loaded = load({"home": str(home / "home"), **settings}, {})
    async with open_models(loaded, models) as running:
        await running.wait_until_loaded()
        yield running.gateway


def records_of(store: Store) -> tuple[str, set[str]]:
    """Return the verdicts on the graphs of the only stored model, and the names of its notes."""
    (stored,) = store.entries()
    return stored.manifest.verification_summary, set(store.notes(stored))


def facts_of(gateway: Gateway) -> ModelFacts:
    card = gateway.model("m")
    assert card.facts is not None, card.error
    return card.facts


async def embed(gateway: Gateway, inputs: Sequence[Item], **fields: Any) -> Embedded:
    context = Context(id="r", deadline=time.monotonic() + 30)
    return await gateway.run(Embed(model="m", inputs=list(inputs), **fields), context)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ENGINES)
async def test_texts_and_images_in_one_request(tmp_path: Path, family: str, engine: str) -> None:
    """Mixed texts and images each get the vector that numpy computes."""
    folder = await asyncio.to_thread(written, tmp_path / "m", family)
    inputs: list[Item] = [*TEXTS[:2], *IMAGES, TEXTS[2]]
    async with opened(tmp_path, f"m=file:{folder}", engine=engine, precision="f32") as gateway:
        answer = await embed(gateway, inputs)
        assert min_cosine(answer.vectors, await asyncio.to_thread(expected, folder, inputs)) > 0.9999
        assert [bool(count) for count in answer.tokens] == [not isinstance(item, Image) for item in inputs]
        assert answer.truncated == 1
        facts = facts_of(gateway)
        assert (facts.tasks, facts.modalities, facts.vectors) == (("embed",), ("text", "image"), ("dense",))
        assert facts.contrast is not None
        assert facts.contrast.activation == ("softmax" if family == "clip" else "sigmoid")
        assert facts.verified.count("agrees with a numpy forward pass") == 2
        assert facts.backend == engine
        with pytest.raises(InvalidValue, match=r"^input 1: the image cannot be read"):
            await embed(gateway, ["a", Image(b"no picture at all, by any means"), IMAGES[0]])


@pytest.mark.parametrize(("expected", "inputs", "refused"), [("text", TEXTS, IMAGES[:1]), ("image", IMAGES, TEXTS)])
async def test_the_tower_that_is_not_needed_is_not_loaded(
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: str,
    inputs: list[Item],
    refused: list[Item],
) -> None:
    """The other graph is not opened, its inputs are rejected, and vectors are the same as with both towers."""
    graphs: list[str] = []
    real = shoal.backends.local.open.open_engine

    async def seen(engine: str, place: Path, *rest: Any, **named: Any) -> Any:
        graphs.append(place.name)
        return await real(engine, place, *rest, **named)

    monkeypatch.setattr(shoal.backends.local.open_dual_encoder, "open_engine", seen)
    async with opened(tmp_path, f"m=file:{folder}", precision="f32") as gateway:
        both = await embed(gateway, inputs)
        space = facts_of(gateway).space
    assert graphs == ["model.onnx", "image.onnx"]
    async with opened(tmp_path, f"m=file:{folder}", precision="f32", towers=expected) as gateway:
        assert np.allclose((await embed(gateway, inputs)).vectors, both.vectors, atol=1e-6)
        with pytest.raises(InvalidValue, match=r"'m' accepts only (text|images)"):
            await embed(gateway, refused)
        with pytest.raises(InvalidValue):
            gateway.check_modality("m", "image" if expected == "text" else "text")
        facts = facts_of(gateway)
        assert (facts.modalities, facts.contrast, facts.space) == ((expected,), None, space)
        assert (facts.max_input_tokens is None) == (expected == "image")
    assert graphs[2:] == ["model.onnx" if expected == "text" else "image.onnx"]


async def test_what_was_stored_is_opened_again(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stored model is not converted, verified or checked for precision again."""
    async with opened(tmp_path, f"m=file:{folder}") as gateway:
        first = facts_of(gateway)
        vectors = (await embed(gateway, [*TEXTS, *IMAGES])).vectors
    verified, notes = await asyncio.to_thread(records_of, Store(str(tmp_path / "home")))
    assert verified == first.verified
    measured = {"precision", "image_precision"}
    assert notes & measured == (measured if has_bf16() else set())
    monkeypatch.setattr("shoal.models.convert.convert_dual_encoder.convert_towers", None)
    monkeypatch.setattr("shoal.backends.local.compile.compare", None)
    async with opened(tmp_path, f"m=file:{folder}") as gateway:
        assert facts_of(gateway) == first
        assert np.array_equal((await embed(gateway, [*TEXTS, *IMAGES])).vectors, vectors)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"precision": "int8"}, "is for text-only models"), ({"precision": "fp16"}, "is for text-only models")],
)
async def test_a_failed_load_has_a_reason(tmp_path: Path, folder: Path, settings: dict[str, Any], message: str) -> None:
    """The error names the setting to change."""
    async with opened(tmp_path, f"m=file:{folder}", **settings) as gateway:
        error = gateway.model("m").error
        assert error is not None
        assert message in error


async def test_replicas_are_one_model(tmp_path: Path, folder: Path) -> None:
    """Equal models share the work; different ones are rejected."""
    same = await asyncio.to_thread(written, tmp_path / "same")
    other = await asyncio.to_thread(written, tmp_path / "other", scale=2.0)
    async with opened(tmp_path, f"m=file:{folder},file:{same}") as gateway:
        assert (await embed(gateway, ["a", IMAGES[0]])).vectors.shape == (2, 8)
    async with opened(tmp_path, f"m=file:{folder},file:{other}") as gateway:
        error = gateway.model("m").error
        assert error is not None
        assert "have different weights" in error
        with pytest.raises(ModelFailed):
            await embed(gateway, ["a"])


async def test_batches_of_images_may_take_longer(tmp_path: Path, folder: Path) -> None:
    """Image batches have a longer time limit than text batches."""
    async with opened(tmp_path, f"m=file:{folder}", max_batch_ms=25) as gateway:
        runner = gateway.registry.find("m").ready_runner()
        assert isinstance(runner, DualEncoderRunner)
        times = {modality: lane.options.limits.max_batch_ms for modality, lane in runner.lanes.items()}
        assert times == {"text": 25.0, "image": 250.0}


async def test_one_cache_for_both(tmp_path: Path, folder: Path) -> None:
    """Cached texts and images are not computed again."""
    async with opened(tmp_path, f"m=file:{folder}", cache_mb=8, cache_disk_mb=8) as gateway:
        inputs: list[Item] = ["a cat", IMAGES[0]]
        first = await embed(gateway, inputs)
        again = await embed(gateway, inputs)
        assert (first.facts.cached, again.facts.cached) == (0, 2)
        assert np.array_equal(first.vectors, again.vectors)
