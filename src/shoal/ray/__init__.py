"""Shoal on Ray: an application of Ray Serve, and embedding of Ray datasets.

`serve run shoal.ray:app` serves what `SHOAL_MODELS`, the other variables and `shoal.toml` say. `shoal.ray.build` makes
the application from the `args` of a Serve configuration file. Needs the extra `ray`. See docs/ray.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application

    from shoal.ray.datasets import embed
    from shoal.ray.deployments import build

    app: Application

_PLACES = {"build": "deployments", "embed": "datasets"}


def __getattr__(name: str) -> Any:
    if name == "app":  # late: importing the package reads no configuration
        from shoal.ray.deployments import build

        return build({})
    if name in _PLACES:
        from importlib import import_module

        return getattr(import_module(f"shoal.ray.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["app", "build", "embed"]
