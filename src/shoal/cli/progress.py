"""Progress bars for downloads and conversions, drawn on standard error and only on a terminal."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars

from shoal.models.progress import Progress


def _make_bars(*columns: ProgressColumn, console: Console, transient: bool = False) -> Bars:
    """Make bars for a terminal; elsewhere they show nothing. Output that goes to a file or a pipe stays there."""
    return Bars(
        *columns,
        console=console,
        disable=not console.is_terminal,
        transient=transient,
        redirect_stdout=sys.stdout.isatty(),
    )


class Waiting:
    """Shows on a terminal what takes a while, and for how long it has, until the context exits. Then it is removed."""

    def __init__(self, text: str, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._bar = _make_bars(*columns, console=console, transient=True)
        self._bar.add_task(text, total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class TerminalProgress(Progress):
    """Show one bar per download and one per conversion step until the context exits, below them `doing`, if given.

    Off a terminal only notes (`report_note`) appear, so that a log shows which source was skipped and why. They are
    records of `log` where one is given, because readers of a server's log expect nothing else.
    """

    def __init__(self, console: Console | None = None, *, doing: str = "", log: logging.Logger | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._waiting = Waiting(doing, self._console) if doing else None
        self._log = log
        text = TextColumn("{task.description}", markup=False)
        amount = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        share = (BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        self._bytes = _make_bars(text, *amount, console=self._console)
        self._steps = _make_bars(text, *share, console=self._console)
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if self._waiting is not None:
            self._waiting.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
        if self._waiting is not None:
            self._waiting.__exit__()

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
