"""Resize, crop and normalization, compared with a plain implementation of the reference's rules."""

from __future__ import annotations

import io
from math import ceil
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shoal.errors import ModelFileError
from shoal.pipelines.image import preprocessing
from shoal.pipelines.image.preprocessing import Preprocessing
from shoal.specs import ImageSpec
from shoal.types import Array
from tests.unit.pipelines.image.image_kit import CLIP, SIGLIP, drawn, image_files, saved, turned


def resized_whole(spec: ImageSpec, image: Image.Image) -> Array:
    """The whole image resized, then cropped from the center of a canvas of zeros."""
    width, height = image.size
    if spec.resize == "squash":
        image = image.resize(spec.size[::-1], spec.resample)
    elif spec.resize:
        long = int(spec.edge * max(width, height) / min(width, height))
        image = image.resize((spec.edge, long) if width <= height else (long, spec.edge), spec.resample)
    expected = (spec.size[1], spec.size[0])
    frame: list[int] = []
    for have, want in zip(image.size, expected, strict=True):
        frame.append((have - want) // 2 if have >= want else -ceil((want - have) / 2))
    box = (frame[0], frame[1], frame[0] + expected[0], frame[1] + expected[1])
    return np.asarray(image.crop(box))  # Pillow puts zeros outside


def small(spec: ImageSpec = CLIP, **fields: Any) -> ImageSpec:
    return msgspec.structs.replace(spec, **fields)


@pytest.mark.parametrize("spec", [CLIP, SIGLIP, small(resample=2), small(SIGLIP, resample=1)])
@pytest.mark.parametrize("name", ["wide", "tall", "very wide", "one pixel", "odd", "large", "a line", "below the edge"])
def test_images_are_resized_as_a_whole(spec: ImageSpec, name: str) -> None:
    """Bit for bit."""
    expected = resized_whole(spec, Image.open(io.BytesIO(image_files()[name])).convert("RGB"))
    np.testing.assert_array_equal(Preprocessing(spec).pixels(image_files()[name]), expected)


@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(1, 70),
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
    st.sampled_from(["", "shortest", "squash"]),
    st.integers(0, 5),
)
def test_any_size_becomes_the_model_s(
    width: int, height: int, edge: int, size: tuple[int, int], resize: str, resample: int
) -> None:
    """For any size and filter, with edges smaller and larger than the crop."""
    spec = small(size=size, crop=size, edge=edge, resize=resize, resample=resample)
    image = drawn(width, height)
    pixels = Preprocessing(spec).pixels(saved(image, "BMP"))
    np.testing.assert_array_equal(pixels, resized_whole(spec, image))


@pytest.mark.parametrize("name", ["wide", "tall", "very wide", "very tall", "a line", "odd", "large", "EXIF 6"])
@pytest.mark.parametrize("edge", [200, 224, 260])
@pytest.mark.parametrize("resample", [0, 1, 2, 3, 4, 5])
def test_a_window_of_a_resize_is_as_good_as_the_whole(
    name: str, edge: int, resample: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 1/255; nearly everywhere for "nearest" and "box", where border pixels are in or out."""
    steps = Preprocessing(small(edge=edge, resample=resample))
    whole = steps.pixels(image_files()[name]).astype(int)
    monkeypatch.setattr(preprocessing, "_WHOLE", 0)
    apart = np.abs(steps.pixels(image_files()[name]) - whole)
    assert (apart > 1).mean() < 0.02 if resample in (0, 4) else apart.max() <= 1


def test_a_line_does_not_become_gigabytes() -> None:
    """Resized as a whole, 1 x 60000 would be 224 x 13 million pixels."""
    steps = Preprocessing(CLIP)
    assert steps.resized_size(1, 60_000) == (224, 13_440_000)
    line = np.zeros((60_000, 1, 3), dtype=np.uint8)
    line[30_000:] = 255
    pixels = steps.pixels(saved(Image.fromarray(line), "PNG"))
    assert pixels[0].max() < 130 < pixels[-1].min()


@pytest.mark.parametrize("spec", [CLIP, SIGLIP])
def test_numbers_are_those_of_the_reference(spec: ImageSpec) -> None:
    """Scaled in float64, rounded to float32, then minus mean and divided by std in float32; by channel, first axis."""
    pixels = np.asarray(drawn(224, 224))
    values = Preprocessing(spec).values(pixels)
    assert values.shape == (3, 224, 224)
    assert values.dtype == np.float32
    assert values.flags.c_contiguous
    for band in range(3):
        plain = (pixels[..., band] / 255 - spec.mean[band]) / spec.std[band]
        np.testing.assert_allclose(values[band], plain, atol=1e-6)


def test_mistakes_would_show() -> None:
    """A squashed image, another filter, a missing rotation and swapped channels each differ by far more than 1/255."""
    upright, data = Preprocessing(CLIP).pixels(turned(1)), image_files()["odd"]
    right = Preprocessing(CLIP).pixels(data).astype(int)
    wrong = {
        "squash": (Preprocessing(small(resize="squash")).pixels(data), right),
        "filter": (Preprocessing(small(resample=0)).pixels(data), right),
        "bilinear": (Preprocessing(small(resample=2)).pixels(data), right),
        "channels": (right[..., ::-1], right),
        "orientation": (Preprocessing(CLIP).pixels(turned(3)), upright),
        "crop": (np.roll(right, 1, axis=0), right),
    }
    for name, (each, expected) in wrong.items():
        assert np.abs(each.astype(int) - expected).max() > 10, name


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"edge": 0}, "size"),
        ({"crop": None}, "size"),
        ({"resize": "", "crop": None}, "size"),
        ({"crop": (200, 200)}, "crop_size"),
        ({"resample": 6}, "resample"),
        ({"std": (1.0, 0.0, 1.0)}, "image_std"),
    ],
)
def test_specs_that_lead_nowhere_are_refused(fields: dict[str, Any], key: str) -> None:
    """The error names the file and the key."""
    with pytest.raises(ModelFileError) as caught:
        Preprocessing(small(**fields))
    assert (caught.value.file, caught.value.key) == ("preprocessor_config.json", key)


def test_resize_memory_is_counted() -> None:
    """The first pass has one row per image row, whatever the height."""
    steps = Preprocessing(SIGLIP)
    assert steps._extra(600, 65_000) > 4 * 224 * 65_000
    assert Preprocessing(CLIP)._extra(1, 65_000) < 100_000_000


@pytest.mark.parametrize(("more", "down", "even"), [(0, 0, 0), (1, 0, 0), (2, 1, 1), (3, 1, 2), (5, 2, 2), (7, 3, 4)])
@pytest.mark.parametrize("large", [False, True])
def test_the_middle_of_an_odd_rest(more: int, down: int, even: int, large: bool) -> None:
    """transformers rounds half of an odd rest down, torchvision to even: for a crop of the resized image, of the
    original, and of a window of a long image."""
    edge = 32
    size = (edge, 2 * edge + more if not large else 40 * edge + more)
    image = drawn(size[0], size[1])
    for centre, start in (("down", down), ("even", even)):
        want = (size[1] - more, edge)
        spec = small(size=want, crop=want, edge=edge, centre=centre)
        got = Preprocessing(spec).pixels(saved(image, "PNG"))
        assert np.array_equal(got, np.asarray(image)[start : start + want[0]])
