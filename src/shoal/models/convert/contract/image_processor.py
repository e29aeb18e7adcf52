"""Convert preprocessor_config.json of transformers' image processors for CLIP and SigLIP to an ImageSpec.

Missing values get the defaults of the processor's class. Unknown steps are rejected, as are those that produce images
of another size than the tower reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeAlias

from shoal.errors import ModelFileError
from shoal.models.convert.contract.json_file import JsonFile, read_object
from shoal.specs import ImageSpec

FILE = "preprocessor_config.json"
UNIFIED = "processor_config.json"
"""File in which transformers 5 saves all parts of a processor, this one under `image_processor`."""

_Colours: TypeAlias = tuple[float, float, float]
_BICUBIC = 3
_FILTERS = 6
"""Pillow's resampling filters are numbered 0 to 5."""

_CLIP: dict[str, Any] = {
    "do_center_crop": True,
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_SIGLIP: dict[str, Any] = {
    "do_center_crop": False,
    "size": {"height": 224, "width": 224},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_BY_FAMILY = {"clip": _CLIP, "siglip": _SIGLIP}
_BY_CLASS = {
    "CLIPImageProcessor": _CLIP,
    "CLIPFeatureExtractor": _CLIP,
    "SiglipImageProcessor": _SIGLIP,
}
_CLASS_KEYS = ("image_processor_type", "feature_extractor_type")
_STEPS = frozenset(
    {"do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor"}
    | {"do_normalize", "image_mean", "image_std", "do_convert_rgb"}
)
_WITHOUT_EFFECT = frozenset(
    {"processor_class", "_valid_processor_keys", "data_format", "input_data_format", "device", "return_tensors"}
    | {"disable_grouping", "default_to_square", "image_seq_length", *_CLASS_KEYS}
)
"""Without effect on a single image, or only if `size` is a number, where the classes above set it themselves."""


def read_image_spec(
    folder: Path, *, family: Literal["clip", "siglip"], size: int, dimension: int, path: str = ""
) -> ImageSpec:
    """Read the preprocessing to `size` x `size` pixels, for a tower with vectors of `dimension` numbers, from the files
    in `folder / path`.

    Raises ModelFileError, naming file and key, for missing, unknown or contradictory settings.
    """
    config = _config(folder, f"{path}/" if path else "")
    defaults = _defaults(config, _BY_FAMILY[family])
    _refuse_unknown(config)
    config = config.with_data(defaults | {key: value for key, value in config.data.items() if value is not None})
    resize, edge = _resize(config, size)
    crop = _sides(config, "crop_size") if config.boolean("do_center_crop") else None
    if crop is not None and crop != (size, size):
        raise config.refuse("crop_size", f"{list(crop)} is not the tower's image_size, {size} a side")
    if crop is None and resize != "squash":
        raise config.refuse("do_center_crop", f"must be true: otherwise not all images are {size} x {size} pixels")
    resample = config.integer("resample", _BICUBIC)
    if resample >= _FILTERS:
        raise config.refuse("resample", f"{resample} is not one of Pillow's filters, 0 to {_FILTERS - 1}")
    config.boolean("do_convert_rgb", True)  # images are always read as RGB; without it, no others would fit the tower
    normalize = config.boolean("do_normalize", True)
    return ImageSpec(
        size=(size, size),
        dimension=dimension,
        resize=resize,
        edge=edge,
        resample=resample,
        crop=None if resize == "squash" else crop,
        rescale=config.number("rescale_factor", 1 / 255) if config.boolean("do_rescale", True) else 1.0,
        mean=read_colours(config, "image_mean") if normalize else (0.0, 0.0, 0.0),
        std=read_spread(config, "image_std") if normalize else (1.0, 1.0, 1.0),
    )


def _config(folder: Path, prefix: str) -> JsonFile:
    config = read_object(folder, prefix + FILE)
    if config is not None:
        return config
    whole = read_object(folder, prefix + UNIFIED)
    if whole is not None and "image_processor" in whole:
        return JsonFile(whole.name, whole.object("image_processor"))
    raise ModelFileError("is missing, so the image preprocessing is unknown; fetch the model again", file=prefix + FILE)


def _defaults(config: JsonFile, of_family: dict[str, Any]) -> dict[str, Any]:
    for key in _CLASS_KEYS:
        if key in config:
            name = config.text(key).removesuffix("Fast").removesuffix("Pil")
            if name not in _BY_CLASS:
                raise config.refuse(key, f"{name!r} is not supported; Shoal knows {', '.join(_BY_CLASS)}")
            return _BY_CLASS[name]
    return of_family


def _refuse_unknown(config: JsonFile) -> None:
    if "auto_map" in config:
        raise config.refuse("auto_map", "the processor contains custom code, which Shoal never runs")
    for key in ("do_pad", "pad_size"):
        if config.data.get(key):
            raise config.refuse(key, "padding images is not supported")
    config.with_data({key: value for key, value in config.data.items() if value is not None}).only(
        _STEPS | _WITHOUT_EFFECT | {"do_pad", "pad_size"}
    )


def _resize(config: JsonFile, size: int) -> tuple[Literal["", "shortest", "squash"], int]:
    """Return the kind of resizing, and the shorter side's pixels if that determines the size."""
    if not config.boolean("do_resize", True):
        return "", 0
    stated = config.data["size"]
    if isinstance(stated, list) or (isinstance(stated, dict) and "shortest_edge" not in stated):
        sides = _sides(config, "size")
        if sides != (size, size):
            raise config.refuse("size", f"{list(sides)} is not the tower's image_size, {size} a side")
        return "squash", 0
    if isinstance(stated, dict) and set(stated) != {"shortest_edge"}:
        raise config.refuse("size", f"{stated!r} is not supported; a shortest_edge or height and width are")
    edges = stated if isinstance(stated, dict) else {"shortest_edge": stated}
    return "shortest", config.with_data({"size": edges["shortest_edge"]}).integer("size", least=1)


def _sides(config: JsonFile, key: str) -> tuple[int, int]:
    """Return height and width, from an object with both, a list of them, or one number for both."""
    stated = config.data.get(key)
    values: Any = [stated, stated]
    if isinstance(stated, list) and len(stated) == 2:
        values = stated
    elif isinstance(stated, dict) and set(stated) == {"height", "width"}:
        values = [stated["height"], stated["width"]]
    sides = [side for side in values if isinstance(side, int) and not isinstance(side, bool) and side > 0]
    if len(sides) != 2:
        raise config.refuse(key, f"must hold a height and a width in pixels, not {stated!r}")
    return sides[0], sides[1]


def read_colours(config: JsonFile, key: str) -> _Colours:
    """Return numbers for red, green and blue. Raises ModelFileError for anything else."""
    stated = config.data[key]
    if (
        not isinstance(stated, list)
        or len(stated) != 3
        or not all(isinstance(each, int | float) and not isinstance(each, bool) for each in stated)
    ):
        raise config.refuse(key, f"must hold three numbers, not {stated!r}")
    red, green, blue = map(float, stated)
    return red, green, blue


def read_spread(config: JsonFile, key: str) -> _Colours:
    """Return such numbers to divide by, all above 0."""
    spread = read_colours(config, key)
    if min(spread) <= 0:
        raise config.refuse(key, f"must hold numbers above 0, not {list(spread)}")
    return spread
