"""Progress bars for downloads and conversions, drawn on standard error and only on a terminal."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from shoal.models.progress import Progress


class TerminalProgress(Progress):
    """Show one bar per download and one per conversion step until the context exits.

    Off a terminal only notes (`report_note`) appear, so that a log shows which source was skipped and why. They are
    records of `log` where one is given, because readers of a server's log expect nothing else.
    """

    def __init__(self, console: Console | None = None, *, log: logging.Logger | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._log = log
        hidden = not self._console.is_terminal
        text = TextColumn("{task.description}", markup=False)
        amount = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        share = (BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        self._bytes = Bars(text, *amount, console=self._console, disable=hidden)
        self._steps = Bars(text, *share, console=self._console, disable=hidden)
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def report_fetch(self, what: str, done: int, total: int | None) -> None:
        self._update(self._bytes, what, done, total)

    def report_work(self, stage: str, fraction: float) -> None:
        self._update(self._steps, stage, fraction, 1.0)

    def report_note(self, line: str) -> None:
        if self._log is not None and not self._console.is_terminal:
            self._log.info("%s", line)
            return
        self._console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def _update(self, bars: Bars, what: str, done: float, total: float | None) -> None:
        if bars is not self._bars:
            # A terminal has one live display at a time; the finished bars of the previous one stay above it.
            if self._bars is not None:
                self._bars.stop()
            self._bars = bars
            bars.start()
        if what not in self._tasks:
            self._tasks[what] = bars.add_task(what, total=total)
        bars.update(self._tasks[what], completed=done, total=total)
