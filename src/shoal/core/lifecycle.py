"""The life of a served model: a pure table of states and what may follow them."""

from __future__ import annotations

from typing import Literal

from shoal.errors import InternalError

State = Literal["loading", "ready", "failed", "unloading", "unloaded"]
Event = Literal["loaded", "load_failed", "broke", "recovered", "unload", "closed", "load"]

TRANSITIONS: dict[tuple[State, Event], State] = {
    ("loading", "loaded"): "ready",
    ("loading", "load_failed"): "failed",
    ("loading", "unload"): "unloading",
    ("ready", "broke"): "failed",
    ("ready", "unload"): "unloading",
    ("failed", "recovered"): "ready",
    ("failed", "load"): "loading",
    ("failed", "unload"): "unloading",
    ("unloading", "closed"): "unloaded",
    ("unloaded", "load"): "loading",
}


def after(state: State, event: Event) -> State:
    """The state that follows. Raises InternalError for an event that cannot happen in this state."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InternalError(f"a model that is {state} cannot become anything by '{event}'") from None
