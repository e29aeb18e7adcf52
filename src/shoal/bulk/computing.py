"""One block through a model: texts in, columns out. It knows no files, so that any driver can map it over blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shoal.core.input_errors import parse_input_index
from shoal.errors import BackendError, InputRejected, InternalError, NotFinite, RequestError, ShoalError
from shoal.types import Array

Texts: TypeAlias = tuple[str, ...]
Column: TypeAlias = Array | Sequence[str]
"""Values of some rows: an array whose first axis is the rows, or a list of texts."""

Call: TypeAlias = Callable[[Sequence[Texts]], Awaitable[Mapping[str, Column]]]
"""Runs a task on some texts, or pairs of texts, and returns its columns, a value each. Raises ShoalErrors."""

RETRIES = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Between attempts, doubling: about a minute and a half in all, in which a server can restart."""


class Task(NamedTuple):
    """`call`, with the largest number of texts that one call should have, how many calls may run at once, and its
    columns without rows."""

    call: Call
    texts_per_call: int
    calls: int
    empty: Mapping[str, Column]


class Results(NamedTuple):
    """`kept`: the places in the block that have a result, ascending; `columns` has their values in this order.
    `reasons`: of all other places, why they have none."""

    kept: list[int]
    columns: Mapping[str, Column]
    reasons: dict[int, str]


_Found: TypeAlias = tuple[list[int], Mapping[str, Column]]
"""Places in the block, and the columns of their results."""


class BlockRunner:
    """Runs blocks, several at once if wanted.

    Texts go to the model sorted by length, the longest first, so that those of one call need little padding. Of a call
    that fails for an input, each input runs alone. A call that may succeed later is repeated with pauses. An engine
    failure for a single input counts as the input's only while the engine still answers others.
    """

    def __init__(self, task: Task, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        self._task = task
        self._sleep = sleep
        self._gate = asyncio.Semaphore(task.calls)

    async def run(self, block: Sequence[Texts], advance: Callable[[int], None] = lambda texts: None) -> Results:
        """Run a block; `advance` is called with the number of texts that were just done. Raises the ShoalError of a
        model that cannot go on."""
        order = sorted(range(len(block)), key=lambda place: -sum(map(len, block[place])))
        size = self._task.texts_per_call
        parts = [order[start : start + size] for start in range(0, len(order), size)]
        reasons: dict[int, str] = {}
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run_part(block, part, reasons, advance)) for part in parts]
        except ExceptionGroup as errors:
            raise _first_error(errors) from None
        places = [place for task in tasks for each, _ in task.result() for place in each]
        columns = [columns for task in tasks for _, columns in task.result()]
        ranks = np.argsort(np.array(places, np.int64))
        return Results([places[rank] for rank in ranks], _merge(columns or [self._task.empty], ranks), reasons)

    async def _run_part(
        self, block: Sequence[Texts], part: list[int], reasons: dict[int, str], advance: Callable[[int], None]
    ) -> list[_Found]:
        async with self._gate:
            found = await self._run_or_split(block, part, reasons)
        advance(len(part))
        return found

    async def _run_or_split(self, block: Sequence[Texts], part: list[int], reasons: dict[int, str]) -> list[_Found]:
        """Return the results of a part, and add the reasons of places without one."""
        try:
            return [(part, await self._call([block[place] for place in part]))]
        except (RequestError, BackendError, InternalError) as error:
            if error.retryable:
                raise
            await self._check_engine(error, block[part[0]])
            if len(part) == 1:
                reasons[part[0]] = parse_input_index(error)[1]
                return []
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._run_or_split(block, [place], reasons)) for place in part]
        return [found for task in tasks for found in task.result()]

    async def _check_engine(self, error: ShoalError, texts: Texts) -> None:
        """Raise the error if it is not about the texts: if the engine does not answer the plainest ones either."""
        if isinstance(error, InputRejected | NotFinite):
            return
        if isinstance(error, RequestError) and parse_input_index(error)[0] is not None:
            return
        try:
            await self._call([("a",) * len(texts)])
        except ShoalError:
            raise error from None

    async def _call(self, texts: list[Texts]) -> Mapping[str, Column]:
        pause = FIRST_PAUSE_S
        for _ in range(RETRIES):
            try:
                return await self._task.call(texts)
            except ShoalError as error:
                if not error.retryable:
                    raise
                await self._sleep(min(max(pause, error.retry_after or 0.0), LONGEST_PAUSE_S))
                pause *= 2
        return await self._task.call(texts)


def _first_error(errors: ExceptionGroup[Any]) -> Exception:
    """Return an error of a group that may hold groups."""
    error: Exception = errors
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _merge(parts: Sequence[Mapping[str, Column]], ranks: Array) -> dict[str, Column]:
    """Join parts column by column, in the order of `ranks`."""
    merged: dict[str, Column] = {}
    for name, first in parts[0].items():
        columns = [part[name] for part in parts]
        if isinstance(first, np.ndarray):
            merged[name] = np.concatenate(columns)[ranks]
        else:
            values = [value for column in columns for value in column]
            merged[name] = [values[rank] for rank in ranks]
    return merged
