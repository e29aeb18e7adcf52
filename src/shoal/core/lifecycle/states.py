"""The states of a served model and the allowed transitions."""

from __future__ import annotations

from typing import Literal

from shoal.errors import InternalError

State = Literal["loading", "ready", "failed", "unloading", "unloaded"]
StateEvent = Literal["loaded", "load_failed", "rest", "broke", "recovered", "unload", "closed", "load"]

TRANSITIONS: dict[tuple[State, StateEvent], State] = {
    ("loading", "loaded"): "ready",
    ("loading", "load_failed"): "failed",
    ("loading", "rest"): "unloaded",
    ("loading", "unload"): "unloading",
    ("ready", "broke"): "failed",
    ("ready", "unload"): "unloading",
    ("failed", "recovered"): "ready",
    ("failed", "load"): "loading",
    ("failed", "unload"): "unloading",
    ("unloading", "closed"): "unloaded",
    ("unloaded", "load"): "loading",
}


def next_state(state: State, happening: StateEvent) -> State:
    """Return the next state. Raises InternalError for a transition that is not allowed."""
    try:
        return TRANSITIONS[state, happening]
    except KeyError:
        raise InternalError(f"a model in state {state} has no transition '{happening}'") from None
