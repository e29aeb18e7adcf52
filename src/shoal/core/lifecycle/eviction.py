"""Choose which models to put to sleep, from their size, state and last use. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that holds memory. `idle`: no requests in flight and no other work, so it may be put to sleep; `busy`:
    not now; `leaving`: its memory will be free soon. `last_used` is in seconds of any clock."""

    name: str
    size: int
    use: Literal["idle", "busy", "leaving"]
    last_used: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Maximum models and bytes loaded at once; 0: unlimited."""

    models: int = 0
    bytes: int = 0

    def has_room(self, residents: Sequence[LoadedModel], size: int) -> bool:
        """Whether one more model of that size fits."""
        fits = not self.models or len(residents) < self.models
        return fits and (not self.bytes or sum(each.size for each in residents) + size <= self.bytes)


def choose_evictions(residents: Sequence[LoadedModel], size: int, bounds: MemoryLimits) -> list[str] | None:
    """Choose models to put to sleep so that one of `size` bytes fits, least recently used first; None if it fits
    already.

    An empty list means to wait, for models that are leaving or busy. No model is put to sleep unless all idle ones
    together would make enough room.
    """
    if bounds.has_room(residents, size):
        return None
    stay = [each for each in residents if each.use != "leaving"]
    out: list[str] = []
    for each in sorted((each for each in stay if each.use == "idle"), key=lambda each: each.last_used):
        if bounds.has_room(stay, size):
            break
        stay.remove(each)
        out.append(each.name)
    return out if bounds.has_room(stay, size) else []


def find_expired(residents: Sequence[LoadedModel], now: float, keep_alive_s: float) -> tuple[list[str], float | None]:
    """Return the models unused for `keep_alive_s`, and the seconds until the next check (None: no other is idle)."""
    idle = [each for each in residents if each.use == "idle"]
    out = [each.name for each in idle if each.last_used + keep_alive_s <= now]
    left = [each.last_used + keep_alive_s - now for each in idle if each.name not in out]
    return out, min(left, default=None)
