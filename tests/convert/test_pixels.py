"""Pixels against the transforms of open_clip and timm, which torchvision makes on Pillow's images.

Both sides get pixels that were decoded here, upright and over white: reading files is no matter of these libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shoal.models.convert.contract.transforms import open_clip_image_spec, timm_image_spec
from shoal.pipelines.image.pixels import decode
from shoal.pipelines.image.preprocessing import Preprocessing
from shoal.specs import ImageSpec
from shoal.types import Array
from tests.convert.models import MEAN, STD
from tests.unit.pipelines.image.image_kit import image_files

pytestmark = [pytest.mark.convert, pytest.mark.filterwarnings("ignore")]

OPEN_CLIP: dict[str, dict[str, Any]] = {
    "clip": {},
    "squash": {"resize_mode": "squash", "mean": [0.5] * 3, "std": [0.5] * 3},
    "bilinear of 256": {"size": 256, "interpolation": "bilinear", "mean": 0.0, "std": 1.0},
    "random": {"size": [99, 99], "interpolation": "random"},
    "squash, not square": {"size": [64, 96], "resize_mode": "squash"},
}
TIMM: dict[str, dict[str, Any]] = {
    "default": {"input_size": (3, 224, 224)},
    "crop_pct 0.9 of 288": {"input_size": (3, 288, 288), "crop_pct": 0.9, "interpolation": "bilinear"},
    "whole": {"crop_pct": 1.0, "mean": (0.5,), "std": (0.5,)},
    "squash": {"crop_pct": 1.0, "crop_mode": "squash", "input_size": (3, 160, 192)},
    "odd": {"input_size": (3, 75, 75), "crop_pct": 0.81},
}


def open_clip(case: str) -> tuple[ImageSpec, Any]:
    from open_clip.transform import PreprocessCfg, image_transform_v2

    stated = {"size": 224, "mode": "RGB", "mean": MEAN, "std": STD} | OPEN_CLIP[case]
    return open_clip_image_spec(stated, dimension=8, file="x"), image_transform_v2(
        PreprocessCfg(**stated), is_train=False
    )


def timm(case: str) -> tuple[ImageSpec, Any]:
    from timm.data import create_transform, resolve_data_config

    stated = resolve_data_config(pretrained_cfg=TIMM[case])
    for key in ("mean", "std"):
        if len(stated[key]) == 1:
            stated[key] = stated[key] * 3
    return timm_image_spec(stated, dimension=8, labels=(), file="x"), create_transform(**stated)


CASES: list[tuple[str, Callable[[str], tuple[ImageSpec, Any]]]] = [
    *((case, open_clip) for case in OPEN_CLIP),
    *((case, timm) for case in TIMM),
]


def reference(transform: Any, image: Image.Image) -> tuple[Array, Array]:
    """Return the reference values, and the pixels before scaling."""
    values: Array = transform(image).numpy()
    for step in transform.transforms[:-2]:
        image = step(image)
    return values, np.asarray(image.convert("RGB"))


@pytest.mark.parametrize("name", image_files())
@pytest.mark.parametrize(("case", "made"), CASES, ids=[f"{made.__name__} {case}" for case, made in CASES])
def test_pixels_are_those_of_torchvision(case: str, made: Callable[[str], tuple[ImageSpec, Any]], name: str) -> None:
    """Before normalization all pixels are within 1/255 and all but a few equal; after it the same bound holds."""
    spec, transform = made(case)
    image = Image.fromarray(decode(image_files()[name]))
    values, plain = reference(transform, image)
    steps = Preprocessing(spec)
    pixels = steps.pixels(image_files()[name])
    apart = np.abs(pixels.astype(int) - plain.astype(int)).max()
    assert apart <= (1 if name.startswith("very") or name == "a line" else 0)
    np.testing.assert_allclose(steps.values(pixels), values, rtol=0, atol=1.001 * apart / 255 / min(spec.std) + 1e-6)


def test_there_are_enough_images() -> None:
    assert len(image_files()) >= 30


@pytest.mark.parametrize("mistake", [{"resize": "squash", "edge": 0, "crop": None}, {"resample": 2}, {"edge": 256}])
def test_mistakes_are_caught(mistake: dict[str, Any]) -> None:
    """Squash for crop, another filter, another edge: each is past the bound on many of the images."""
    import msgspec

    spec, transform = open_clip("clip")
    steps = Preprocessing(msgspec.structs.replace(spec, **mistake))
    caught = 0
    for data in image_files().values():
        _, plain = reference(transform, Image.fromarray(decode(data)))
        caught += np.abs(steps.pixels(data).astype(int) - plain.astype(int)).max() > 2
    assert caught > len(image_files()) / 2
