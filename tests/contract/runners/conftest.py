"""The virtual clock, for runners."""

from __future__ import annotations

from tests.unit.core.conftest import virtual

__all__ = ["virtual"]
