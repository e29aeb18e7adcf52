"""Weights in open_clip's layout give the same vectors as in transformers' layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shoal.errors import ModelFileError
from shoal.models.convert.contract.tower_types import IMAGE_EMBEDS, PIXELS, TEXT_EMBEDS, Towers
from shoal.models.convert.contract.tower_weights import open_tower_weights
from shoal.models.convert.contract.towers import read_towers
from shoal.models.convert.graphs.towers import build_text_tower
from shoal.models.convert.graphs.vision import build_image_tower
from shoal.models.convert.verify_dual_encoder import verify_images, verify_texts
from shoal.types import Array
from tests.unit.models.convert.contract.test_open_clip import siglip
from tests.unit.models.engines import RUNS
from tests.unit.models.open_clip_checkpoints import WEIGHTS, open_clip
from tests.unit.models.tower_checkpoints import SIZE, tensors, towers

IDS = np.array([[28, 3, 4, 29, 0], [28, 8, 0, 5, 29]], np.int64)


def vectors(folder: Path, model: Towers) -> tuple[Array, Array]:
    build_text_tower(folder, model, folder / "text.onnx")
    build_image_tower(folder, model, folder / "image.onnx")
    run_text, run_image = RUNS["onnxruntime"](folder / "text.onnx"), RUNS["onnxruntime"](folder / "image.onnx")
    for verification in (verify_texts(folder, model, folder, run_text), verify_images(folder, model, run_image)):
        assert verification.passed
    pixels = np.random.default_rng(5).standard_normal((2, 3, SIZE, SIZE)).astype(np.float32)
    texts = run_text({"input_ids": IDS}, (TEXT_EMBEDS,))[TEXT_EMBEDS]
    return texts, run_image({PIXELS: pixels}, (IMAGE_EMBEDS,))[IMAGE_EMBEDS]


def same(got: tuple[Array, Array], expected: tuple[Array, Array]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape
        assert np.allclose(ours, theirs, atol=1e-5)
        assert np.abs(ours).max() > 0.1


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_clip(tmp_path: Path, custom: bool, activation: str) -> None:
    theirs = towers(tmp_path / "a", text={"hidden_act": activation}, vision={"hidden_act": activation})
    ours = open_clip(tmp_path / "b", custom=custom, model={"quick_gelu": activation == "quick_gelu"})
    same(vectors(ours, read_towers(ours)), vectors(theirs, read_towers(theirs)))


def test_siglip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = towers(tmp_path / "a", "siglip", text={"hidden_act": "gelu"}, vision={"hidden_act": "gelu"})
    (tmp_path / "b").mkdir()
    ours = siglip(tmp_path / "b", monkeypatch)
    same(vectors(ours, read_towers(ours)), vectors(theirs, read_towers(theirs)))


def test_the_other_activation_would_be_seen(tmp_path: Path) -> None:
    ours = open_clip(tmp_path / "a")
    other = open_clip(tmp_path / "b", model={"quick_gelu": False})
    for got, expected in zip(vectors(ours, read_towers(ours)), vectors(other, read_towers(other)), strict=True):
        assert np.abs(got - expected).max() > 1e-3


def test_sixteen_bits_are_read(tmp_path: Path) -> None:
    folder = open_clip(tmp_path)
    save_file(
        {name: values.astype(np.float16) for name, values in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS
    )
    weights = open_tower_weights(folder, read_towers(folder))
    expected = tensors("clip")["text_model.encoder.layers.1.self_attn.k_proj.weight"]
    got = weights.get("text_model.encoder.layers.1.self_attn.k_proj.weight", expected.shape)
    assert got.dtype == np.float32
    assert np.array_equal(got, expected.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("visual.proj", None, "this tensor is missing"),
        ("transformer.resblocks.1.attn.in_proj_bias", (12,), r"has shape \[12\], but the configuration says \[36\]"),
        ("text_projection", (8, 12), r"has shape \[8, 12\], but the configuration says \[12, 8\]"),
    ],
)
def test_mismatches_name_the_stored_tensor(
    tmp_path: Path, name: str, shape: tuple[int, ...] | None, words: str
) -> None:
    folder = open_clip(tmp_path)
    stored = load_file(folder / WEIGHTS)
    del stored[name]
    save_file(stored | ({} if shape is None else {name: np.zeros(shape, np.float32)}), folder / WEIGHTS)
    with pytest.raises(ModelFileError, match=rf"^{WEIGHTS}: {name}: {words}"):
        build_text_tower(folder, read_towers(folder), folder / "text.onnx")


def test_joined_tensors_must_be_of_one_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = siglip(tmp_path, monkeypatch)
    stored = load_file(folder / WEIGHTS)
    name = "visual.trunk.attn_pool.kv.weight"
    save_file(stored | {name: stored[name].astype(np.float16)}, folder / WEIGHTS)
    with pytest.raises(ModelFileError, match=rf"^{WEIGHTS}: {name}: is F16, but visual.*q\.weight is F32"):
        open_tower_weights(folder, read_towers(folder))


def test_without_weights(tmp_path: Path) -> None:
    folder = open_clip(tmp_path)
    model = read_towers(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelFileError, match=f"^{WEIGHTS}: is missing"):
        open_tower_weights(folder, model)
