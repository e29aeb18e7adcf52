"""Models of texts and images on Triton servers: published as two models, opened as one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.backends.triton.open.connections import TritonConnections
from shoal.backends.triton.open.host import TritonHost, build_entry_spec
from shoal.backends.triton.open.images import probe_images
from shoal.backends.triton.open.models import TritonDualEncoder, TritonRunner
from shoal.backends.triton.open.targets import list_offers
from shoal.config.settings import ModelTable, Settings
from shoal.errors import ConfigError, InvalidValue, ModelFailed
from shoal.models.address import Address
from shoal.models.space import stored_space
from shoal.models.store import Store, StoredModel
from shoal.specs import ScoreSpec
from shoal.types import Classify, Embed, Image
from tests.fakes.triton import FakeTriton
from tests.unit.backends.triton.open.kit import DIMENSION, Open, forgotten, mean_of, requests_of, soon, until
from tests.unit.backends.triton.open.towers_kit import (
    CONTRAST,
    IMAGE,
    NAME,
    SPEC,
    TEXT,
    added,
    expected,
    loads,
    stored_towers,
)

IMAGES = list(probe_images())


@pytest.fixture
def stored(tmp_path: Path) -> StoredModel:
    return stored_towers(Store(tmp_path / "home"))


@pytest.fixture
def failing() -> dict[str, str]:
    """Models that cannot be loaded, and the reasons."""
    return {}


@pytest.fixture
def host(
    writing: Settings, tritons: TritonConnections, triton: FakeTriton, folder: Path, failing: dict[str, str]
) -> TritonHost:
    loads(triton, folder, failing)
    return TritonHost(writing, tritons)


def states(triton: FakeTriton) -> list[str]:
    return [triton.models[name].state if name in triton.models else "" for name in (TEXT, IMAGE)]


def loaded(triton: FakeTriton) -> list[str]:
    return [each.model_name for each in requests_of(triton, "RepositoryModelLoad")]


async def embed(runner: Any, *items: Any, **fields: Any) -> Any:
    fields.setdefault("normalize", False)
    return (await runner.run(Embed(model="m", inputs=list(items), **fields), soon())).vectors


class TestPublished:
    async def test_the_image_tower_first(
        self, host: TritonHost, triton: FakeTriton, stored: StoredModel, writing: Settings, folder: Path
    ) -> None:
        """So nobody finds a text tower without its image tower."""
        await host.publish(NAME, stored, writing)
        assert loaded(triton) == [IMAGE, TEXT]
        assert (folder / IMAGE / "1" / "model.onnx").read_bytes() == b"image graph"
        assert (folder / TEXT / "1" / "model.onnx").read_bytes() == b"text graph"

    async def test_found_again_and_listed_as_one(
        self, host: TritonHost, stored: StoredModel, writing: Settings, tritons: TritonConnections
    ) -> None:
        await host.publish(NAME, stored, writing)
        again = TritonHost(writing, tritons)
        found = await again.find_entry(NAME)
        assert found is not None
        assert found.folders == (TEXT, IMAGE)
        assert await again.has_model(NAME, Address(scheme="hf", target="org/mini"))
        assert [entry.name for entry in await again.entries()] == [NAME]

    @pytest.mark.parametrize("part", [TEXT, IMAGE])
    async def test_a_half_is_not_left(
        self,
        host: TritonHost,
        triton: FakeTriton,
        stored: StoredModel,
        writing: Settings,
        failing: dict[str, str],
        part: str,
    ) -> None:
        failing[part] = "out of memory"
        with pytest.raises(ModelFailed, match="out of memory"):
            await host.publish(NAME, stored, writing)
        assert "READY" not in states(triton)
        assert await host.find_entry(NAME) is None

    async def test_a_new_half_beside_an_old_one_does_not_serve(
        self, host: TritonHost, triton: FakeTriton, stored: StoredModel, writing: Settings, failing: dict[str, str]
    ) -> None:
        """The new image tower is already loaded when the text tower fails."""
        await host.publish(NAME, stored, writing)
        failing[TEXT] = "out of memory"
        with pytest.raises(ModelFailed):
            await host.publish(NAME, stored, writing)
        assert states(triton) == ["UNAVAILABLE", "UNAVAILABLE"]

    async def test_unloaded_and_removed_together(
        self, host: TritonHost, triton: FakeTriton, stored: StoredModel, writing: Settings
    ) -> None:
        await host.publish(NAME, stored, writing)
        await host.unload(NAME, writing)
        assert states(triton) == ["UNAVAILABLE", "UNAVAILABLE"]
        assert await host.remove(NAME)
        assert await host.entries() == []

    async def test_taken_back_together(
        self, host: TritonHost, triton: FakeTriton, stored: StoredModel, writing: Settings
    ) -> None:
        await host.publish(NAME, stored, writing)
        await host.undo_publish(NAME, writing)
        assert states(triton) == ["UNAVAILABLE", "UNAVAILABLE"]
        assert await host.find_entry(NAME) is None

    async def test_pushed(
        self, pushing: TritonHost, triton: FakeTriton, stored: StoredModel, settings: Settings, folder: Path
    ) -> None:
        loads(triton, folder)
        await pushing.publish(NAME, stored, settings)
        assert loaded(triton) == [IMAGE, TEXT]
        await pushing.unload(NAME, settings)
        assert "READY" not in states(triton)

    async def test_a_target_loads_its_own_tower(
        self, host: TritonHost, triton: FakeTriton, stored: StoredModel, writing: Settings
    ) -> None:
        """The other tower has its own engine."""
        await host.write(NAME, stored, writing)
        target = await host.endpoint(NAME, ModelTable(), writing)
        assert target.load is not None
        await target.load()
        assert loaded(triton) == [TEXT]

    @pytest.mark.parametrize(
        ("towers", "text", "graphs"),
        [
            ("both", True, ["image.onnx", "model.onnx"]),
            ("text", True, ["model.onnx"]),
            ("image", False, ["image.onnx"]),
        ],
    )
    def test_only_the_tower_that_is_wanted(
        self, stored: StoredModel, towers: Any, text: bool, graphs: list[str]
    ) -> None:
        spec = build_entry_spec(NAME, stored, Settings(towers=towers))
        assert (spec.text is not None, spec.contrast is not None) == (text, towers == "both")
        assert [spec.graph.name, *([spec.image.graph.name] if spec.image and text else [])][::-1] == graphs

    def test_external_weights_of_each(self, stored: StoredModel) -> None:
        for name in ("model.onnx.data", "image.onnx.data"):
            (stored.path / name).write_bytes(b"weights")
        spec = build_entry_spec(NAME, stored, Settings())
        assert spec.image is not None
        assert [[path.name for path in data] for data in (spec.data, spec.image.data)] == [
            ["model.onnx.data"],
            ["image.onnx.data"],
        ]

    def test_a_model_of_images_alone(self, tmp_path: Path) -> None:
        """Its only tower is used, whatever `towers` requests."""
        alone = stored_towers(Store(tmp_path / "home"), texts=False)
        spec = build_entry_spec(NAME, alone, Settings(towers="text"))
        assert spec.image is not None
        assert (spec.text, spec.tokenizer, spec.graph) == (None, None, spec.image.graph)


class TestOpened:
    async def test_texts_and_images_in_order(self, opened: Open, triton: FakeTriton, stored: StoredModel) -> None:
        """Each goes to its own tower, based on the entries' parameters alone."""
        await added(triton, stored)
        runner = await opened(TEXT)
        assert isinstance(runner, TritonDualEncoder)
        rows = await embed(runner, "fish", IMAGES[1], [5, 6], IMAGES[0])
        np.testing.assert_allclose(rows[1], expected(IMAGES[1]), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(rows[2], mean_of([5, 6]), rtol=1e-5)
        np.testing.assert_allclose(rows[3], expected(IMAGES[0]), rtol=1e-4, atol=1e-4)

    async def test_facts(self, opened: Open, triton: FakeTriton, stored: StoredModel) -> None:
        await added(triton, stored)
        facts = (await opened(TEXT)).facts
        assert (facts.modalities, facts.contrast, facts.dimension) == (("text", "image"), CONTRAST, DIMENSION)
        assert facts.space == stored_space(stored)
        assert (facts.tasks, facts.details["model"], facts.details["image_model"]) == (("embed",), TEXT, IMAGE)
        assert "texts answered" in facts.verified
        assert "images answered" in facts.verified

    async def test_a_broken_image_is_named(self, opened: Open, triton: FakeTriton, stored: StoredModel) -> None:
        await added(triton, stored)
        runner = await opened(TEXT)
        with pytest.raises(InvalidValue, match=r"input 1: the image cannot be read"):
            await embed(runner, "fish", Image(b"nothing"))
        assert len(await embed(runner, "fish", IMAGES[0])) == 2

    async def test_both_are_loaded(self, opened: Open, triton: FakeTriton, stored: StoredModel) -> None:
        """The address names a model that is in the repository but not loaded."""
        await added(triton, stored, loaded=False)
        await opened(TEXT)
        assert states(triton) == ["READY", "READY"]

    async def test_both_come_back_after_a_restart(self, opened: Open, triton: FakeTriton, stored: StoredModel) -> None:
        await added(triton, stored)
        runner = await opened(TEXT)
        forgotten(triton)
        await until(lambda: states(triton) == ["READY", "READY"])
        await until(runner.ready)
        assert len(await embed(runner, "fish", IMAGES[0])) == 2

    async def test_both_are_unloaded_and_counted(self, opened: Open, triton: FakeTriton, stored: StoredModel) -> None:
        await added(triton, stored)
        runner = await opened(TEXT)
        assert [each.name for each in await runner.statistics()] == ["m/text_encoder", "m/image_encoder"]
        await runner.aclose()
        await runner.unload(5.0)
        assert states(triton) == ["UNAVAILABLE", "UNAVAILABLE"]

    async def test_without_its_image_tower(self, opened: Open, triton: FakeTriton, stored: StoredModel) -> None:
        """The error names the missing tower; models loaded for this are unloaded again."""
        await added(triton, stored, loaded=False)
        del triton.models[IMAGE]
        with pytest.raises(ConfigError, match=rf"its image tower is missing: .*{IMAGE}"):
            await opened(TEXT)
        assert states(triton) == ["UNAVAILABLE", ""]

    async def test_halves_of_two_models(self, opened: Open, triton: FakeTriton, stored: StoredModel) -> None:
        """As after an interrupted load. Models loaded for this are unloaded again."""
        await added(triton, stored, loaded=False)
        triton.models[IMAGE].config.parameters["shoal_space"].string_value = "another"
        with pytest.raises(ConfigError, match=r"not the two towers of one model: load it through Shoal again"):
            await opened(TEXT)
        assert states(triton) == ["UNAVAILABLE", "UNAVAILABLE"]

    async def test_vectors_that_cannot_be_compared(self, opened: Open, triton: FakeTriton, tmp_path: Path) -> None:
        wide = await asyncio.to_thread(
            stored_towers, Store(tmp_path / "home"), image=msgspec.structs.replace(SPEC, dimension=5)
        )
        await added(triton, wide)
        with pytest.raises(ConfigError, match="8 dimensions for texts and 5 for images"):
            await opened(TEXT)

    async def test_a_dimension_that_is_wrong(self, opened: Open, triton: FakeTriton, tmp_path: Path) -> None:
        await added(triton, await asyncio.to_thread(stored_towers, Store(tmp_path / "home"), texts=False))
        with pytest.raises(ConfigError, match="8 dimensions, but the configured `dimension` is 9"):
            await opened(TEXT, table=ModelTable(dimension=9))
        assert (await opened(TEXT, table=ModelTable(dimension=8))).facts.dimension == 8

    async def test_a_replica_of_other_images_stays_out(
        self, opened: Open, triton: FakeTriton, second: FakeTriton, stored: StoredModel
    ) -> None:
        """Its text vectors agree, but its image vectors do not."""
        await added(triton, stored)
        await added(second, stored)
        agreeing = second.models[TEXT]
        await added(second, stored, seed=1)
        second.models[TEXT] = agreeing
        runner = await opened(TEXT, triton, second)
        text, image = (runner.lanes[each] for each in ("text", "image"))
        await until(lambda: all(one.engine.ready() for one in text.replicas))
        await until(lambda: "returns different vectors" in image.replicas[1].engine.reason)
        rows = [await embed(runner, IMAGES[2]) for _ in range(4)]
        assert all(np.allclose(row, expected(IMAGES[2]), rtol=1e-4, atol=1e-4) for row in rows)

    @pytest.mark.parametrize(("towers", "left"), [("text", ["READY", ""]), ("image", ["UNAVAILABLE", "READY"])])
    async def test_one_tower(
        self, opened: Open, triton: FakeTriton, stored: StoredModel, offline: Settings, towers: Any, left: list[str]
    ) -> None:
        """The other one is not loaded."""
        await added(triton, stored, loaded=False)
        runner = await opened(TEXT, settings=msgspec.structs.replace(offline, towers=towers))
        assert isinstance(runner, TritonRunner)
        assert states(triton) == left
        assert (runner.facts.modalities, runner.facts.contrast) == ((towers,), None)
        item: Any = [5, 6] if towers == "text" else IMAGES[0]
        right = mean_of([5, 6]) if towers == "text" else expected(IMAGES[0])
        np.testing.assert_allclose((await embed(runner, item))[0], right, rtol=1e-4, atol=1e-4)

    async def test_a_classifier_of_images(self, opened: Open, triton: FakeTriton, tmp_path: Path) -> None:
        score = ScoreSpec(labels=("cat", "dog", "fish"), activation="softmax")
        spec = msgspec.structs.replace(SPEC, dimension=0, output="logits", score=score)
        await added(triton, await asyncio.to_thread(stored_towers, Store(tmp_path / "home"), texts=False, image=spec))
        runner = await opened(TEXT)
        assert (runner.facts.tasks, runner.facts.labels) == (("classify",), ("cat", "dog", "fish"))
        assert (runner.facts.modalities, runner.facts.space, runner.facts.vectors) == (("image",), "", ())
        found = await runner.run(Classify(model="m", inputs=list(IMAGES)), soon())
        assert found.scores.shape == (4, 3)
        np.testing.assert_allclose(found.scores.sum(axis=1), 1, rtol=1e-5)

    async def test_a_server_offers_it_as_one(
        self, tritons: TritonConnections, triton: FakeTriton, stored: StoredModel
    ) -> None:
        await added(triton, stored)
        address = Address(scheme="triton", target=triton.target)
        target = await tritons.endpoint(msgspec.structs.replace(address, model=TEXT), ModelTable(), Settings())
        assert list(await list_offers(target, address)) == [NAME]


def test_the_probe_has_images_unlike_each_other() -> None:
    rows = np.stack([expected(each) for each in IMAGES])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    assert np.abs(rows @ rows.T - np.eye(len(rows))).max() < 0.95
