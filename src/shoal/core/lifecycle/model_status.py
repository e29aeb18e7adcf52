"""Report the status of every name: served models, their jobs and their failures; watchers get every change."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from shoal.core.lifecycle.events import Event, Events
from shoal.core.lifecycle.job_queue import ActiveJob, JobQueue
from shoal.core.lifecycle.jobs import Job
from shoal.core.lifecycle.loading import Entry, Plan, ProgressReporter, is_blocked
from shoal.core.listing import STATUSES, Listing, Status, describe_available, describe_registered
from shoal.core.registry import Model, Registry
from shoal.errors import ShoalError

FAILURES_KEPT = 100
"""Maximum names whose last failed load is remembered."""


class ModelStatus:
    """Remembers the errors of failed loads that left no model, and publishes every status change."""

    def __init__(self, registry: Registry, turns: JobQueue) -> None:
        self.events = Events()
        self._registry = registry
        self._queue = turns
        self._failures: OrderedDict[str, tuple[Plan, ShoalError]] = OrderedDict()

    def record_failure(self, plan: Plan, error: ShoalError) -> None:
        self._failures[plan.name] = (plan, error)
        if len(self._failures) > FAILURES_KEPT:
            self._failures.popitem(last=False)

    def forget(self, name: str) -> None:
        """Drop the remembered failure of a name."""
        self._failures.pop(name, None)

    def publish_status(self, name: str) -> None:
        """Publish the current status of a name."""
        model, error = self._registry.get(name), self._error(name)
        data = {
            "status": self._status(name),
            "error": error.message if error is not None else None,
            "stage": model.note if model is not None else "",
        }
        self.events.publish(Event("model_status", name, data))

    def make_reporter(self, job: Job, model: Model | None) -> ProgressReporter:
        """Return a reporter for the loader while the job runs; for a loaded model it works as long as the model is
        registered."""

        def report(
            stage: str, done: float | None = None, total: float | None = None, *, fraction: float | None = None
        ) -> None:
            fresh, over = stage != job.stage, job.finished is not None
            if model is not None and self._registry.get(model.name) is model:
                fresh, over, model.note = stage != model.note, False, stage
            if over:
                return
            if is_blocked(stage):
                self._registry.awaited_servers.settle(job.model)
            if job.finished is None:
                job.stage, job.done, job.total, job.share = stage, done, total, fraction
            if done is not None:
                progress = {"stage": stage, "done": done, "total": total, "fraction": job.fraction}
                self.events.publish(Event("download_progress", job.model, progress))
            elif fresh:
                self.publish_status(job.model)

        return report

    def listing(self, found: Iterable[Entry]) -> list[Listing]:
        """List served models, then available ones. Among entries of one name the first counts: a load without options
        uses it."""
        entries: dict[str, Entry] = {}
        sources: dict[str, Entry] = {}
        for entry in found:
            entries.setdefault(entry.name, entry)
            sources.setdefault(entry.source, entry)
        served = []
        for model in self._registry:
            # A model under its own name may use the files of an entry with another name.
            own = entries.pop(model.name, None) or sources.get(model.plan.source if model.plan is not None else "")
            served.append(describe_registered(model, own, _job(self._queue.last(model.name, "load", "wake"))))
        plans = [work.plan for work in self._queue if work.plan is not None]
        for plan in (*plans, *(plan for plan, _ in self._failures.values())):
            if self._registry.get(plan.name) is None:
                entries.setdefault(plan.name, Entry(name=plan.name, source=plan.source, backend=plan.backend))
        return served + [self._describe_available(entry) for entry in entries.values()]

    def _describe_available(self, entry: Entry) -> Listing:
        download = _job(self._queue.last(entry.name, "download"))
        return describe_available(entry, self._status(entry.name), self._error(entry.name), download)

    def _status(self, name: str) -> Status:
        model = self._registry.get(name)
        if model is not None:
            return STATUSES[model.state]
        if self._queue.last(name, "download") is not None:
            return "downloading"
        return "failed" if name in self._failures else "unloaded"

    def _error(self, name: str) -> ShoalError | None:
        model = self._registry.get(name)
        if model is not None:
            return model.error
        _, error = self._failures.get(name, (None, None))
        return error


def _job(work: ActiveJob | None) -> Job | None:
    return work.job if work is not None else None
