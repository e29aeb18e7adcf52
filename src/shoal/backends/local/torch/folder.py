"""Locates the parts of a model and their weights in a published folder, as its TextSpec describes them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shoal.decoding import json_decoder
from shoal.errors import ModelFileError
from shoal.specs import PartsSpec, TextSpec

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TRUNCATE = "truncate"
_MANIFEST = "manifest.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_INDEX = json_decoder(_Index)


def find_parts(spec: TextSpec) -> PartsSpec:
    """Return the parts around the encoder.

    Only the spec decides: the folder's files are read once, when a model is stored, so that two readings cannot differ.
    Without parts in the spec, it is an encoder at the top of the folder and its pooling, nothing else. Raises
    ModelFileError for a spec that contradicts itself, or has more parts without saying where they are.
    """
    parts = spec.parts or PartsSpec()
    dense = spec.dimension and spec.score is None
    module_kinds = tuple(module.partition(":")[0] for module in spec.modules) if dense else ()
    there = tuple(step.kind for step in parts.after) if dense else ()
    heads = spec.sparse is not None or spec.multi is not None
    by_token = spec.sparse is not None and spec.sparse.per == "token"
    if module_kinds != there or (heads and spec.parts is None) or (by_token and parts.token_weights is None):
        raise ModelFileError(
            "is missing the paths of the model's parts, which this engine needs; pull the model again",
            file=_MANIFEST,
            key="parts",
        )
    return parts


def find_weights(folder: Path, path: str, tensor: str) -> Path:
    """Return the safetensors file of a module that holds `tensor`: the single file, or the shard that an index names.
    Raises ModelFileError if there is none."""
    file, index = folder / path / WEIGHTS, folder / path / INDEX
    if file.is_file():
        return file
    if index.is_file():
        return _shard(index, _name(folder, index), tensor)
    raise ModelFileError("is missing; serve a revision that has safetensors", file=_name(folder, file))


def _shard(index: Path, name: str, tensor: str) -> Path:
    try:
        places = _INDEX.decode(index.read_bytes()).weight_map
    except (OSError, UnicodeDecodeError, RecursionError, msgspec.MsgspecError) as error:
        raise ModelFileError(f"is not a valid index of weights ({error}); fetch the model again", file=name) from None
    shard = places.get(tensor)
    if shard is None:
        raise ModelFileError("is in no shard; fetch the model again", file=name, key=tensor)
    if not shard or {"/", "\\", "\0"} & set(shard) or not (index.parent / shard).is_file():
        raise ModelFileError(
            f"names {shard!r}, which is not a file in the same folder; fetch the model again", file=name
        )
    return index.parent / shard


def _name(folder: Path, file: Path) -> str:
    return file.relative_to(folder).as_posix()
