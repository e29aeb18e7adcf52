"""The base class of observers that forward events to another observer."""

from __future__ import annotations

from shoal.core.protocols import Observer

EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_"))


class ForwardingObserver(Observer):
    """Forwards every event to `inner`.

    A subclass overrides the events it counts and forwards those itself. All others are bound directly to the methods of
    `inner`, so they cost no extra call.
    """

    def __init__(self, inner: Observer | None = None) -> None:
        self._inner = inner or Observer()
        for event in EVENTS:
            if getattr(type(self), event) is getattr(Observer, event):
                setattr(self, event, getattr(self._inner, event))
