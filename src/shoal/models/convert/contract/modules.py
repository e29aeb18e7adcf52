"""Read modules.json and its folders: the pooling, and the modules after it.

Follows sentence-transformers: modes named by flags are concatenated in its fixed order, modes named by `pooling_mode`
in the order given; a Dense without an activation_function has Tanh; Dropout does nothing at inference.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, get_args

from shoal.errors import ModelFileError
from shoal.models.convert.contract.dense import check_names, read_dense
from shoal.models.convert.contract.entries import MODULES, Entry, module_config
from shoal.models.convert.contract.json_file import JsonFile, read_object
from shoal.models.convert.contract.types import (
    AfterPooling,
    Dense,
    LayerNorm,
    Normalize,
    Pooling,
    PoolingMode,
    Truncate,
)

MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)
FLAGS: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLING_KEYS = frozenset({*FLAGS, "pooling_mode", "include_prompt", "word_embedding_dimension", "embedding_dimension"})
_NORMALIZE_KEYS = frozenset({"module_input_name", "module_output_name"})


class Modules(NamedTuple):
    """The modules of a model. `pooling_file` is where the pooling was read; `width` is the size of token vectors that
    it states (None: not stated)."""

    encoder_path: str
    pooling: Pooling
    width: int | None
    pooling_file: str
    after: tuple[AfterPooling, ...]


def read_modules(folder: Path, entries: tuple[Entry, ...]) -> Modules:
    """Read an encoder, its pooling and the modules after it. Raises ModelFileError for anything else or unknown."""
    if len(entries) < 2 or entries[1].kind != "Pooling":
        raise ModelFileError("the second module must be a Pooling", file=MODULES, key="[1].type")
    pooling, width, file = _pooling(folder, entries[1])
    return Modules(entries[0].path, pooling, width, file, after_modules(folder, entries[2:]))


def after_modules(folder: Path, entries: tuple[Entry, ...]) -> tuple[AfterPooling, ...]:
    """Return the modules that work on a sentence's vector, in order."""
    return tuple(module for entry in entries if (module := _read_after_pooling(folder, entry)) is not None)


def truncate_modules(modules: tuple[AfterPooling, ...], dimensions: int | None) -> tuple[AfterPooling, ...]:
    """Add a cut to `dimensions` numbers before a final Normalize, so that vectors keep unit length;
    sentence-transformers cuts them after it."""
    if dimensions is None:
        return modules
    if modules and isinstance(modules[-1], Normalize):
        return (*modules[:-1], Truncate(dimension=dimensions), modules[-1])
    return (*modules, Truncate(dimension=dimensions))


def compute_output_width(width: int, modules: tuple[AfterPooling, ...]) -> int:
    """Return the size of vectors of `width` (0: unknown) after the modules. Raises ModelFileError if two do not fit."""
    for module in modules:
        if isinstance(module, Normalize):
            continue
        if isinstance(module, Truncate):
            width = min(width, module.dimension) if width else module.dimension
            continue
        takes, key = (
            (module.in_features, "in_features") if isinstance(module, Dense) else (module.dimension, "dimension")
        )
        if width and takes != width:
            raise ModelFileError(
                f"expects {takes} dimensions, but its input has {width}", file=f"{module.path}/config.json", key=key
            )
        width = module.dimension if isinstance(module, LayerNorm) else module.out_features
    return width


def _pooling(folder: Path, entry: Entry) -> tuple[Pooling, int, str]:
    config = module_config(folder, entry)
    config.only(_POOLING_KEYS)
    width_key = "embedding_dimension" if "embedding_dimension" in config else "word_embedding_dimension"
    width = config.integer(width_key, least=1)
    return (
        Pooling(modes=_modes(config), include_prompt=config.boolean("include_prompt", True)),
        width,
        f"{config.name}: {width_key}",
    )


def _modes(config: JsonFile) -> tuple[PoolingMode, ...]:
    named = config.data.get("pooling_mode")
    if named is None:
        flagged = tuple(mode for key, mode in FLAGS.items() if config.boolean(key, False))
        return flagged or ("mean",)
    modes = [named] if isinstance(named, str) else named
    if not isinstance(modes, list) or not modes or any(mode not in MODES for mode in modes):
        raise config.refuse("pooling_mode", f"unknown pooling {named!r}; Shoal knows {', '.join(MODES)}")
    return tuple(modes)


def _layer_norm(folder: Path, entry: Entry) -> LayerNorm:
    config = module_config(folder, entry)
    config.only(frozenset({"dimension"}))
    return LayerNorm(path=entry.path, dimension=config.integer("dimension", least=1))


def _normalize(folder: Path, entry: Entry) -> Normalize:
    config = read_object(folder, f"{entry.path}/config.json")
    if config is not None:
        config.only(_NORMALIZE_KEYS)
        check_names(config)
    return Normalize()


def _dropout(folder: Path, entry: Entry) -> None:
    return None


_READERS: dict[str, Callable[[Path, Entry], AfterPooling | None]] = {
    "Dense": read_dense,
    "LayerNorm": _layer_norm,
    "Normalize": _normalize,
    "Dropout": _dropout,
}


def _read_after_pooling(folder: Path, entry: Entry) -> AfterPooling | None:
    reader = _READERS.get(entry.kind)
    if reader is None:
        raise ModelFileError(f"a {entry.kind} cannot follow the pooling", file=MODULES, key=entry.where)
    return reader(folder, entry)
