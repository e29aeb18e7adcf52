"""Convert the image preprocessing that open_clip and timm state for a loaded model to an ImageSpec.

Both resize and crop Pillow images with torchvision. Preprocessing that an ImageSpec cannot express is rejected by name:
padding with a border, resizing by the longer side, and cropping after squashing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from shoal.models.convert.contract.image_processor import read_colours, read_spread
from shoal.models.convert.contract.json_file import JsonFile
from shoal.specs import ImageSpec, ScoreSpec

_FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
"""Pillow's numbers."""

_OPEN_CLIP_FILTERS = {"bicubic": 3, "bilinear": 2, "random": 3}
"""Filters that open_clip accepts; "random" is for training only."""

_COLOURS = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
"""open_clip's values if none are set; a single 0 for all channels also counts as unset."""

LOGITS = "logits"


def open_clip_image_spec(stated: Mapping[str, Any], *, dimension: int, file: str) -> ImageSpec:
    """Convert a `preprocess_cfg`, complete as open_clip attaches it to a model's image tower. Raises ModelFileError,
    naming `file`, for settings that cannot be expressed."""
    stated = dict(stated) | {key: stated.get(key) or value for key, value in _COLOURS.items()}
    config = JsonFile(file, stated, "preprocess_cfg")
    size = _size(config, "size")
    resize = config.text("resize_mode", "shortest")
    if resize not in ("shortest", "squash"):
        raise config.refuse(
            "resize_mode",
            f"{resize!r} is not supported because it pads images; use a model with shortest or squash",
        )
    return _spec(
        config,
        size=size,
        dimension=dimension,
        resize="squash" if resize == "squash" else "shortest",
        edge=size[0],
        resample=_filter(config, _OPEN_CLIP_FILTERS),
    )


def timm_image_spec(stated: Mapping[str, Any], *, dimension: int, labels: tuple[str, ...], file: str) -> ImageSpec:
    """Convert what timm's `resolve_data_config` returns for a model. With `labels` it is a classifier, whose dimension
    is 0. Raises ModelFileError, naming `file`, for settings that cannot be expressed."""
    config = JsonFile(file, dict(stated), "pretrained_cfg")
    sizes = config.data.get("input_size")
    if not isinstance(sizes, list | tuple) or len(sizes) != 3 or sizes[0] != 3:
        raise config.refuse("input_size", f"must hold 3 channels, a height and a width, not {sizes!r}")
    size = _size(config.with_data({"input_size": list(sizes[1:])}), "input_size")
    part = config.number("crop_pct", 0.875)
    mode = config.text("crop_mode", "center")
    if mode not in ("center", "squash"):
        raise config.refuse("crop_mode", f"{mode!r} is not supported because it pads images; use center")
    scaled = tuple(math.floor(side / part) for side in size)
    if mode == "squash" and scaled != size:
        raise config.refuse("crop_pct", f"{part} of a squashed image is not supported; use 1.0")
    if min(scaled) < min(size):
        raise config.refuse("crop_pct", f"{part} is above 1: images would be padded, which is not supported")
    return _spec(
        config,
        size=size,
        dimension=dimension,
        resize="squash" if mode == "squash" else "shortest",
        edge=scaled[0],
        resample=_filter(config, _FILTERS),
        labels=labels,
    )


def _spec(
    config: JsonFile,
    *,
    size: tuple[int, int],
    dimension: int,
    resize: Literal["shortest", "squash"],
    edge: int,
    resample: int,
    labels: tuple[str, ...] = (),
) -> ImageSpec:
    if resize == "shortest" and size[0] != size[1]:
        raise config.refuse("size", f"{list(size)} is not square, which is supported only for squashed images")
    colours = config.with_data({key: _to_triple(value) for key, value in config.data.items()})
    squash = resize == "squash"
    return ImageSpec(
        size=size,
        dimension=0 if labels else dimension,
        output=LOGITS if labels else "image_embeds",
        resize=resize,
        edge=0 if squash else edge,
        resample=resample,
        crop=None if squash else size,
        centre="even",
        mean=read_colours(colours, "mean"),
        std=read_spread(colours, "std"),
        score=_score(labels) if labels else None,
    )


def _score(labels: tuple[str, ...]) -> ScoreSpec:
    activation: Literal["softmax", "sigmoid"] = "softmax" if len(labels) > 1 else "sigmoid"
    return ScoreSpec(labels=labels, activation=activation, output=LOGITS, pairs=False)


def _to_triple(value: Any) -> Any:
    """Convert one number for all channels, or a tuple, to a list of three."""
    if isinstance(value, tuple | list):
        return [*value] * (3 if len(value) == 1 else 1)
    return [value] * 3 if isinstance(value, int | float) and not isinstance(value, bool) else value


def _size(config: JsonFile, key: str) -> tuple[int, int]:
    """Return (height, width), from one number or two."""
    stated = config.data.get(key)
    sides = [stated, stated] if isinstance(stated, int) else stated
    if isinstance(sides, tuple | list) and len(sides) == 1:
        sides = [*sides, *sides]
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        raise config.refuse(key, f"must be a height and a width, not {stated!r}")
    height, width = (config.with_data({key: side}).integer(key, least=1) for side in sides)
    return height, width


def _filter(config: JsonFile, known: Mapping[str, int]) -> int:
    name = config.text("interpolation", "bicubic")
    if name not in known:
        raise config.refuse("interpolation", f"{name!r} is not one of {', '.join(known)}")
    return known[name]
