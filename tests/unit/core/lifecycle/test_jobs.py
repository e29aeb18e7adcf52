from __future__ import annotations

import re

import pytest

from shoal.core.lifecycle.jobs import MAX_ENDED_JOBS, Job, Jobs
from shoal.errors import JobNotFound, SourceError


async def test_a_job_ends_once_for_all_waiters() -> None:
    """A caller that waits after the end gets the same result."""
    job = Job("load", "m")
    assert re.fullmatch(r"job_[0-9a-f]{16}", job.id)
    assert (job.state, job.finished) == ("running", None)
    job.end("failed", SourceError("no"))
    for _ in range(2):
        with pytest.raises(SourceError):
            await job.wait()
    assert (job.state, job.finished is not None) == ("failed", True)
    good = Job("unload", "m")
    good.end("done")
    await good.wait()


@pytest.mark.parametrize(
    ("done", "total", "fraction"),
    [(None, None, None), (5, None, None), (None, 5, None), (5, 0, None), (1, 4, 0.25), (9, 4, 1.0), (-1, 4, 0.0)],
)
async def test_the_fraction_is_known_when_both_are(
    done: float | None, total: float | None, fraction: float | None
) -> None:
    """The fraction is between 0 and 1, and 1 after success whatever was reported."""
    job = Job("load", "m", done=done, total=total)
    assert job.fraction == fraction
    job.end("done")
    assert job.fraction == 1.0


@pytest.mark.parametrize(("share", "fraction"), [(0.5, 0.5), (-1.0, 0.0), (2.0, 1.0)])
async def test_a_stage_without_bytes_has_its_share(share: float, fraction: float) -> None:
    job = Job("load", "m", share=share)
    assert (job.fraction, job.done, job.total) == (fraction, None, None)


async def test_running_jobs_are_kept_and_the_last_that_ended() -> None:
    """All running jobs are kept, and the last MAX_ENDED_JOBS that ended."""
    jobs = Jobs()
    running = jobs.add(Job("load", "long"))
    ended = [jobs.add(Job("load", f"m{number}")) for number in range(MAX_ENDED_JOBS + 20)]
    for job in ended:
        job.end("done")
    last = jobs.add(Job("load", "last"))
    assert list(jobs) == [running, *ended[-MAX_ENDED_JOBS:], last]
    assert jobs.find(running.id) is running
    with pytest.raises(JobNotFound):
        jobs.find(ended[0].id)
