"""The table of engines for local models. An engine is imported only when one is opened."""

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
"""Maps an engine's name, which is also the package it needs, to its "module:open". `auto` tries them in this order."""

FOLDER_ENGINES = {"torch": "shoal.backends.local.torch:open"}
"""Engines that run a published model folder, with `EngineOptions.spec`. The others run graphs.
`auto` tries these last."""

EXTRAS = {"openvino": "local", "onnxruntime": "ort", "torch": "torch"}


class OpenEngine(Protocol):
    """Loads `graph`, which is a model's file or folder, and returns an engine that is warm enough to serve.

    Raises ModelFileError (the graph cannot be loaded), ConfigError (an option cannot work here) and MissingExtra.
    """

    async def __call__(self, graph: Path, *, name: str, options: EngineOptions) -> Engine: ...


def choose_engine(engine: str = "auto") -> str:
    """Return the name of the engine to use: the requested one, or with `auto` the first installed one.

    Raises MissingExtra if it is not installed, or none is. Raises ConfigError for an unknown name.
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
    """Import an engine that `choose_engine` returned, and return its `open` function."""
    module, _, function = (ENGINES | FOLDER_ENGINES)[engine].partition(":")
    return cast(OpenEngine, getattr(import_module(module), function))


__all__ = ["ENGINES", "FOLDER_ENGINES", "EngineOptions", "OpenEngine", "PrecisionCheck", "choose_engine", "load_opener"]
