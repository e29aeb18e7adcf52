"""Long-running work on models that clients may wait for, poll or ignore."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import Literal

from shoal.errors import JobNotFound, ShoalError

Action = Literal["load", "download", "unload", "delete", "sleep", "wake"]
"""What a job does; "sleep" and "wake" are started by Shoal itself and are not listed."""

JobState = Literal["running", "done", "failed", "cancelled"]

MAX_ENDED_JOBS = 100
"""Maximum finished jobs that can still be looked up."""


@dataclass(slots=True, eq=False)
class Job:
    """One action on one model, with its progress and result.

    `fraction` is 0..1; `done` and `total` are bytes, None if unknown; `share` is the fraction of a stage that is not
    counted in bytes. `created` and `finished` are Unix seconds (`finished` None: still running). `changed` False: there
    was nothing to do. `error`: why it failed or was cancelled.
    """

    action: Action
    model: str
    id: str = field(default_factory=lambda: f"job_{secrets.token_hex(8)}")
    state: JobState = "running"
    stage: str = ""
    done: float | None = None
    total: float | None = None
    share: float | None = None
    error: ShoalError | None = None
    created: float = field(default_factory=time.time)
    finished: float | None = None
    changed: bool = True
    done_event: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    """Set when the job ends, whatever the outcome."""

    @property
    def fraction(self) -> float | None:
        if self.state == "done":
            return 1.0
        share = self.share if self.done is None or not self.total else self.done / self.total
        return None if share is None else min(max(share, 0.0), 1.0)

    async def wait(self) -> None:
        """Wait for the job to end. Raises its `error`: the cause of the failure, Conflict when an unload or delete
        cancelled it, Unavailable when the server shut down. Cancelling the wait does not affect the job."""
        await self.done_event.wait()
        if self.error is not None:
            raise copy(self.error)  # every waiter adds its frames to what it raises

    def end(self, state: JobState, error: ShoalError | None = None) -> None:
        self.state, self.error, self.finished = state, error, time.time()
        self.done_event.set()


class Jobs:
    """Jobs by id: all running ones and the most recently ended."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def add(self, job: Job) -> Job:
        self._jobs[job.id] = job
        ended = [each.id for each in self._jobs.values() if each.state != "running"]
        for old in ended[: max(0, len(ended) - MAX_ENDED_JOBS)]:
            del self._jobs[old]
        return job

    def find(self, job_id: str) -> Job:
        """Return a job by id. Raises JobNotFound."""
        try:
            return self._jobs[job_id]
        except KeyError:
            raise JobNotFound(
                "no such job: only the most recent jobs are kept; GET the list of models to see its result"
            ) from None
