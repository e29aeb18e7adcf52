"""How long work on a model reports where it is, and how it is told to stop."""

from __future__ import annotations

import threading

from shoal.errors import Cancelled


class Progress:
    """What a caller may want to see, as no-ops to override; called from the thread that does the work, never raises.

    `report_fetch`: bytes of `what` so far, of `total` (None: not known). `report_work`: `stage` is done to `fraction`
    of 1. `report_note`: one line worth reading, such as a source that was passed over.
    """

    def report_fetch(self, what: str, done: int, total: int | None) -> None: ...

    def report_work(self, stage: str, fraction: float) -> None: ...

    def report_note(self, line: str) -> None: ...


class Stop:
    """A request to give up, made from any thread and noticed by the worker at its next step."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def wait(self, seconds: float) -> None:
        """Sleep at most `seconds`; raise Cancelled as soon as the request is made."""
        if self._event.wait(seconds):
            self.check()

    def check(self) -> None:
        """Raise Cancelled when the request has been made."""
        if self._event.is_set():
            raise Cancelled("the work on the model was stopped; what was half done is removed")
