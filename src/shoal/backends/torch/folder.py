"""A model's folder as sentence-transformers lays it out: where the encoder lies, and the modules that have weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import ModelFileError
from shoal.types import TextSpec

MODULES = "modules.json"
WEIGHTS = "model.safetensors"
TRUNCATE = "truncate"
_PICKLE = "pytorch_model.bin"
_STEPS = {"Dense": "dense", "LayerNorm": "layer_norm", "Normalize": "normalize"}
"""Kinds in modules.json, by the name that TextSpec.modules has for them."""


@dataclass(frozen=True, slots=True)
class Step:
    """A module after the encoder: `kind` is "dense", "layer_norm", "normalize" or "truncate". `path` is the folder of
    its weights; `activation` and `residual` (x is added to what it makes of x) are a dense one's."""

    kind: str
    path: str = ""
    activation: str = ""
    residual: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """`encoder`: the folder of config.json inside the model's folder. `tokens`: what is applied to token vectors,
    `after`: to a pooled one, in order. `splade`: how logits become weights: "max" or "sum" over the tokens, of "relu"
    or "log1p_relu"."""

    encoder: str
    tokens: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()
    splade: tuple[str, str] = ("max", "relu")


def read_layout(folder: Path, spec: TextSpec) -> Layout:
    """Where the parts of a model are that `spec` describes.

    What they mean is the spec's to say: modules.json only tells the places, and must list the same modules after the
    pooling. Raises ModelFileError where it lists others, leads out of the folder or is not readable.
    """
    entries = _entries(folder)
    kinds = [kind for kind, _ in entries]
    pooling = kinds.index("Pooling") if "Pooling" in kinds else len(entries)
    splade = next((_object(folder, f"{path}/config.json") for kind, path in entries if kind == "SpladePooling"), {})
    return Layout(
        encoder=next((path for kind, path in entries if kind.endswith("Transformer")), ""),
        tokens=tuple(_dense(folder, path, "") for kind, path in entries[:pooling] if kind == "Dense"),
        after=_after(folder, spec, [entry for entry in entries[pooling:] if entry[0] in _STEPS]),
        splade=(str(splade.get("pooling_strategy", "max")), str(splade.get("activation_function", "relu"))),
    )


def _after(folder: Path, spec: TextSpec, entries: list[tuple[str, str]]) -> tuple[Step, ...]:
    if not spec.dimension or spec.score is not None:
        return ()
    steps = []
    wanted = [module.partition(":") for module in spec.modules]
    given = [_STEPS[kind] for kind, _ in entries]
    if given != [kind for kind, _, _ in wanted if kind != TRUNCATE]:
        raise ModelFileError(
            f"lists {', '.join(given) or 'nothing'} after the pooling, but the model was stored with "
            f"{', '.join(spec.modules) or 'nothing'}; pull the model again",
            file=MODULES,
        )
    places = iter(entries)
    for kind, _, activation in wanted:
        path = "" if kind == TRUNCATE else next(places)[1]
        steps.append(_dense(folder, path, activation) if kind == "dense" else Step(kind, path))
    return tuple(steps)


def _dense(folder: Path, path: str, activation: str) -> Step:
    """Where the spec has no word for its activation it is the one that the module's own file names, or none."""
    config = _object(folder, f"{path}/config.json")
    said = config.get("activation_function")
    own = said.rpartition(".")[2].lower() if isinstance(said, str) else "identity"
    return Step("dense", path, activation or own, bool(config.get("use_residual", False)))


def weights_of(folder: Path, path: str) -> Path:
    """The safetensors file of a module. Raises ModelFileError when there is none."""
    file = folder / path / WEIGHTS
    if not file.is_file():
        pickled = (folder / path / _PICKLE).is_file()
        why = f"is missing, and {_PICKLE} can hide code, so it is not read" if pickled else "is missing"
        raise ModelFileError(f"{why}; serve a revision that has safetensors", file=f"{path}/{WEIGHTS}".lstrip("/"))
    return file


def _entries(folder: Path) -> list[tuple[str, str]]:
    """(kind, path) of every module; none where there is no modules.json."""
    place = folder / MODULES
    if not place.is_file():
        return []
    try:
        listed = msgspec.json.decode(place.read_bytes(), type=list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise ModelFileError(f"is not a list of modules ({error}); fetch the model again", file=MODULES) from None
    entries = []
    for index, entry in enumerate(listed):
        kind, path = entry.get("type"), entry.get("path")
        if not isinstance(kind, str) or not isinstance(path, str):
            raise ModelFileError("every module needs a type and a path", file=MODULES, key=f"[{index}]")
        path = path.rstrip("/")
        if path and {"", ".", ".."} & set(path.replace("\\", "/").split("/")):
            raise ModelFileError(f"{path!r} leaves the model's folder", file=MODULES, key=f"[{index}].path")
        entries.append((kind.rpartition(".")[2], path))
    return entries


def _object(folder: Path, name: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode((folder / name).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelFileError(f"is not readable ({error}); fetch the model again", file=name) from None
