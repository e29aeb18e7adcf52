"""Progress reports and cancellation for work on a model."""

from __future__ import annotations

import threading

from shoal.errors import Cancelled


class Progress:
    """Receives progress reports; override the no-ops you need. Called from the working thread; must never raise.

    `report_fetch`: bytes of `what` so far, out of `total` (None: unknown). `report_work`: `stage` is done to
    `fraction`, 0 to 1. `report_note`: one line worth reading, such as a source that was skipped.
    """

    def report_fetch(self, what: str, done: int, total: int | None) -> None: ...

    def report_work(self, stage: str, fraction: float) -> None: ...

    def report_note(self, line: str) -> None: ...


class Stop:
    """A request to stop, made from any thread and noticed by the worker at its next step."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def wait(self, seconds: float) -> None:
        """Sleep at most `seconds`; raise Cancelled as soon as the request is made."""
        if self._event.wait(seconds):
            self.check()

    def check(self) -> None:
        """Raise Cancelled if the request has been made."""
        if self._event.is_set():
            raise Cancelled("the job was stopped; its partial results are removed")
