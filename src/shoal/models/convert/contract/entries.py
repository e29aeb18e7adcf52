"""Read the entries of modules.json: the kind of each module, and the folder of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import ModelFileError
from shoal.models.convert.contract.families.jina import is_flash_xlm_r
from shoal.models.convert.contract.json_file import JsonFile, read_json, read_object
from shoal.models.manifest import is_inside

MODULES = "modules.json"
KNOWN = (
    "Transformer",
    "Pooling",
    "Dense",
    "LayerNorm",
    "Normalize",
    "Dropout",
    "StaticEmbedding",
    "MLMTransformer",
    "SpladePooling",
    "MultiVectorMask",
)
_MOST_BYTES = 200
"""Maximum bytes of a module's path: file systems allow 255 bytes for a name."""

_ROUTES = (
    "sends queries and documents through different models: save the modules of each route as a separate model, and "
    "serve them under two names"
)
_REFUSED = {
    "Router": _ROUTES,
    "Asym": _ROUTES,
    "WeightedLayerPooling": "reads every layer of the encoder, but only the last layer's vectors are available",
    "SparseStaticEmbedding": "weights query tokens with a separate table, which is not supported; serve the model used "
    "for its documents",
    "SparseAutoEncoder": "converts dense vectors to sparse ones, which is not supported; serve the model without it",
}
"""Modules of sentence-transformers that are known but not supported, with advice."""


class Entry(NamedTuple):
    """A module. `kind`: the class without its package, which may be PyLate's (`pylate`). `where`: its place, for
    errors."""

    kind: str
    path: str
    where: str
    pylate: bool = False


def read_entries(folder: Path) -> tuple[Entry, ...] | None:
    """Return the modules of modules.json, None without the file. Raises ModelFileError for unknown modules."""
    listed = read_json(folder, MODULES)
    if listed is None:
        return None
    if not isinstance(listed, list) or not listed:
        raise ModelFileError("must hold a list of modules", file=MODULES)
    if _is_jina_v3(folder, listed[0]):
        listed[0] = listed[0] | {"type": "sentence_transformers.models.Transformer", "kwargs": None}
    return tuple(_entry(index, item) for index, item in enumerate(listed))


def _is_jina_v3(folder: Path, first: Any) -> bool:
    """Whether the first module is the Transformer that comes with Jina's encoders of version 3: without a task it is
    that of sentence-transformers."""
    config = read_object(folder, "config.json")
    named = isinstance(first, dict) and first.get("type") == "custom_st.Transformer"
    return named and first.get("kwargs") in (None, [], ["task"]) and config is not None and is_flash_xlm_r(config)


def encoder_path(entries: tuple[Entry, ...] | None) -> str:
    """Return the folder of the encoder, which must come first; the model's own if no modules are listed."""
    if entries is None:
        return ""
    if entries[0].kind not in ("Transformer", "MLMTransformer"):
        raise ModelFileError(
            f"the first module must be a Transformer, not {entries[0].kind}", file=MODULES, key=entries[0].where
        )
    return entries[0].path


def module_config(folder: Path, entry: Entry) -> JsonFile:
    """Return the required config.json of a module."""
    name = f"{entry.path}/config.json" if entry.path else "config.json"
    config = read_object(folder, name)
    if config is None:
        raise ModelFileError(f"is missing, but {MODULES} lists this {entry.kind}; fetch the model again", file=name)
    return config


def _entry(index: int, item: Any) -> Entry:
    where = f"[{index}].type"
    if not isinstance(item, dict) or not isinstance(item.get("type"), str) or not isinstance(item.get("path"), str):
        raise ModelFileError("every module needs a type and a path", file=MODULES, key=f"[{index}]")
    package, _, kind = item["type"].rpartition(".")
    library = package.split(".")[0]
    if library != "sentence_transformers" and (library, kind) != ("pylate", "Dense"):
        raise ModelFileError(f"{item['type']!r} is custom code, which Shoal never runs", file=MODULES, key=where)
    if kind in _REFUSED:
        raise ModelFileError(f"{kind} {_REFUSED[kind]}", file=MODULES, key=where)
    if kind not in KNOWN:
        known = ", ".join(KNOWN)
        raise ModelFileError(f"unknown module {item['type']!r}; Shoal knows {known}", file=MODULES, key=where)
    if item.get("kwargs"):
        raise ModelFileError("arguments for a module are not supported", file=MODULES, key=f"[{index}].kwargs")
    return Entry(kind, inner_path(item["path"], index), where, library == "pylate")


def inner_path(path: str, index: int) -> str:
    """Return a module's path as prefix of its file names, "" for the model's own folder. Raises ModelFileError for a
    path that leads out of it, or is not valid."""
    inner = path.rstrip("/")
    inner = "" if inner == "." else inner
    if inner and not is_inside(inner):
        raise ModelFileError(f"{path!r} is outside the model's folder", file=MODULES, key=f"[{index}].path")
    if len(inner.encode(errors="surrogatepass")) > _MOST_BYTES:
        raise ModelFileError(
            f"is too long for the path of a folder: {len(inner)} characters", file=MODULES, key=f"[{index}].path"
        )
    return inner
