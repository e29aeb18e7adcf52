"""Run jobs in order: a job on a name waits for the earlier jobs on that name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shoal.core.lifecycle.jobs import Action, Job, JobState
from shoal.core.lifecycle.loading import Plan
from shoal.core.registry import Model
from shoal.errors import InternalError, ShoalError, Unavailable

logger = logging.getLogger("shoal.core")


@dataclass(slots=True, eq=False)
class ActiveJob:
    """A job that has not ended. `plan`: what to load or download; `model`: the model being loaded, once started;
    `keep_failed`: register the model as failed if it fails to load; `reason`: why the job was stopped."""

    job: Job
    plan: Plan | None = None
    model: Model | None = None
    at_start: bool = False
    keep_failed: bool = False
    reason: ShoalError | None = None
    task: asyncio.Task[None] = field(init=False, repr=False)


JobFunction = Callable[[ActiveJob], Coroutine[Any, Any, None]]


class JobQueue:
    """All active jobs by model name, oldest first.

    `ended` is called once per job with its error (None on success), just before the job is marked as ended.
    """

    def __init__(self, ended: Callable[[ActiveJob, ShoalError | None], None]) -> None:
        self._works: dict[str, list[ActiveJob]] = {}
        self._on_end = ended

    def __iter__(self) -> Iterator[ActiveJob]:
        return iter([work for works in self._works.values() for work in works])

    def __contains__(self, name: str) -> bool:
        return name in self._works

    def active_jobs(self, name: str) -> Sequence[ActiveJob]:
        return tuple(self._works.get(name, ()))

    def last(self, name: str, *actions: Action) -> ActiveJob | None:
        """Return the latest job of these kinds on this name, ignoring jobs that are being stopped."""
        return next(
            (each for each in reversed(self.active_jobs(name)) if each.job.action in actions and not each.reason), None
        )

    def begin(self, work: ActiveJob, act: JobFunction, *, at_once: bool = False) -> None:
        """Run `act` after the earlier jobs on this name, or with `at_once` right away."""
        name = work.job.model
        before = () if at_once else self.active_jobs(name)
        self._works.setdefault(name, []).append(work)
        work.task = asyncio.get_running_loop().create_task(
            _run_after(before, act, work), name=f"{work.job.action} {name}"
        )
        # Not in the task itself: a task that is cancelled before its first step never runs any code.
        work.task.add_done_callback(partial(self._finish, work))

    def stop(self, works: Iterable[ActiveJob], reason: ShoalError, actions: Collection[Action] | None = None) -> bool:
        """Cancel the jobs of these kinds (None: all) and return whether there were any. They end shortly afterwards."""
        stopped = [work for work in works if actions is None or work.job.action in actions]
        for work in stopped:
            work.reason = reason
            work.task.cancel()
        return bool(stopped)

    def _finish(self, work: ActiveJob, task: asyncio.Task[None]) -> None:
        job, error = work.job, _get_error(work, task)
        works = self._works[job.model]
        works.remove(work)
        if not works:
            del self._works[job.model]
        state: JobState = "done" if error is None else "cancelled" if task.cancelled() else "failed"
        try:
            self._on_end(work, error)
        finally:
            job.end(state, error)


async def _run_after(before: Sequence[ActiveJob], act: JobFunction, work: ActiveJob) -> None:
    for other in before:
        await other.job.done_event.wait()
    await act(work)


def _get_error(work: ActiveJob, task: asyncio.Task[None]) -> ShoalError | None:
    if task.cancelled():
        work.reason = work.reason or Unavailable("the job was cancelled because the server is shutting down: try again")
        return work.reason
    error = task.exception()
    if error is None:
        return None
    if isinstance(error, ShoalError):
        return copy(error)  # the error is kept, and a load's frames hold the weights it read
    # A fault in one model's files or libraries must not take the others down.
    logger.error("%s of %s failed unexpectedly", work.job.action, work.job.model, exc_info=error)
    return InternalError(f"the {work.job.action} of {work.job.model!r} failed unexpectedly: {error!r}")
