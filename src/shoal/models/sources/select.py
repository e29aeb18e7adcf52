"""Which files of a model's folder the loader reads; the rest (pickles, code, other formats) is never fetched."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import PurePosixPath

import msgspec

from shoal.errors import SourceError
from shoal.models.manifest import is_inside

TOKENIZER = "tokenizer.json"
_SETTINGS = (".json", ".txt", ".model")
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")


def is_weights(name: str) -> bool:
    """Whether a chosen file holds weights, or a graph with them."""
    return name.endswith(".safetensors") or "model.onnx" in name


def module_folders(modules_json: bytes) -> list[str]:
    """The folders that a modules.json names. What is wrong in it is the loader's to refuse, by key."""
    try:
        modules = msgspec.json.decode(modules_json)
    except msgspec.DecodeError:
        return []
    entries = modules if isinstance(modules, list) else []
    paths = [entry.get("path") for entry in entries if isinstance(entry, dict)]
    return [path.strip("/") for path in paths if isinstance(path, str) and is_inside(path.strip("/"))]


def choose(names: Collection[str], folders: Iterable[str] = (), *, weights: bool = True) -> list[str]:
    """Of the files `names` (paths under the model's folder), those that loading it needs, in order.

    Taken from the top and from each of the module `folders`: settings and vocabularies (.json, .txt, .model),
    model.safetensors with its shards, and ONNX only as model.onnx with its external data, of which onnx/model.onnx is
    preferred and one beside safetensors is left. Without `weights` only the settings and vocabularies are taken, and
    a tokenizer.json alone is enough. Raises SourceError when there is nothing to load.
    """
    known = set(names)
    chosen: set[str] = set()
    for folder in {"", *folders}:
        prefix = f"{folder}/" if folder else ""
        own = {name.removeprefix(prefix) for name in known if name.startswith(prefix)}
        chosen.update(prefix + name for name in _choose_here(own))
    if not weights:
        chosen = {name for name in chosen if not is_weights(name)}
        if not chosen & {"config.json", "modules.json", TOKENIZER}:
            raise SourceError(f"none of {TOKENIZER}, config.json and modules.json is there: this is no model's folder")
        return sorted(chosen)
    if not any(name.endswith((".safetensors", ".onnx")) for name in chosen):
        pickled = sorted(name for name in known if name.endswith(_PICKLES))
        because = f"only {pickled[0]}, a format that can hide code; " if pickled else ""
        raise SourceError(
            f"no safetensors or ONNX weights are there: {because}choose a model or revision that has them"
        )
    if not chosen & {"config.json", "modules.json"}:
        raise SourceError("neither config.json nor modules.json is there: this is not a model's folder")
    return sorted(chosen)


def _choose_here(names: set[str]) -> set[str]:
    """The choice in one folder, whose own files and `onnx/` are in `names`."""
    settings = {
        name
        for name in names
        if "/" not in name and name.endswith(_SETTINGS) and not name.endswith((".bin.index.json", ".h5.index.json"))
    }
    weights = {name for name in names if _WEIGHTS.fullmatch(name)}
    if "onnx/model.onnx" in names:
        weights |= _with_external_data(names, "onnx/model.onnx")
    elif "model.onnx" in names and not weights:
        weights |= _with_external_data(names, "model.onnx")
    return settings | weights


def _with_external_data(names: set[str], graph: str) -> set[str]:
    """A graph and the files beside it that hold its tensors: model.onnx_data, model.onnx.data, model.onnx_data_1."""
    stem = PurePosixPath(graph).name
    parent = graph.removesuffix(stem)
    pattern = re.compile(re.escape(parent + stem) + r"([._]data(_\d+)?)?")
    return {name for name in names if pattern.fullmatch(name)}
