"""Which models go to sleep: pure decisions over what is loaded, how large it is and when it was last used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that holds memory. `idle`: no requests in flight and nothing else going on with it, so that it may be
    put to sleep; `busy`: not now; `leaving`: its memory comes free soon. `last_used` in seconds of any clock."""

    name: str
    size: int
    use: Literal["idle", "busy", "leaving"]
    last_used: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """How many models and bytes may be loaded at once; 0: any."""

    models: int = 0
    bytes: int = 0

    def has_room(self, residents: Sequence[LoadedModel], size: int) -> bool:
        """Whether one more model of that size fits beside these."""
        fits = not self.models or len(residents) < self.models
        return fits and (not self.bytes or sum(each.size for each in residents) + size <= self.bytes)


def choose_evictions(residents: Sequence[LoadedModel], size: int, bounds: MemoryLimits) -> list[str] | None:
    """Whom to put to sleep so that a model of that size fits, least recently used first; None: it fits as it is.

    An empty list: nothing to do but wait, for those that are leaving or because everything else is busy. Nobody is
    put to sleep in vain, as long as all of them together would not make room.
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
    """Whom nobody has used for `keep_alive_s`, and in how many seconds to look again (None: nobody else is idle)."""
    idle = [each for each in residents if each.use == "idle"]
    out = [each.name for each in idle if each.last_used + keep_alive_s <= now]
    left = [each.last_used + keep_alive_s - now for each in idle if each.name not in out]
    return out, min(left, default=None)
