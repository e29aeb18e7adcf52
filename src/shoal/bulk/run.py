"""The driver: reads, computes and writes at the same time, and only ever writes whole shards."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple, Protocol

from shoal.bulk.computing import BlockRunner, Task
from shoal.bulk.plan import Step, plan_steps
from shoal.bulk.reading import NO_VALUE, Row, Rows
from shoal.bulk.writing import OutputFolder, Rejection, Table, reject
from shoal.errors import SetupError

BLOCK_ROWS = 4096
"""Rows that are sorted by length together."""


def blocks_in_flight(task: Task, block_rows: int) -> int:
    """Return the number of blocks to compute at once, while another one is read: two where a block has twice the calls
    that may run. Of many workers, none waits for the end of the oldest block."""
    return 1 + math.ceil(2 * task.calls * task.texts_per_call / block_rows)


class Progress(Protocol):
    """Sees how far a run is, on the event loop. `done` and `total` are in bytes of the inputs."""

    def report_rows(self, rows: int, done: float, total: int) -> None:
        """`rows` more rows are computed."""

    def report_skipped(self, rows: int, done: float, total: int) -> None:
        """`rows` more rows are in shards that were finished before."""

    def report_shard(self, number: int) -> None:
        """A shard is on disk."""


class Summary(NamedTuple):
    rows: int
    errors: int
    skipped_rows: int


class _Block(NamedTuple):
    """A computed block. `rows` is how many were read, which is below the step's at the end of the inputs."""

    step: Step
    rows: int
    table: Table
    rejections: list[Rejection]


class BulkRun:
    """One run over all rows, into a folder that may have finished shards. Use it once.

    `max_errors`: rows that may be set aside, those of finished shards included; None for any number.
    """

    def __init__(
        self, task: Task, rows: Rows, folder: OutputFolder, progress: Progress, *, max_errors: int | None = None
    ) -> None:
        self._task = task
        self._rows = rows
        self._folder = folder
        self._progress = progress
        self._max_errors = max_errors
        self._finished = folder.finished
        self._errors = sum(shard.errors for shard in folder.manifest.shards)
        self._has_ids = bool(folder.manifest.recipe.options.get("id_column"))
        self._computed_bytes = 0.0
        self._skipped_rows = 0

    async def run(self) -> Summary:
        """Return when all rows are in shards. Raises SetupError for too many errors and for files that cannot be read
        or written, and the ShoalError of a model that cannot go on; finished shards stay."""
        shard = 0
        rows = 0
        tables: list[Table] = []
        rejections: list[Rejection] = []
        async with aclosing(self._compute_blocks()) as blocks:
            async for block in blocks:
                if block.step.shard != shard and rows:
                    await self._write(shard, rows, tables, rejections)
                    rows, tables, rejections = 0, [], []
                shard = block.step.shard
                rows += block.rows
                tables.append(block.table)
                rejections += block.rejections
                await self._check_errors(block, rejections)
        if rows:
            await self._write(shard, rows, tables, rejections)
        await asyncio.to_thread(self._folder.finish, self._rows.number)
        return Summary(self._rows.number, self._errors, self._skipped_rows)

    async def _compute_blocks(self) -> AsyncGenerator[_Block]:
        """Yield the computed blocks of unfinished shards in order."""
        pending: deque[asyncio.Task[_Block]] = deque()
        shard_rows = self._folder.manifest.recipe.shard_rows
        steps = plan_steps(shard_rows, BLOCK_ROWS, self._finished)
        runner = BlockRunner(self._task)
        blocks = blocks_in_flight(self._task, min(BLOCK_ROWS, shard_rows))
        try:
            for step in steps:
                if step.is_finished:
                    count = await self._skip(step)
                else:
                    before = self._rows.consumed
                    rows = await asyncio.to_thread(self._rows.take, step.rows)
                    count = len(rows)
                    if rows:
                        size = self._rows.consumed - before
                        pending.append(asyncio.create_task(self._compute(runner, step, rows, size)))
                if len(pending) >= blocks:
                    yield await pending.popleft()
                if count < step.rows:
                    break
            while pending:
                yield await pending.popleft()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _skip(self, step: Step) -> int:
        before = self._rows.consumed
        count = await asyncio.to_thread(self._rows.skip, step.rows)
        self._skipped_rows += count
        self._computed_bytes += self._rows.consumed - before
        self._progress.report_skipped(count, self._computed_bytes, self._rows.total)
        return count

    async def _compute(self, runner: BlockRunner, step: Step, rows: list[Row], size: int) -> _Block:
        """Compute a block of `size` bytes of the inputs."""
        usable = [row for row in rows if not row.record.reason]

        def advance(count: int) -> None:
            self._computed_bytes += count * size / len(rows)
            self._progress.report_rows(count, self._computed_bytes, self._rows.total)

        advance(len(rows) - len(usable))
        results = await runner.run([row.record.texts for row in usable], advance)
        rejections = [reject(row, step.shard, row.record.reason) for row in rows if row.record.reason]
        rejections += [reject(usable[place], step.shard, reason) for place, reason in results.reasons.items()]
        kept = [usable[place] for place in results.kept]
        ids = [row.record.id for row in kept] if self._has_ids else None
        table = Table([row.number for row in kept], ids, results.columns)
        return _Block(step, len(rows), table, sorted(rejections, key=lambda each: each.row))

    async def _check_errors(self, block: _Block, rejections: list[Rejection]) -> None:
        self._errors += len(block.rejections)
        reasons = [each.reason for each in block.rejections]
        if block.rows == len(reasons) and block.rejections[0].row == 0 and all(map(_lacks_column, reasons)):
            raise SetupError(f"none of the first {block.rows} rows can be used: {reasons[0]}: name another column")
        if self._max_errors is not None and self._errors > self._max_errors:
            await asyncio.to_thread(self._folder.append_rejections, rejections)
            last = block.rejections[-1]
            raise SetupError(
                f"{self._errors} rows cannot be used, more than --max-errors {self._max_errors}; the last is row "
                f"{last.file_row} of {last.file}: {last.reason}"
            )

    async def _write(self, shard: int, rows: int, tables: list[Table], rejections: list[Rejection]) -> None:
        await asyncio.to_thread(self._folder.write_shard, shard, rows, tables, rejections)
        self._progress.report_shard(shard)


def _lacks_column(reason: str) -> bool:
    return reason.startswith(NO_VALUE)
