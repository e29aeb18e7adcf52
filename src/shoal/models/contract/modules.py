"""modules.json and the folders it names: the pooling, and what follows it.

The rules are those of sentence-transformers: modes named by flags are concatenated in its fixed order, modes named by
`pooling_mode` in the order given; a Dense without an activation_function has Tanh; Dropout does nothing at inference.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

from shoal.errors import ModelFileError
from shoal.models.contract.json_file import JsonFile, read_json, read_object
from shoal.models.contract.types import Activation, AfterPooling, Dense, LayerNorm, Normalize, Pooling, PoolingMode
from shoal.models.manifest import is_inside

MODULES = "modules.json"
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
_DENSE_KEYS = frozenset(
    {
        "in_features",
        "out_features",
        "bias",
        "activation_function",
        "module_input_name",
        "module_output_name",
        "use_residual",
    }
)
_NORMALIZE_KEYS = frozenset({"module_input_name", "module_output_name"})
DENSE_ACTIVATIONS: dict[str, Activation] = {
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.Tanh": "tanh",
    "torch.nn.ReLU": "relu",
    "torch.nn.GELU": "gelu",
    "torch.nn.Sigmoid": "sigmoid",
    "torch.nn.SiLU": "silu",
    "torch.nn.Identity": "identity",
}


class Modules(NamedTuple):
    """`pooling_file` is where the pooling was read, `width` the token vectors' size that it states (None: unsaid)."""

    encoder_path: str
    pooling: Pooling
    width: int | None
    pooling_file: str
    after: tuple[AfterPooling, ...]


class _Entry(NamedTuple):
    kind: str
    path: str
    where: str


def read_modules(folder: Path) -> Modules | None:
    """What modules.json lists, None when there is no such file. Raises ModelFileError for anything not known."""
    listed = read_json(folder, MODULES)
    if listed is None:
        return None
    if not isinstance(listed, list) or not listed:
        raise ModelFileError("must hold a list of modules", file=MODULES)
    entries = [_entry(index, item) for index, item in enumerate(listed)]
    if entries[0].kind != "Transformer":
        raise ModelFileError(
            f"the first module must be a Transformer, not {entries[0].kind}", file=MODULES, key=entries[0].where
        )
    if len(entries) < 2 or entries[1].kind != "Pooling":
        raise ModelFileError("the second module must be a Pooling", file=MODULES, key="[1].type")
    pooling, width, file = _pooling(folder, entries[1])
    after = [module for entry in entries[2:] if (module := _after(folder, entry)) is not None]
    return Modules(entries[0].path, pooling, width, file, tuple(after))


def _entry(index: int, item: Any) -> _Entry:
    where = f"[{index}].type"
    if not isinstance(item, dict) or not isinstance(item.get("type"), str) or not isinstance(item.get("path"), str):
        raise ModelFileError("every module needs a type and a path", file=MODULES, key=f"[{index}]")
    package, _, kind = item["type"].rpartition(".")
    if package.split(".")[0] != "sentence_transformers":
        raise ModelFileError(f"{item['type']!r} is code of its own, which Shoal never runs", file=MODULES, key=where)
    if kind not in ("Transformer", "Pooling", *_READERS):
        known = ", ".join(("Transformer", "Pooling", *_READERS))
        raise ModelFileError(f"unknown module {item['type']!r}; Shoal knows {known}", file=MODULES, key=where)
    if item.get("kwargs"):
        raise ModelFileError("arguments for a module are not supported", file=MODULES, key=f"[{index}].kwargs")
    path = item["path"].rstrip("/")
    if path and not is_inside(path):
        raise ModelFileError(f"{item['path']!r} leaves the model's folder", file=MODULES, key=f"[{index}].path")
    return _Entry(kind, path, where)


def _pooling(folder: Path, entry: _Entry) -> tuple[Pooling, int, str]:
    config = _config(folder, entry)
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
    wanted = [named] if isinstance(named, str) else named
    if not isinstance(wanted, list) or not wanted or any(mode not in MODES for mode in wanted):
        raise config.refuse("pooling_mode", f"unknown pooling {named!r}; Shoal knows {', '.join(MODES)}")
    return tuple(wanted)


def _dense(folder: Path, entry: _Entry) -> Dense:
    config = _config(folder, entry)
    config.only(_DENSE_KEYS)
    _on_sentence_embedding(config)
    if config.boolean("use_residual", False):
        raise config.refuse("use_residual", "a residual Dense is not supported")
    name = config.text("activation_function", "torch.nn.modules.activation.Tanh")
    if name not in DENSE_ACTIVATIONS:
        known = ", ".join(sorted({path.rpartition(".")[2] for path in DENSE_ACTIVATIONS}))
        raise config.refuse("activation_function", f"unknown activation {name!r}; Shoal knows torch's {known}")
    return Dense(
        path=entry.path,
        in_features=config.integer("in_features", least=1),
        out_features=config.integer("out_features", least=1),
        bias=config.boolean("bias", True),
        activation=DENSE_ACTIVATIONS[name],
    )


def _layer_norm(folder: Path, entry: _Entry) -> LayerNorm:
    config = _config(folder, entry)
    config.only(frozenset({"dimension"}))
    return LayerNorm(path=entry.path, dimension=config.integer("dimension", least=1))


def _normalize(folder: Path, entry: _Entry) -> Normalize:
    config = read_object(folder, f"{entry.path}/config.json")
    if config is not None:
        config.only(_NORMALIZE_KEYS)
        _on_sentence_embedding(config)
    return Normalize()


def _dropout(folder: Path, entry: _Entry) -> None:
    return None


_READERS: dict[str, Callable[[Path, _Entry], AfterPooling | None]] = {
    "Dense": _dense,
    "LayerNorm": _layer_norm,
    "Normalize": _normalize,
    "Dropout": _dropout,
}


def _after(folder: Path, entry: _Entry) -> AfterPooling | None:
    reader = _READERS.get(entry.kind)
    if reader is None:
        raise ModelFileError(f"a {entry.kind} cannot follow the pooling", file=MODULES, key=entry.where)
    return reader(folder, entry)


def _on_sentence_embedding(config: JsonFile) -> None:
    for key in ("module_input_name", "module_output_name"):
        if config.text(key, "sentence_embedding") != "sentence_embedding":
            raise config.refuse(key, "only modules that work on 'sentence_embedding' are supported")


def _config(folder: Path, entry: _Entry) -> JsonFile:
    name = f"{entry.path}/config.json"
    config = read_object(folder, name)
    if config is None:
        raise ModelFileError(f"is missing, but {MODULES} names this {entry.kind}; fetch the model again", file=name)
    return config
