"""Shoal: one inference gateway in front of every kind of inference server.

`shoal.open` runs models in this process, without a server: docs/python.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal._version import __version__

if TYPE_CHECKING:
    from shoal.errors import ShoalError
    from shoal.python.answers import Answer, AnswerPiece, AnswerStream, AsyncAnswerStream
    from shoal.python.api import Shoal, open
    from shoal.python.results import Label, Match, ModelInfo, Ranked
    from shoal.types import Image

_PLACES = {
    **dict.fromkeys(("Shoal", "open"), "shoal.python.api"),
    **dict.fromkeys(("Label", "Match", "ModelInfo", "Ranked"), "shoal.python.results"),
    **dict.fromkeys(("Answer", "AnswerPiece", "AnswerStream", "AsyncAnswerStream"), "shoal.python.answers"),
    "Image": "shoal.types",
    "ShoalError": "shoal.errors",
}

__all__ = [
    "Answer",
    "AnswerPiece",
    "AnswerStream",
    "AsyncAnswerStream",
    "Image",
    "Label",
    "Match",
    "ModelInfo",
    "Ranked",
    "Shoal",
    "ShoalError",
    "__version__",
    "open",
]


def __getattr__(name: str) -> Any:
    """The Python API when it is first asked for: `import shoal` alone is to cost nothing."""
    if name not in _PLACES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PLACES[name]), name)
