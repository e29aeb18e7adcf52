from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from shoal.core.lifecycle.states import State, StateEvent, next_state
from shoal.errors import InternalError

ALLOWED: dict[tuple[State, StateEvent], State] = {
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
EVERY = list(product(get_args(State), get_args(StateEvent)))


@pytest.mark.parametrize(("state", "event"), EVERY)
def test_every_state_meets_every_event(state: State, event: StateEvent) -> None:
    """Each pair leads to the state in the table or is refused as a bug."""
    if (state, event) in ALLOWED:
        assert next_state(state, event) == ALLOWED[state, event]
    else:
        with pytest.raises(InternalError, match=f"{state} .*'{event}'"):
            next_state(state, event)


def test_no_state_is_a_trap() -> None:
    """Every state can be reached from every other state."""
    for start in get_args(State):
        reached, edge = {start}, [start]
        while edge:
            state = edge.pop()
            for (was, _), follows in ALLOWED.items():
                if was == state and follows not in reached:
                    reached.add(follows)
                    edge.append(follows)
        assert reached == set(get_args(State))
