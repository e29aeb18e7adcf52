"""Entries of models that read images: the files of each tower, and how they are read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.backends.triton.engine import build_facts, detect_schema
from shoal.backends.triton.pixels import detect_pixels, has_images, read_contrast_spec, read_image_spec
from shoal.backends.triton.repository import Repository
from shoal.backends.triton.repository_entry import (
    MAX_PIXEL_BYTES,
    EntrySpec,
    ImageTower,
    TritonModel,
    max_images_per_call,
    triton_models,
)
from shoal.backends.triton.schema import Embedder, TensorNames
from shoal.errors import ConfigError, ModelFileError
from shoal.kserve.protocol_pb2 import ModelConfig
from shoal.specs import ContrastSpec, ImageSpec, ScoreSpec
from tests.unit.backends.triton.entry_kit import SPEC, entry
from tests.unit.backends.triton.schema_kit import metadata, refusal

IMAGE = ImageSpec(size=(6, 10), dimension=4, mean=(0.1, 0.2, 0.3))
CONTRAST = ContrastSpec(scale=14.5, bias=-1.0, activation="sigmoid")
CLASSES = ScoreSpec(labels=("cat", "dog", "fish"), activation="softmax")


def towers(folder: Path, *, image: ImageSpec = IMAGE, **fields: Any) -> EntrySpec:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "image.onnx").write_bytes(b"image graph")
    return entry(folder, image=ImageTower(graph=folder / "image.onnx", spec=image), contrast=CONTRAST, **fields)


def images(folder: Path, image: ImageSpec = IMAGE, **fields: Any) -> TritonModel:
    """Return the image tower of an entry with two towers."""
    return triton_models(towers(folder, image=image, **fields))[0]


def parameters(model: TritonModel) -> dict[str, str]:
    return {key: value.string_value for key, value in model.config.parameters.items()}


def ports(tensors: Any) -> list[tuple[str, str, list[int]]]:
    return [(one.name, {9: "INT64", 11: "FP32"}[one.data_type], list(one.dims)) for one in tensors]


class TestWritten:
    def test_the_image_tower_comes_before_the_whole(self, tmp_path: Path) -> None:
        """The served name appears last, so that nobody finds it without its image tower."""
        image, text = triton_models(towers(tmp_path))
        assert [(one.name, one.part) for one in (image, text)] == [("org~mini~~image", "image"), ("org~mini", "model")]
        assert image.files["1/model.onnx"] == tmp_path / "image.onnx"
        assert text.files["1/model.onnx"] == tmp_path / "model.onnx"

    def test_tensors(self, tmp_path: Path) -> None:
        image, text = triton_models(towers(tmp_path))
        assert ports(image.config.input) == [("pixel_values", "FP32", [3, 6, 10])]
        assert ports(image.config.output) == [("image_embeds", "FP32", [4])]
        assert ports(text.config.input)[0] == ("input_ids", "INT64", [-1])

    def test_settings_are_those_of_texts(self, tmp_path: Path) -> None:
        options = {"instances": 3, "kind": "cpu", "max_queue_size": 9, "platform": "python"}
        image, text = (model.config for model in triton_models(towers(tmp_path, options=options)))
        assert (image.backend, image.default_model_filename) == ("python", "model.py")
        assert image.instance_group == text.instance_group
        assert image.dynamic_batching == text.dynamic_batching
        assert "1/model.py" in images(tmp_path, options=options).files

    def test_parameters_of_both_parts(self, tmp_path: Path) -> None:
        """Both describe the image preprocessing; the image tower has no text parameters."""
        image, text = map(parameters, triton_models(towers(tmp_path)))
        assert image["shoal_image"] == text["shoal_image"] == msgspec.json.encode(IMAGE).decode()
        assert json.loads(text["shoal_contrast"])["scale"] == 14.5
        assert "shoal_text" in text
        assert "shoal_text" not in image
        assert (image["shoal_part"], image["shoal_name"]) == ("image", "org/mini")
        assert "shoal_image" not in parameters(triton_models(entry(tmp_path))[0])

    def test_it_is_warmed_up_with_an_image(self, tmp_path: Path) -> None:
        (sample,) = images(tmp_path).config.model_warmup
        assert list(sample.inputs["pixel_values"].dims) == [3, 6, 10]
        assert sample.inputs["pixel_values"].zero_data
        assert not images(tmp_path, options={"warm_up": False}).config.model_warmup

    def test_a_batch_fits_into_a_call(self, tmp_path: Path) -> None:
        """64 images of 224 x 224 have 38 MB."""
        large = msgspec.structs.replace(IMAGE, size=(224, 224))
        limit = max_images_per_call(large)
        assert limit * 3 * 224 * 224 * 4 <= MAX_PIXEL_BYTES < (limit + 1) * 3 * 224 * 224 * 4
        assert images(tmp_path, large, options={"max_batch_size": 64}).config.max_batch_size == limit
        assert images(tmp_path, large, options={"max_batch_size": 8}).config.max_batch_size == 8
        assert max_images_per_call(msgspec.structs.replace(IMAGE, size=(9000, 9000))) == 1

    def test_images_alone(self, tmp_path: Path) -> None:
        """The image tower has the served name; a classifier's tower returns logits."""
        spec = msgspec.structs.replace(IMAGE, dimension=0, score=CLASSES, output="logits")
        (model,) = triton_models(towers(tmp_path, image=spec, text=None))
        assert (model.name, model.part) == ("org~mini", "model")
        assert ports(model.config.output) == [("logits", "FP32", [3])]
        assert model.files["1/model.onnx"] == tmp_path / "image.onnx"

    def test_external_weights(self, tmp_path: Path) -> None:
        data = tmp_path / "image.onnx.data"
        data.write_bytes(b"weights")
        tower = ImageTower(graph=tmp_path / "image.onnx", spec=IMAGE, data=(data,))
        image, text = triton_models(entry(tmp_path, image=tower))
        assert image.files["1/image.onnx.data"] == data
        assert "1/image.onnx.data" not in text.files
        with pytest.raises(ModelFileError, match="outside"):
            entry(tmp_path, image=ImageTower(graph=tmp_path / "below" / "image.onnx", spec=IMAGE, data=(data,)))

    def test_what_cannot_be(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="reads images"):
            towers(tmp_path, options={"text_in": True})
        with pytest.raises(ConfigError, match="neither texts nor images"):
            entry(tmp_path, text=None)


class TestRead:
    def test_as_it_was_written(self, tmp_path: Path) -> None:
        """Whatever tensor names the operator sets for texts."""
        model = images(tmp_path)
        for names in (None, TensorNames(outputs={"pooled": "pooled"})):
            found = detect_schema(model.config, metadata("1", "2"), names)
            assert isinstance(found, Embedder)
            assert (found.style, found.dimension, found.max_batch_size) == ("pixels", 4, 64)
            assert [port.name for port in (*found.inputs, *found.outputs)] == ["pixel_values", "image_embeds"]
            assert (found.version, found.batch, found.has_mask) == ("2", "config", True)
            assert not build_facts("m", found).pads_batches

    def test_no_larger_batch_than_fits(self, tmp_path: Path) -> None:
        """An older entry may allow more."""
        large = msgspec.structs.replace(IMAGE, size=(512, 512))
        model = images(tmp_path, large)
        model.config.max_batch_size = 64
        found = detect_pixels(model.config, metadata())
        assert found is not None
        assert build_facts("m", found).max_batch_size == max_images_per_call(large) < 64

    def test_a_text_tower_is_none(self, tmp_path: Path) -> None:
        _, text = triton_models(towers(tmp_path))
        assert detect_pixels(text.config, metadata()) is None
        assert has_images(parameters(text))
        assert not has_images(parameters(images(tmp_path)))
        found = detect_schema(text.config, metadata())
        assert isinstance(found, Embedder)
        assert found.style == "tokens"

    def test_a_text_tower_without_a_mask_takes_batches(self, tmp_path: Path) -> None:
        """A graph that Shoal wrote reads nothing after a text's end."""
        spec = msgspec.structs.replace(SPEC, inputs=("input_ids",))
        _, text = triton_models(towers(tmp_path, text=spec))
        found = detect_schema(text.config, metadata())
        assert isinstance(found, Embedder)
        assert build_facts("m", found).max_batch_size == 64

    @pytest.mark.parametrize("change", ["dims", "batch", "more"])
    def test_edited_by_hand(self, tmp_path: Path, change: str) -> None:
        config = images(tmp_path).config
        if change == "dims":
            config.input[0].dims[1] = 7
        elif change == "batch":
            config.max_batch_size = 0
        else:
            config.output.add(name="more", data_type=11, dims=[1])
        with pytest.raises(ConfigError, match=r"does not match its `shoal_image`: load it through Shoal again"):
            detect_pixels(config, metadata())

    def test_parameters_that_cannot_be_read(self) -> None:
        with pytest.raises(ConfigError, match=r"invalid `shoal_image` .* through Shoal again"):
            read_image_spec("m", {"shoal_image": "{}"})
        with pytest.raises(ConfigError, match="invalid `shoal_contrast`"):
            read_contrast_spec("m", {"shoal_contrast": "none"})

    def test_contrast(self, tmp_path: Path) -> None:
        _, text = triton_models(towers(tmp_path))
        assert read_contrast_spec("m", parameters(text)) == CONTRAST
        assert read_contrast_spec("m", {}) is None

    def test_a_tower_that_others_wrote_is_refused(self) -> None:
        assert "load it through Shoal" in refusal([("input", "FP32", [3, 224, 224])], [("output", "FP32", [512])])
        assert detect_pixels(ModelConfig(name="m"), metadata()) is None


class TestRepository:
    def test_both_come_and_go(self, tmp_path: Path) -> None:
        """One listed model with two folders."""
        repository = Repository(tmp_path / "models")
        assert repository.write(towers(tmp_path / "files")) == ("org~mini~~image", "org~mini")
        (found,) = repository.entries()
        assert (found.name, found.folders) == ("org/mini", ("org~mini", "org~mini~~image"))
        assert found.size > sum(len(b) for b in (b"graph", b"image graph"))
        assert repository.remove("org/mini")
        assert repository.entries() == []
        assert not list((tmp_path / "models").glob("org*"))

    def test_a_model_that_reads_images_no_more(self, tmp_path: Path) -> None:
        repository = Repository(tmp_path / "models")
        repository.write(towers(tmp_path / "files"))
        repository.write(entry(tmp_path / "files"))
        (found,) = repository.entries()
        assert found.folders == ("org~mini",)

    def test_an_image_tower_without_its_whole_goes(self, tmp_path: Path) -> None:
        """Its writer died between the two."""
        repository = Repository(tmp_path / "models")
        repository.write(towers(tmp_path / "files"))
        for path in sorted((tmp_path / "models" / "org~mini").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (tmp_path / "models" / "org~mini").rmdir()
        assert repository.entries() == []
        repository.write(entry(tmp_path / "files", "org/other"))
        assert not (tmp_path / "models" / "org~mini~~image").exists()
