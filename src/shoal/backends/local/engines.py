"""The engines of local models: named here, and imported only when one is opened."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

from shoal.backends.local.options import EngineOptions
from shoal.backends.local.precision import PrecisionCheck
from shoal.core.protocols import Engine
from shoal.errors import ConfigError, MissingExtra

ENGINES = {
    "openvino": "shoal.backends.local.openvino:open",
    "onnxruntime": "shoal.backends.local.onnxruntime:open",
}
"""Engine name, which is also the package that it needs, to its "module:open"; `auto` tries them in this order."""

FOLDER_ENGINES = {"torch": "shoal.backends.local.torch:open"}
"""Engines that run a model's folder, as its author published it, with `EngineOptions.spec`; the others run graphs.
`auto` comes to them last."""

EXTRAS = {"openvino": "local", "onnxruntime": "ort", "torch": "torch"}


class OpenEngine(Protocol):
    """Loads `graph`, a file or the folder of a model, and answers an engine that is warm enough to serve.

    Raises ModelFileError (the graph cannot be loaded), ConfigError (an option cannot work here), MissingExtra.
    """

    async def __call__(self, graph: Path, *, name: str, options: EngineOptions) -> Engine: ...


def choose_engine(engine: str = "auto") -> str:
    """The engine to use: the one asked for, else the first that is installed.

    Raises MissingExtra when it, or all, are not installed; ConfigError for a name that is not in the table.
    """
    known = (*ENGINES, *FOLDER_ENGINES)
    if engine == "auto":
        for name in known:
            if find_spec(name) is not None:
                return name
        raise MissingExtra("a local model", "local")
    if engine not in known:
        raise ConfigError(f"engine {engine!r} is unknown; use auto, {' or '.join(known)}", param="engine")
    if find_spec(engine) is None:
        raise MissingExtra(f"the engine {engine}", EXTRAS[engine])
    return engine


def load_opener(engine: str) -> OpenEngine:
    """The `open` of an engine that `choose_engine` answered; imports its module."""
    module, _, function = (ENGINES | FOLDER_ENGINES)[engine].partition(":")
    return cast(OpenEngine, getattr(import_module(module), function))


__all__ = ["ENGINES", "FOLDER_ENGINES", "EngineOptions", "OpenEngine", "PrecisionCheck", "choose_engine", "load_opener"]
