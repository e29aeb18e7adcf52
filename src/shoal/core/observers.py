"""The base of observers that stand before another one."""

from __future__ import annotations

from shoal.core.protocols import Observer

EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_"))


class ForwardingObserver(Observer):
    """Passes every event on to `inner`.

    A subclass overrides the events that it counts, and passes those on itself. The others are the methods of `inner`,
    so that they cost no call here.
    """

    def __init__(self, inner: Observer | None = None) -> None:
        self._inner = inner or Observer()
        for event in EVENTS:
            if getattr(type(self), event) is getattr(Observer, event):
                setattr(self, event, getattr(self._inner, event))
