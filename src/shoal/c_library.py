"""Functions of the C library that not every system has."""

from __future__ import annotations

import ctypes
from typing import Any


def find_function(name: str) -> Any:
    """Return a function of the C library, which sets `ctypes.get_errno`; None if the library has none of this name or
    cannot be loaded."""
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError, TypeError):
        return None
