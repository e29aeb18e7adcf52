"""Shoal: one inference gateway in front of every kind of inference server.

`shoal.open` runs models in this process, without a server: docs/python.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal._version import __version__

if TYPE_CHECKING:
    from shoal.errors import ShoalError
    from shoal.python.api import Label, Match, Ranked, Shoal, open
    from shoal.types import Image

__all__ = ["Image", "Label", "Match", "Ranked", "Shoal", "ShoalError", "__version__", "open"]


def __getattr__(name: str) -> Any:
    """The Python API when it is first asked for: `import shoal` alone is to cost nothing."""
    if name == "ShoalError":
        from shoal import errors

        return errors.ShoalError
    if name == "Image":
        from shoal import types

        return types.Image
    if name in __all__:
        from shoal.python import api

        return getattr(api, name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
