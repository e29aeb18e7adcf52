"""Let one surface replace the paths of others: a preset selects the dialect of a path that several surfaces define."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.core.protocols import Operation, Surface
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway


def override_paths(first: Surface, others: Sequence[Surface]) -> list[Surface]:
    """Return `first`, and the others without the operations whose method and path `first` has."""
    return [first, *(_OverriddenSurface(each, first) for each in others)]


class _OverriddenSurface:
    def __init__(self, surface: Surface, first: Surface) -> None:
        self.name = surface.name
        self.error: Any = surface.error
        self._surface = surface
        self._first = first

    def routes(self, gateway: Gateway) -> Sequence[Operation]:
        taken = {(operation.method, operation.path) for operation in self._first.routes(gateway)}
        found = self._surface.routes(gateway)
        return [operation for operation in found if (operation.method, operation.path) not in taken]

    def render_error(self, error: ShoalError) -> tuple[int, dict[str, str], bytes]:
        return self._surface.render_error(error)
