"""Apply a model's image preprocessing with the exact results of transformers' PIL processors."""

from __future__ import annotations

from math import ceil

import numpy as np
from PIL import Image

from shoal.errors import ModelFileError
from shoal.pipelines.image.budget import SHARED, Budget
from shoal.pipelines.image.pixels import decode_channels
from shoal.specs import ImageSpec
from shoal.types import Array, Vectors

_FILE = "preprocessor_config.json"
_WHOLE = 1 << 20
"""Maximum pixels of a resized image that is computed whole before it is cropped."""
_SUPPORT = 4
"""Pillow's filters reach three pixels of the smaller side, plus one for rounding."""


class Preprocessing:
    """The preprocessing steps of one spec. Raises ModelFileError if they do not produce images of the model's size."""

    def __init__(self, spec: ImageSpec, *, budget: Budget = SHARED) -> None:
        if spec.resize == "shortest" and spec.edge < 1:
            raise ModelFileError("the shorter side must become at least 1 pixel", file=_FILE, key="size")
        if spec.resize != "squash" and spec.crop is None:
            raise ModelFileError("images would keep their shapes, and the model takes one", file=_FILE, key="size")
        if spec.crop is not None and spec.crop != spec.size:
            raise ModelFileError(f"the model takes {spec.size}, not {spec.crop}", file=_FILE, key="crop_size")
        if spec.resample not in range(6):
            raise ModelFileError("Pillow's filters are 0 to 5", file=_FILE, key="resample")
        if not all(spec.std):
            raise ModelFileError("no channel can be divided by 0", file=_FILE, key="image_std")
        self.spec = spec
        self.budget = budget
        self._filter = Image.Resampling(spec.resample)
        self._mean = np.array(spec.mean, dtype=np.float32)
        self._std = np.array(spec.std, dtype=np.float32)

    def pixels(self, data: bytes, budget: Budget | None = None) -> Array:
        """Decode, resize and crop an image: uint8 [height, width, 3]. Raises InvalidValue as `decode_channels` does."""
        resized = decode_channels(data, self._resize, extra=self._extra, budget=budget or self.budget)
        return resized if resized.shape[:2] == self.spec.size else self._crop(resized)

    def values(self, pixels: Array) -> Vectors:
        """Convert `pixels` to normalized float32 [3, height, width]. Scales in float64 and rounds to float32 once, then
        normalizes in float32, as the reference does."""
        scaled = (pixels.astype(np.float64) * self.spec.rescale).astype(np.float32)
        return np.ascontiguousarray(((scaled - self._mean) / self._std).transpose(2, 0, 1))

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        """Return (width, height) after the resize, before the crop."""
        if self.spec.resize == "squash":
            return self.spec.size[1], self.spec.size[0]
        if not self.spec.resize:
            return width, height
        edge = self.spec.edge
        long = int(edge * max(width, height) / min(width, height))
        return (edge, long) if width <= height else (long, edge)

    def _resize(self, image: Image.Image) -> Image.Image:
        size = self.resized_size(*image.size)
        if size == image.size:
            return self._crop_middle(image)
        if self.spec.resize == "squash" or size[0] * size[1] <= _WHOLE:
            return image.resize(size, self._filter)
        return self._resize_window(image, size)

    def _crop_middle(self, image: Image.Image) -> Image.Image:
        """Crop large images here to skip pixels that are not needed; `_crop` adds zeros around small ones."""
        height, width = self.spec.size
        if image.width < width or image.height < height:
            return image
        left, top = self._start(image.width - width), self._start(image.height - height)
        return image.crop((left, top, left + width, top + height))

    def _resize_window(self, image: Image.Image, size: tuple[int, int]) -> Image.Image:
        """Compute only the middle of the longer side of a resize to `size`, from the pixels that it depends on.
        Otherwise an image one pixel wide would become gigabytes."""
        axis = int(size[1] > size[0])
        scale = image.size[axis] / size[axis]
        length = min(size[axis], self.spec.size[1 - axis])
        first = self._start(size[axis] - length)
        margin = _SUPPORT * max(1.0, scale)
        start = max(0, int(first * scale - margin))
        end = min(image.size[axis], ceil((first + length) * scale + margin))
        # Relative to the part, since Pillow keeps the box in float32.
        low, high = first * scale - start, min((first + length) * scale - start, float(end - start))
        if axis:
            part = image.crop((0, start, image.width, end))
            return part.resize((size[0], length), self._filter, box=(0.0, low, float(image.width), high))
        part = image.crop((start, 0, end, image.height))
        return part.resize((length, size[1]), self._filter, box=(low, 0.0, high, float(image.height)))

    def _extra(self, width: int, height: int) -> int:
        """Bytes for the rows of the resize's first pass, its result, and the arrays made from it."""
        size = self.resized_size(width, height)
        if size == (width, height) or (self.spec.resize == "shortest" and size[0] * size[1] > _WHOLE):
            most = max(*self.spec.size, self.spec.edge)
            size = min(size[0], most), min(size[1], most)
        return 4 * size[0] * height + 10 * size[0] * size[1]

    def _crop(self, pixels: Array) -> Array:
        """Crop [height, width, 3] to the model's size around the middle, with zeros outside. If the padding is odd, the
        extra row or column goes to the top and left, as in transformers."""
        result = np.zeros((*self.spec.size, 3), dtype=pixels.dtype)
        ours: list[slice] = []
        theirs: list[slice] = []
        for have, want in zip(pixels.shape[:2], self.spec.size, strict=True):
            start = self._start(max(0, have - want))
            pad = ceil((want - have) / 2) if have < want else 0
            ours.append(slice(pad, pad + min(have, want)))
            theirs.append(slice(start, start + min(have, want)))
        result[ours[0], ours[1]] = pixels[theirs[0], theirs[1]]
        return result

    def _start(self, more: int) -> int:
        """Return where the middle begins on a side that is `more` pixels too large."""
        return more // 2 if self.spec.centre == "down" else round(more / 2)
