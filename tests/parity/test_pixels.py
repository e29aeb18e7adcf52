"""Pixels compared with transformers' own processors based on Pillow and NumPy, before and after normalization."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from shoal.pipelines.image.preprocessing import Preprocessing
from shoal.specs import ImageSpec
from shoal.types import Array
from tests.unit.pipelines.image.image_kit import CLIP, SIGLIP, deep, image_files, saved

pytestmark = pytest.mark.parity

CASES: dict[str, tuple[Any, ImageSpec]] = {
    "clip": (CLIPImageProcessorPil(), CLIP),
    "clip of 336": (
        CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}),
        msgspec.structs.replace(CLIP, size=(336, 336), crop=(336, 336), edge=336),
    ),
    "clip, odd, with a border": (
        CLIPImageProcessorPil(size={"shortest_edge": 61}, crop_size={"height": 75, "width": 58}, resample=2),
        msgspec.structs.replace(CLIP, size=(75, 58), crop=(75, 58), edge=61, resample=2),
    ),
    "siglip": (SiglipImageProcessorPil(), SIGLIP),
    "siglip2": (
        SiglipImageProcessorPil(size={"height": 256, "width": 256}, resample=2),
        msgspec.structs.replace(SIGLIP, size=(256, 256), resample=2),
    ),
    "without a resize": (
        CLIPImageProcessorPil(do_resize=False),
        msgspec.structs.replace(CLIP, resize="", edge=0),
    ),
}


def upright(data: bytes) -> Image.Image:
    """Rotate as transformers' `load_image` does. Alpha is left to the processor, which composes it over white;
    `load_image` itself drops it, and shows the hidden colors."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data)))


def reference(processor: Any, decoded: Image.Image, **options: Any) -> Array:
    values: Array = processor(images=decoded, return_tensors="np", **options)["pixel_values"][0]
    return values


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", image_files())
def test_pixels_are_those_of_transformers(case: str, name: str) -> None:
    """Before normalization within 1/255, and all but lines bit for bit; after it equally close."""
    processor, spec = CASES[case]
    steps = Preprocessing(spec)
    pixels = steps.pixels(image_files()[name])
    plain = reference(processor, upright(image_files()[name]), do_rescale=False, do_normalize=False)
    apart = np.abs(pixels.transpose(2, 0, 1).astype(int) - plain.astype(int)).max()
    assert apart <= (1 if name.startswith("very") or name == "a line" else 0)
    values = reference(processor, upright(image_files()[name]))
    assert values.dtype == np.float32
    bound = 1.001 * apart / 255 / min(spec.std)
    np.testing.assert_allclose(steps.values(pixels), values, rtol=0, atol=bound if apart else 0)


def test_there_are_enough_images() -> None:
    """They are of every supported kind."""
    assert len(image_files()) >= 30


@pytest.mark.parametrize("mistake", [{"resize": "squash"}, {"resample": 2}, {"edge": 256}, {"mean": (0.5, 0.5, 0.5)}])
def test_mistakes_are_caught(mistake: dict[str, Any]) -> None:
    """Squash for crop, another filter, another edge, another mean: each exceeds the tolerance on many of the images."""
    processor, spec = CASES["clip"]
    steps = Preprocessing(msgspec.structs.replace(spec, **mistake))
    caught = 0
    for data in image_files().values():
        values = steps.values(steps.pixels(data))
        caught += np.abs(values - reference(processor, upright(data))).max() > 2 / 255 / min(spec.std)
    assert caught > len(image_files()) / 2


def test_sixteen_bits_differ_on_purpose() -> None:
    """Pillow's conversion clips values at 255, and so does the reference: nearly all of such an image is white."""
    processor, spec = CASES["siglip"]
    plain = reference(processor, deep(), do_rescale=False, do_normalize=False)
    assert np.median(plain) == 255
    assert 100 < np.median(Preprocessing(spec).pixels(saved(deep(), "PNG"))) < 155
