"""Image settings of open_clip and timm as specs; tests/convert compares the pixels."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ModelFileError
from shoal.models.convert.contract.transforms import open_clip_image_spec, timm_image_spec
from shoal.pipelines.image.preprocessing import Preprocessing
from shoal.specs import ImageSpec, ScoreSpec

CLIP = {"size": (224, 224), "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
TIMM = {"input_size": (3, 224, 224), "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "crop_pct": 0.875}


def clip(**changes: Any) -> ImageSpec:
    return open_clip_image_spec(CLIP | changes, dimension=8, file="f.json")


def timm(labels: tuple[str, ...] = (), **changes: Any) -> ImageSpec:
    return timm_image_spec(TIMM | changes, dimension=8, labels=labels, file="f.json")


def test_shortest_and_squash() -> None:
    assert clip() == ImageSpec(
        size=(224, 224),
        dimension=8,
        edge=224,
        crop=(224, 224),
        centre="even",
        mean=(0.1, 0.2, 0.3),
        std=(0.4, 0.5, 0.6),
    )
    squashed = clip(resize_mode="squash", size=[64, 96], interpolation="bilinear")
    assert (squashed.resize, squashed.size, squashed.crop, squashed.edge) == ("squash", (64, 96), None, 0)
    assert squashed.resample == 2
    assert clip(interpolation="random", size=99).resample == 3
    assert clip(size=[99]).size == (99, 99)


def test_open_clip_takes_its_own_colours_for_none() -> None:
    """It reads a lone 0 as absent, and another lone number for all channels."""
    assert clip(mean=0.0).mean == clip(mean=None).mean == (0.48145466, 0.4578275, 0.40821073)
    assert clip(std=[]).std == (0.26862954, 0.26130258, 0.27577711)
    assert clip(mean=[0.0, 0.0, 0.0], std=0.5).std == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("size", "part", "edge"), [(224, 0.875, 256), (224, 0.9, 248), (288, 0.95, 303), (224, 1.0, 224), (75, 0.81, 92)]
)
def test_the_part_that_is_kept(size: int, part: float, edge: int) -> None:
    """The shorter side becomes size / crop_pct, rounded down."""
    spec = timm(input_size=[3, size, size], crop_pct=part)
    assert (spec.resize, spec.edge, spec.crop) == ("shortest", edge, (size, size))


def test_a_classifier() -> None:
    spec = timm(("cat", "dog"))
    assert (spec.dimension, spec.output) == (0, "logits")
    assert spec.score == ScoreSpec(labels=("cat", "dog"), activation="softmax", output="logits", pairs=False)
    alone = timm(("cat",)).score
    assert alone is not None and alone.activation == "sigmoid"
    assert timm().score is None


def test_squashed_whole() -> None:
    spec = timm(crop_mode="squash", crop_pct=1.0, input_size=(3, 160, 192), interpolation="lanczos")
    assert (spec.resize, spec.size, spec.crop, spec.resample) == ("squash", (160, 192), None, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resize_mode": "longest"}, r"f\.json: preprocess_cfg\.resize_mode: 'longest' is not supported"),
        ({"interpolation": "lanczos"}, r"preprocess_cfg\.interpolation: 'lanczos' is not one of bicubic"),
        ({"size": [64, 96]}, r"preprocess_cfg\.size: \[64, 96\] is not square"),
        ({"size": [1, 2, 3]}, r"preprocess_cfg\.size: must be a height and a width"),
        ({"size": 0}, r"preprocess_cfg\.size: must be a whole number of at least 1"),
        ({"size": None}, r"preprocess_cfg\.size: must be a height and a width"),
        ({"mean": [0.1]* 4}, r"preprocess_cfg\.mean: must hold three numbers"),
        ({"std": [0.5, 0.0, 0.5]}, r"preprocess_cfg\.std: must hold numbers above 0"),
    ],
)  # fmt: skip
def test_invalid_open_clip_transforms(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        clip(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crop_mode": "border"}, r"f\.json: pretrained_cfg\.crop_mode: 'border' is not supported"),
        ({"crop_mode": "squash"}, r"pretrained_cfg\.crop_pct: 0\.875 of a squashed image"),
        ({"crop_pct": 1.2}, r"pretrained_cfg\.crop_pct: 1\.2 is above 1"),
        ({"interpolation": "magic"}, r"pretrained_cfg\.interpolation: 'magic' is not one of nearest"),
        ({"input_size": (1, 28, 28)}, r"pretrained_cfg\.input_size: must hold 3 channels"),
        ({"input_size": 224}, r"pretrained_cfg\.input_size: must hold 3 channels"),
        ({"input_size": (3, 64, 96)}, r"pretrained_cfg\.size: \[64, 96\] is not square"),
        ({"std": True}, r"pretrained_cfg\.std: must hold three numbers"),
    ],
)
def test_invalid_timm_transforms(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        timm(**changes)


@given(st.integers(1, 600), st.floats(0.01, 1.5), st.sampled_from(["center", "squash", "border"]))
def test_whatever_is_not_refused_can_be_prepared(size: int, part: float, mode: str) -> None:
    try:
        spec = timm(input_size=(3, size, size), crop_pct=part, crop_mode=mode)
    except ModelFileError:
        return
    assert Preprocessing(spec).spec.size == (size, size)
