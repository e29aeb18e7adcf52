"""The graphs of CLIP and SigLIP on both engines, compared with forward passes in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

from shoal.errors import ModelFileError
from shoal.models.convert.contract.tower_types import IMAGE_EMBEDS, PIXELS, TEXT_EMBEDS, Towers
from shoal.models.convert.contract.towers import read_towers
from shoal.models.convert.dual_encoder_reference import embed_images, embed_texts
from shoal.models.convert.graphs import builder
from shoal.models.convert.graphs.towers import build_text_tower
from shoal.models.convert.graphs.vision import build_image_tower
from shoal.models.convert.verify import min_cosine
from shoal.types import Array
from tests.unit.models.engines import RUNS
from tests.unit.models.tower_checkpoints import CONTEXT, FAMILIES, SIZE, WORDS, tensors, towers

ACTIVATIONS = ("quick_gelu", "gelu", "gelu_pytorch_tanh")
CLIP_END = len(WORDS["clip"]) - 1
CLIP_START = CLIP_END - 1


def made(folder: Path, family: str, **changes: Any) -> tuple[Path, Towers]:
    towers(folder, family, **changes)
    return folder, read_towers(folder)


def text_embeds(folder: Path, model: Towers, ids: Array, engine: str = "onnxruntime") -> Array:
    build_text_tower(folder, model, folder / "text.onnx")
    return RUNS[engine](folder / "text.onnx")({"input_ids": ids}, (TEXT_EMBEDS,))[TEXT_EMBEDS]


def close(got: Array, expected: Array) -> None:
    assert got.shape == expected.shape
    assert min_cosine(got, expected) > 0.9999999
    assert np.abs(got - expected).max() < 1e-4


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_graphs_agree_with_numpy(tmp_path: Path, family: str, activation: str, engine: str) -> None:
    acts = {"hidden_act": activation}
    folder, model = made(tmp_path, family, text=acts, vision=acts)
    random = np.random.default_rng(4)
    ids = random.integers(2, 20, (5, CONTEXT))
    ids[:, [3, 9]] = CLIP_END if family == "clip" else 1
    for batch in (ids, ids[:1], ids[:, :7]):
        got = text_embeds(folder, model, batch, engine)
        assert got.shape == (len(batch), model.dimension)
        close(got, embed_texts(folder, model, list(batch)))
    built = build_image_tower(folder, model, folder / "image.onnx")
    assert built.files == ("image.onnx",)
    run = RUNS[engine](folder / "image.onnx")
    pixels = random.standard_normal((3, 3, SIZE, SIZE)).astype(np.float32)
    for images in (pixels, pixels[1:2]):
        got = run({PIXELS: images}, (IMAGE_EMBEDS,))[IMAGE_EMBEDS]
        close(got, embed_images(folder, model, images))


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("legacy", [False, True])
def test_clip_is_read_at_the_first_end_and_sees_nothing_behind_it(tmp_path: Path, legacy: bool, engine: str) -> None:
    folder, model = made(tmp_path, "clip", text={"eos_token_id": 2} if legacy else None)
    assert model.text.eos_id == (None if legacy else CLIP_END)
    alone = np.array([[CLIP_START, 3, 2, CLIP_END]])
    expected = text_embeds(folder, model, alone, engine)
    for padding in (model.text_spec.pad_id, CLIP_END, 5):
        padded = np.pad(alone, ((0, 0), (0, 6)), constant_values=padding)
        close(text_embeds(folder, model, padded, engine), expected)
    other = np.array([[CLIP_START, CLIP_END, 2, CLIP_END]])
    assert min_cosine(text_embeds(folder, model, other, engine), expected) < 0.99


def test_the_stated_end_counts_and_not_the_highest_id(tmp_path: Path) -> None:
    folder, model = made(tmp_path, "clip")
    changed = replace(model, text=replace(model.text, eos_id=7))
    ids = np.array([[CLIP_START, 3, 7, CLIP_END]])
    got = text_embeds(folder, changed, ids)
    close(got, embed_texts(folder, changed, [ids[0]]))
    close(got, text_embeds(folder, changed, ids[:, :3]))
    assert min_cosine(got, text_embeds(folder, model, ids)) < 0.99


@pytest.mark.parametrize("engine", RUNS)
def test_siglip_without_its_padding_has_other_vectors(tmp_path: Path, engine: str) -> None:
    folder, model = made(tmp_path, "siglip")
    short = np.array([[5, 6, 1]])
    whole = np.pad(short, ((0, 0), (0, CONTEXT - 3)), constant_values=model.text_spec.pad_id)
    expected = text_embeds(folder, model, whole, engine)
    close(expected, embed_texts(folder, model, list(whole)))
    assert min_cosine(text_embeds(folder, model, short, engine), expected) < 0.99
    wrong = np.pad(short, ((0, 0), (0, CONTEXT - 3)), constant_values=1)
    assert min_cosine(text_embeds(folder, model, wrong, engine), expected) < 0.999


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_matters(tmp_path: Path, family: str) -> None:
    """The graphs use the old weights and numpy the new: a tensor that either ignores would show no difference."""
    folder, model = made(tmp_path, family)
    build_text_tower(folder, model, folder / "text.onnx")
    build_image_tower(folder, model, folder / "image.onnx")
    ids = np.array([[CLIP_START, 3, 2, CLIP_END]]) if family == "clip" else np.arange(4, 4 + CONTEXT)[None]
    pixels = np.random.default_rng(0).standard_normal((1, 3, SIZE, SIZE)).astype(np.float32)
    text = RUNS["onnxruntime"](folder / "text.onnx")({"input_ids": ids}, (TEXT_EMBEDS,))[TEXT_EMBEDS]
    image = RUNS["onnxruntime"](folder / "image.onnx")({PIXELS: pixels}, (IMAGE_EMBEDS,))[IMAGE_EMBEDS]
    stored = tensors(family)
    for name, values in stored.items():
        # Not of one direction alone: adding the same to all keys changes no attention, as softmax has it.
        noise = np.random.default_rng(1).standard_normal(values.shape).astype(np.float32)
        if name.startswith("logit_") or name.endswith("k_proj.bias"):
            continue
        save_file(stored | {name: values + noise}, folder / "model.safetensors")
        got = embed_images(folder, model, pixels), embed_texts(folder, model, list(ids))
        changed_outputs = np.abs(got[0] - image).max() > 1e-3, np.abs(got[1] - text).max() > 1e-3
        assert changed_outputs == (name.startswith("vis"), name.startswith("text")), name


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_and_odd_tensors_are_refused_by_name(tmp_path: Path, family: str) -> None:
    folder, model = made(tmp_path, family)
    stored = tensors(family)
    for name, values in stored.items():
        if name.startswith("logit_"):
            continue
        build = build_text_tower if name.startswith("text") else build_image_tower
        for changed in ({}, {name: np.zeros((*values.shape, 2), np.float32)}):
            rest = {key: value for key, value in stored.items() if key != name}
            save_file(rest | changed, folder / "model.safetensors")
            with pytest.raises(ModelFileError, match=name.replace(".", r"\.")):
                build(folder, model, folder / "out.onnx")


def test_large_weights_are_external_and_progress_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = made(tmp_path, "clip")
    reports: list[float] = []
    monkeypatch.setattr(builder, "INLINE_BYTES", 10)
    built = build_image_tower(folder, model, folder / "image.onnx", progress=reports.append)
    assert built.files == ("image.onnx", "image.onnx_data")
    assert reports[-1] == 1.0
    assert reports == sorted(reports)
    pixels = np.ones((1, 3, SIZE, SIZE), np.float32)
    got = RUNS["onnxruntime"](folder / "image.onnx")({PIXELS: pixels}, (IMAGE_EMBEDS,))[IMAGE_EMBEDS]
    close(got, embed_images(folder, model, pixels))
    stored = tensors("clip")
    assert built.parameters < sum(v.size for k, v in stored.items() if k.startswith("vis"))  # one row became another
