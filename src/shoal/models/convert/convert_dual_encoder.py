"""Convert a repository of two towers, as published, to two graphs and a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.models.convert.contract.tower_tokenizer import write_tower_tokenizer
from shoal.models.convert.contract.tower_types import Towers
from shoal.models.convert.contract.tower_weights import read_contrast
from shoal.models.convert.contract.towers import read_towers
from shoal.models.convert.convert import GRAPH, require_onnx
from shoal.models.convert.graphs.towers import build_text_tower
from shoal.models.convert.graphs.vision import build_image_tower
from shoal.models.tokenizer_file import TOKENIZER
from shoal.specs import ContrastSpec, ImageSpec, TextSpec

IMAGE_GRAPH = "image.onnx"


class ConvertedTowers(msgspec.Struct, frozen=True, kw_only=True):
    """A converted dual encoder. `graph` and `image_graph` are paths in the target folder, `files` all files written
    there; `text` describes their source in words."""

    spec: TextSpec
    image_spec: ImageSpec
    contrast: ContrastSpec
    towers: Towers
    parameters: int
    files: tuple[str, ...]
    text: str
    graph: str = GRAPH
    image_graph: str = IMAGE_GRAPH


def convert_towers(
    folder: Path, target: Path, *, progress: Callable[[str, float], None] | None = None
) -> ConvertedTowers:
    """Write both graphs and the tokenizer into `target`, overwriting those of an earlier conversion. `progress`
    receives (stage, fraction). Raises ModelFileError, naming the file, for a model that cannot be served as its files
    say, and MissingExtra without the onnx package."""
    require_onnx()
    tell = progress or (lambda stage, fraction: None)
    tell("read", 0.0)
    towers = read_towers(folder)
    contrast = read_contrast(folder, towers)
    write_tower_tokenizer(folder, target / TOKENIZER, family=towers.family, path=towers.path)
    tell("read", 1.0)
    text = build_text_tower(folder, towers, target / GRAPH, progress=lambda part: tell("convert", part / 2))
    image = build_image_tower(
        folder, towers, target / IMAGE_GRAPH, progress=lambda part: tell("convert", 0.5 + part / 2)
    )
    tell("convert", 1.0)
    return ConvertedTowers(
        spec=msgspec.structs.replace(towers.text_spec, tokenizer=TOKENIZER),
        image_spec=towers.image_spec,
        contrast=contrast,
        towers=towers,
        parameters=text.parameters + image.parameters,
        files=(*text.files, *image.files, TOKENIZER),
        text="both towers built from config.json and safetensors",
    )
