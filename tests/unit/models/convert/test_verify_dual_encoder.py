"""Verification of dual encoders: equal results pass; other weights or pooling fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

from shoal.errors import VerificationFailed
from shoal.models.convert.contract.tower_types import Towers
from shoal.models.convert.contract.towers import read_towers
from shoal.models.convert.graphs.towers import build_text_tower
from shoal.models.convert.graphs.vision import build_image_tower
from shoal.models.convert.verify import Run, require
from shoal.models.convert.verify_dual_encoder import verify_images, verify_texts
from tests.unit.models.engines import RUNS
from tests.unit.models.tower_checkpoints import FAMILIES, tensors, towers


def runs(folder: Path, model: Towers, engine: str = "onnxruntime") -> tuple[Run, Run]:
    build_text_tower(folder, model, folder / "text.onnx")
    build_image_tower(folder, model, folder / "image.onnx")
    return RUNS[engine](folder / "text.onnx"), RUNS[engine](folder / "image.onnx")


@pytest.mark.parametrize("engine", RUNS)
@pytest.mark.parametrize("family", FAMILIES)
def test_built_graphs_agree_with_numpy(tmp_path: Path, family: str, engine: str) -> None:
    model = read_towers(towers(tmp_path, family))
    text, image = runs(tmp_path, model, engine)
    for verification in (verify_texts(tmp_path, model, tmp_path, text), verify_images(tmp_path, model, image)):
        assert require(verification) is verification
        assert verification.min_cosine > 0.9999999
        assert verification.max_abs_diff < 1e-4
        assert "agrees with a numpy forward pass" in verification.text


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_of_other_weights_do_not(tmp_path: Path, family: str) -> None:
    model = read_towers(towers(tmp_path, family))
    text, image = runs(tmp_path, model)
    stored = tensors(family)
    changed = {name: stored[name].copy() for name in stored if name.endswith("layers.1.mlp.fc2.weight")}
    for values in changed.values():
        values[0] += 1
    save_file(stored | changed, tmp_path / "model.safetensors")
    for verification in (verify_texts(tmp_path, model, tmp_path, text), verify_images(tmp_path, model, image)):
        with pytest.raises(VerificationFailed, match="does not agree with a numpy forward pass"):
            require(verification)


def test_a_text_read_at_another_place_does_not(tmp_path: Path) -> None:
    model = read_towers(towers(tmp_path, "clip"))
    text, _ = runs(tmp_path, replace(model, text=replace(model.text, eos_id=0)))
    assert not verify_texts(tmp_path, model, tmp_path, text).passed


def test_numbers_that_are_none_and_other_shapes_do_not(tmp_path: Path) -> None:
    model = read_towers(towers(tmp_path, "clip"))
    _, image = runs(tmp_path, model)
    none = verify_images(tmp_path, model, lambda i, o: {name: image(i, o)[name] * np.nan for name in o})
    short = verify_images(tmp_path, model, lambda i, o: {name: image(i, o)[name][:, :4] for name in o})
    assert not none.passed
    assert not short.passed
