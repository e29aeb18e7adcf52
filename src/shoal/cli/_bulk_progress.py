"""The progress of `shoal bulk` on standard error: a bar on a terminal, a line a shard elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

SPEED_WINDOW_S = 120.0


class BulkProgress:
    """Shows rows, rows a second and the time left, which is estimated from the bytes of the inputs."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._started = clock()
        self._rows = self._skipped = 0
        self._start_bytes = self._done = 0.0
        self._total = 0
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
        self._bar = Progress(
            *columns,
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            speed_estimate_period=SPEED_WINDOW_S,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def report_rows(self, rows: int, done: float, total: int) -> None:
        self._rows += rows
        self._done, self._total = done, total
        self._bar.update(self._task, description=self._describe(), completed=done, total=total)

    def report_skipped(self, rows: int, done: float, total: int) -> None:
        self._skipped += rows
        self._start_bytes, self._done, self._total = done, done, total
        self._started = self._clock()
        self._bar.reset(self._task, description=self._describe(), completed=int(done), total=total)

    def report_shard(self, number: int) -> None:
        if not self._console.is_terminal:
            line = f"shard {number} is finished: {self._describe()}, {self._describe_time_left()} left"
            self._console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def _describe(self) -> str:
        rate = self._rows / max(self._clock() - self._started, 1e-3)
        return f"{self._rows + self._skipped:,} rows, {rate:,.0f} rows/s"

    def _describe_time_left(self) -> str:
        done = max(self._done - self._start_bytes, 1.0)
        seconds = int((self._clock() - self._started) * max(self._total - self._done, 0.0) / done)
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
