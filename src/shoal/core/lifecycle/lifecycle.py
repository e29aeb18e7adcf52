"""Load, download, unload, delete, put to sleep and wake models, for every API and command at once.

Jobs on one name run in order: a job waits for earlier jobs on its name. Contradictory jobs are cancelled first: an
unload or delete cancels a running load or download. `eviction` decides about memory and keep-alive; `states` holds
the state transitions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial

from shoal.core.closing import close_all
from shoal.core.lifecycle.events import Event
from shoal.core.lifecycle.eviction import MemoryLimits
from shoal.core.lifecycle.job_queue import ActiveJob, JobFunction, JobQueue
from shoal.core.lifecycle.jobs import Action, Job, Jobs
from shoal.core.lifecycle.loading import Entry, FetchResult, Loader, LoadOptions, Plan, ProgressReporter
from shoal.core.lifecycle.memory_pool import MemoryPool
from shoal.core.lifecycle.model_status import ModelStatus
from shoal.core.listing import Listing, Status
from shoal.core.protocols import Breakable, Runner
from shoal.core.registry import Model, Registry
from shoal.errors import (
    AddressError,
    Conflict,
    Crashed,
    DeadlineExceeded,
    Forbidden,
    InvalidValue,
    ModelFailed,
    ModelNotReady,
    SetupError,
    ShoalError,
    Unavailable,
)
from shoal.types import Context

logger = logging.getLogger("shoal.core")

_DEFAULTS = LoadOptions()
_NO_ROOM = "waiting until another model can be put to sleep"


CRASHES_APART_S = 60.0
"""Minimum seconds between crashes. A model that crashes again sooner would do so forever, so it stays failed until
someone acts."""

RESTORE_S = 60.0
"""Time for which models are restored one after another: if one ends the process, that one alone is lost. Then the rest
load at once, since one may wait for a server that is gone."""


class Lifecycle:
    """Changes which models are loaded, one job at a time per name.

    A load by API that fails leaves no model: it leaves the registry, and the error stays in the listing and in the job.
    Models named at startup (`add`) stay registered as failed. Under `max_loaded_models` and `max_loaded_bytes` (0: no
    limit) the least recently used model goes to sleep when another needs memory. After `keep_alive_s` (0: never) any
    idle model does. A model with requests in flight never goes to sleep. A sleeping model stays registered and wakes on
    the next request. An explicit unload removes it from the registry: requests in flight have `unload_timeout_s` to
    finish, new ones are rejected with ModelNotReady. Only this class may add models to the registry or remove them.
    """

    def __init__(
        self,
        registry: Registry,
        loader: Loader,
        *,
        max_loaded_models: int = 0,
        max_loaded_bytes: int = 0,
        keep_alive_s: float = 0.0,
        unload_timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._loader = loader
        self._unload_timeout_s = unload_timeout_s
        self._clock = clock
        self._jobs = Jobs()
        self._startup_plans: dict[str, Plan] = {}
        self._restoring: Job | None = None
        self._not_begun: set[Model] = set()
        self._queue = JobQueue(self._finish_job)
        self._model_status = ModelStatus(registry, self._queue)
        bounds = MemoryLimits(max_loaded_models, max_loaded_bytes)
        self._memory = MemoryPool(bounds, keep_alive_s, self._queue.__contains__, self._put_to_sleep, clock=clock)
        self._closed = False

    def add(self, plan: Plan, *, required: bool = True) -> Job:
        """Load a model named at startup. If it fails it stays registered as failed, and `load` retries it. If there is
        no memory for it, it starts asleep. Raises AddressError when one of its names is taken."""
        self._check_open()
        model = self._register(plan, required)
        self._startup_plans[plan.name] = plan
        return self._start_job(
            ActiveJob(Job("load", plan.name), plan, model, at_start=True, keep_failed=True), self._load
        )

    def load(self, name: str, options: LoadOptions = _DEFAULTS) -> Job:
        """Load a model. Returns a finished job with changed=False if it is loaded, and the running job if it is
        loading.

        A loaded model that cannot answer, because it was removed from its server, is reloaded. Raises InvalidValue for
        a bad name, and Conflict when the name means another model or this one is loaded with other options.
        """
        self._check_open()
        plan = self._resolve(name, options)
        model = self._registry.get(plan.name)
        if model is not None and model.plan is not None and _is_same_plan(model.plan, plan):
            plan = model.plan
        last = self._queue.last(plan.name, "load", "unload", "delete")
        if last is None or last.job.action == "load":
            current = last.plan if last is not None else model.plan if model is not None else None
            same = current is None or _is_same_plan(current, plan)
            if not same and current is not None and current.resolved:
                raise _plan_conflict(current, plan)
            # If the earlier job has yet to resolve its source, the new job compares the plans itself.
            if same and last is not None:
                return last.job
            if same and model is not None and model.state == "ready":
                if model.can_answer():
                    return self._add_finished_job("load", plan.name)
                self._on_broken(model, model.ready_runner(), Unavailable("it does not respond and is being reloaded"))
        work = ActiveJob(Job("load", plan.name), plan)
        if model is None and plan.name not in self._queue:
            work.model = self._register_on_demand(plan)
        self._model_status.forget(plan.name)
        return self._start_job(work, self._load)

    def restore(self, plan: Plan, *, is_sleeping: bool) -> None:
        """Serve a model that clients had loaded in a process before this one: asleep, or loaded after those restored
        before it. If there is no memory for it, it starts asleep. Raises Conflict when one of its names is taken."""
        self._check_open()
        model = self._register_on_demand(plan)
        if is_sleeping:
            model.is_sleeping = True
            model.transition("rest")
            self._model_status.publish_status(model.name)
            return
        self._not_begun.add(model)
        work = ActiveJob(Job("load", plan.name), plan, model, at_start=True)
        self._restoring = self._start_job(work, partial(self._restore, model, self._restoring))

    def restorable_plans(self) -> list[tuple[Plan, bool]]:
        """Return what `restore` takes in the next process: models that clients have loaded, and those that this process
        has not begun to restore."""
        return [
            (model.plan, model.is_sleeping)
            for model in self._registry
            if model.plan is not None
            and model.name not in self._startup_plans
            and (model.state == "ready" or model.is_sleeping or model in self._not_begun)
        ]

    def download(self, name: str, options: LoadOptions = _DEFAULTS) -> Job:
        """Download a model's files without loading it; repeated calls return the running job. Raises InvalidValue for a
        bad name, Conflict while another source is downloaded under the same name."""
        self._check_open()
        plan = self._resolve(name, options)
        last = self._queue.last(plan.name, "download", "delete")
        if last is not None and last.plan is not None:
            if not _is_same_plan(last.plan, plan):
                raise Conflict(f"{last.plan.source} is being downloaded as {plan.name!r}: wait for it", param="model")
            return last.job
        return self._start_job(ActiveJob(Job("download", plan.name), plan), partial(self._download, plan))

    def unload(self, name: str) -> Job:
        """Remove a model after its requests in flight are answered, cancelling a running load or download. Returns a
        finished job with changed=False if there is neither. Raises InvalidValue for a bad name, and Forbidden for a
        model that is not the clients' to unload."""
        self._check_open()
        name = self._resolve_name(name)
        model = self._registry.get(name)
        if model is not None and model.plan is not None and model.runner is not None:
            self._loader.check_unload(model.plan, model.runner)
        self._model_status.forget(name)
        last = self._queue.last(name, "load", "download", "unload", "delete")
        if last is None and model is None:
            return self._add_finished_job("unload", name)
        if last is not None and last.job.action == "unload":
            return last.job
        stopped = self._cancel_jobs(self._queue.active_jobs(name), ("load", "wake", "download"), name)
        return self._start_job(ActiveJob(Job("unload", name)), partial(self._unload, stopped))

    def delete(self, name: str) -> Job:
        """Unload a model and delete its files, cancelling a running load or download. The job fails with Forbidden,
        without changing anything, for models that Shoal did not create. Raises InvalidValue for a bad name."""
        self._check_open()
        name = self._resolve_name(name)
        last = self._queue.last(name, "load", "download", "unload", "delete")
        if last is not None and last.job.action == "delete":
            return last.job
        # Run at once to check permission first: the job then cancels those it would have waited for.
        return self._start_job(ActiveJob(Job("delete", name)), self._delete, at_once=True)

    def job(self, job_id: str) -> Job:
        """Return a job by id. Raises JobNotFound."""
        return self._jobs.find(job_id)

    def jobs(self) -> list[Job]:
        """Return running jobs and the last 100 finished ones, oldest first."""
        return list(self._jobs)

    async def listing(self) -> list[Listing]:
        """List served, loadable and failed models. Raises the errors of Loader.entries."""
        return self._model_status.listing(await self._loader.entries())

    def events(self) -> AsyncGenerator[Event]:
        """Yield events from the first `anext` on; a slow reader loses progress events or is disconnected."""
        return self._model_status.events.watch()

    async def wake(self, model: Model, ctx: Context) -> None:
        """Wait until a sleeping model is ready. Concurrent requests share one load, which continues if a waiter gives
        up.

        The caller must have entered the model (`Model.enter`), so that it does not go back to sleep. Raises
        DeadlineExceeded, ModelNotReady (it is being unloaded), or ModelFailed or Unavailable with the reason why it
        could not be loaded (Unavailable also when all other models stay busy until the deadline). After an error it
        stays asleep, and a later request tries again.
        """
        try:
            async with asyncio.timeout(ctx.remaining(self._clock())):
                while model.is_sleeping:
                    await self._ensure_wake_job(model).wait()
        except TimeoutError:
            if model.note == _NO_ROOM:
                raise Unavailable(
                    f"the model {model.name!r} is asleep, and all loaded models stayed busy until the deadline: try "
                    "again, or raise max_loaded_models or max_loaded_bytes",
                    param="model",
                    retry_after=2.0,
                ) from None
            doing = f" ({model.note})" if model.note else ""
            raise DeadlineExceeded(
                f"the model {model.name!r} was asleep and did not load in time{doing}: allow more time"
            ) from None
        except Conflict as error:
            raise ModelNotReady(error.message, param="model") from None
        except ModelNotReady:
            raise
        except ShoalError as error:
            message = f"the model {model.name!r} was asleep and could not be reloaded: {error.message}"
            if error.retryable:
                raise Unavailable(message, param="model", retry_after=error.retry_after or 1.0) from error
            raise ModelFailed(message, param="model") from error

    def seconds_until_sleep(self, name: str) -> float | None:
        """Return the seconds until a loaded model goes to sleep if it gets no request; None: never. Raises
        ModelNotFound."""
        return self._memory.seconds_until_sleep(self._registry.find(name))

    def try_sleep(self, name: str) -> bool:
        """Put a model to sleep until its next request. Returns False if it is in use or has no plan to reload it.
        Raises ModelNotFound."""
        model = self._registry.find(name)
        if model.state == "ready" and model.plan is not None and not model.inflight and model.name not in self._queue:
            self._put_to_sleep(model)
        return model.is_sleeping

    async def aclose(self) -> None:
        """Cancel jobs and close runners, without unloading models from a server that others use. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._memory.close()
        works = list(self._queue)
        self._queue.stop(
            works, Unavailable("the server is shutting down: try again after it restarts", retry_after=1.0)
        )
        for work in works:
            await work.job.done_event.wait()
        self._model_status.events.close()
        await close_all(*(model.runner.aclose for model in self._registry if model.runner is not None))

    # Names and plans

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the server is shutting down: try again after it restarts", retry_after=1.0)

    def _resolve(self, name: str, options: LoadOptions) -> Plan:
        """Resolve a name to a plan: its current or startup plan if the options match, else the loader's."""
        model = self._registry.get(name)
        known = model.plan if model is not None else self._find_startup_plan(name)
        if known is not None and _is_compatible(options, known):
            return known
        return replace(self._loader.resolve(name, options), options=options)

    def _resolve_name(self, name: str) -> str:
        model = self._registry.get(name)
        if model is not None:
            return model.name
        if name in self._queue:
            return name
        return (self._find_startup_plan(name) or self._loader.resolve(name, _DEFAULTS)).name

    def _find_startup_plan(self, name: str) -> Plan | None:
        return next((plan for plan in self._startup_plans.values() if name in (plan.name, *plan.aliases)), None)

    def _register(self, plan: Plan, required: bool) -> Model:
        model = Model(
            plan.name, plan.aliases, plan.default_for, plan=plan, required=required, idle=self._memory.mark_idle
        )
        self._registry.add(model)
        return model

    def _register_on_demand(self, plan: Plan) -> Model:
        try:
            return self._register(plan, required=False)
        except AddressError as error:
            raise Conflict(f"{plan.name!r} cannot be loaded alongside the served models: {error.message}") from None

    # Jobs

    def _add_finished_job(self, action: Action, name: str) -> Job:
        job = self._jobs.add(Job(action, name, changed=False))
        job.end("done")
        return job

    def _start_job(self, work: ActiveJob, act: JobFunction, *, at_once: bool = False) -> Job:
        if work.job.action not in ("sleep", "wake"):
            self._jobs.add(work.job)
        self._queue.begin(work, act, at_once=at_once)
        self._model_status.publish_status(work.job.model)
        return work.job

    def _cancel_jobs(self, works: Iterable[ActiveJob], actions: Collection[Action], name: str) -> bool:
        reason = Conflict(f"{name!r} was unloaded or deleted in the meantime: load it again", param="model")
        return self._queue.stop(works, reason, actions)

    def _finish_job(self, work: ActiveJob, error: ShoalError | None) -> None:
        """Finish a job, whatever its outcome: record errors, publish events, wake waiters."""
        name = work.job.model
        self._registry.awaited_servers.settle(name)
        if error is not None and work.job.action in ("load", "wake"):
            self._record_load_failure(work, error)
        elif error is not None and not work.reason and work.model is not None and work.model.plan is not None:
            self._model_status.record_failure(work.model.plan, error)  # no longer served, but something was left behind
        if work.job.action == "download":
            if error is None:
                self._model_status.forget(name)
                self._model_status.events.publish(Event("download_finished", name))
            else:
                self._model_status.events.publish(Event("download_failed", name, {"error": error.message}))
        self._model_status.publish_status(name)
        self._memory.notify()

    def _record_load_failure(self, work: ActiveJob, error: ShoalError) -> None:
        """Record a failed load. One by API leaves only its error; a sleeping model stays asleep; a startup model stays
        registered as failed."""
        name, model = work.job.model, work.model
        stopped = work.reason is not None
        if not stopped and not (work.at_start and model is not None and model.required):  # the starter reports those
            logger.warning("loading %s failed: %s", name, error.message)
        if model is not None and model.state == "loading":
            self._memory.free(model)
            model.note = ""
            if work.keep_failed:
                model.mark_failed(error)
            else:
                model.transition("rest")
                model.error = None if stopped else error
                if not model.is_sleeping:
                    self._registry.remove(model)
        if not stopped and work.plan is not None and self._registry.get(name) is None:
            self._model_status.record_failure(work.plan, error)

    # What jobs do

    async def _restore(self, model: Model, previous: Job | None, work: ActiveJob) -> None:
        if previous is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(RESTORE_S):
                    await previous.done_event.wait()
        self._not_begun.discard(model)
        await self._load(work)

    async def _load(self, work: ActiveJob) -> None:
        """Load a model, also one that sleeps or failed. The registry is read only now, when the job's turn has come."""
        plan = work.plan
        assert plan is not None
        model = self._registry.get(plan.name)
        if model is None or model.name != plan.name:
            model = self._register_on_demand(plan)
        if model.state == "ready":
            if model.plan is not None and not _is_same_plan(model.plan, plan):
                raise _plan_conflict(model.plan, plan)
            work.job.changed = False
            return
        work.model = model
        if model.state == "failed" and model.runner is not None:
            await self._close_broken(model, model.runner)
        if model.state != "loading":
            work.keep_failed = model.state == "failed"  # it was registered before, so a failed retry must not remove it
            model.error = None
            model.transition("load")
            self._model_status.publish_status(model.name)
        report = self._model_status.make_reporter(work.job, model)
        try:
            async with asyncio.timeout(plan.timeout_s or None):
                fetched = await self._loader.fetch(plan, report)
                plan = replace(
                    plan, size=fetched.size or plan.size, source=fetched.source or plan.source, resolved=True
                )
                model.plan = work.plan = plan
                if not await self._reserve_memory(model, plan, work, report):
                    model.is_sleeping, model.note = True, ""
                    model.transition("rest")
                    return
                runner = await self._loader.open(plan, report)
        except TimeoutError:
            stage = f"; its last stage was {work.job.stage}" if work.job.stage else ""
            raise SetupError(
                f"loading took longer than load_timeout_s ({plan.timeout_s:g} s){stage}: raise it, or run `shoal "
                "pull` first"
            ) from None
        model.mark_loaded(runner)
        if isinstance(runner, Breakable):
            runner.when_broken(partial(self._on_broken, model, runner))
        logger.info("%s is ready", model.name)
        self._memory.mark_idle(model)

    def _on_broken(self, model: Model, runner: Runner, error: ShoalError) -> None:
        if isinstance(error, Crashed) and self._should_reload(model, runner):
            logger.warning("%s: %s; the next request for it loads it again", model.name, error.message)
            model.error, model.crashed = error, self._clock()
            self._put_to_sleep(model)
            return
        model.mark_broken(runner, error)
        self._model_status.publish_status(model.name)
        self._memory.notify()

    def _should_reload(self, model: Model, runner: Runner) -> bool:
        """Whether to reload a model whose process died: yes, unless it crashed recently."""
        return (
            not self._closed
            and model.runner is runner
            and model.state == "ready"
            and model.plan is not None
            and model.name not in self._queue
            and self._clock() - model.crashed >= CRASHES_APART_S
        )

    async def _close_broken(self, model: Model, runner: Runner) -> None:
        """Close the runner of a broken model; an error in closing must not prevent a new load."""
        assert model.plan is not None
        try:
            await self._loader.close(model.plan, runner)
        except ShoalError as error:
            logger.warning("closing the failed replica of %s: %s", model.name, error.message)
        except Exception:  # a bug: the runner itself is closed all the same
            logger.exception("closing the failed replica of %s", model.name)
        model.runner = None
        self._memory.free(model)

    async def _download(self, plan: Plan, work: ActiveJob) -> None:
        fetched = await self._loader.fetch(plan, self._model_status.make_reporter(work.job, None))
        work.job.changed = fetched.changed

    async def _unload(self, stopped: bool, work: ActiveJob) -> None:
        work.job.changed = await self._remove_model(work) or stopped
        if work.model is not None and work.model.facts is not None:
            self._registry.remember_unloaded(work.model)

    async def _delete(self, work: ActiveJob) -> None:
        name = work.job.model
        for entry in await self._loader.entries():
            if entry.name == name and not entry.managed:
                raise Forbidden(
                    f"{name!r} was not created by Shoal, so it cannot be deleted: unload it instead", param="model"
                )
        works = self._queue.active_jobs(name)
        before = works[: works.index(work)]
        stopped = self._cancel_jobs(before, ("load", "wake", "download"), name)
        for other in before:
            await other.job.done_event.wait()
        unloaded = await self._remove_model(work)
        removed = await self._loader.remove(name)
        work.job.changed = stopped or unloaded or removed
        self._registry.forget(name)
        self._model_status.forget(name)
        self._model_status.events.publish(Event("model_remove", name))

    async def _remove_model(self, work: ActiveJob) -> bool:
        """Remove the model from the registry, drain and close it. Returns whether it was registered."""
        name = work.job.model
        model = work.model = self._registry.get(name)
        if model is None:
            return False
        model.is_sleeping = False
        if model.state == "unloaded":
            self._registry.remove(model)
            return True
        model.transition("unload")
        self._model_status.publish_status(name)
        try:
            async with asyncio.timeout(self._unload_timeout_s):
                while model.inflight and model.runner is not None:
                    await self._memory.wait_for_change()
        except TimeoutError:
            logger.warning("closing %s with %d requests in flight: unload_timeout_s has passed", name, model.inflight)
        await self._close(model)
        return True

    async def _close(self, model: Model) -> None:
        """Close the model's runner, if any. On cancellation the runner stays, for `aclose` to close."""
        if model.runner is not None:
            assert model.plan is not None
            try:
                await self._loader.close(model.plan, model.runner)
            except Exception:  # the runner itself is closed, whatever went wrong
                self._mark_closed(model)
                raise
        self._mark_closed(model)

    def _mark_closed(self, model: Model) -> None:
        model.runner, model.note = None, ""
        model.transition("closed")
        if not model.is_sleeping:
            self._registry.remove(model)
        self._memory.free(model)

    # Sleep and wake

    def _put_to_sleep(self, model: Model) -> None:
        model.is_sleeping = True
        model.transition("unload")
        self._start_job(ActiveJob(Job("sleep", model.name)), partial(self._sleep, model))

    async def _sleep(self, model: Model, _: ActiveJob) -> None:
        try:
            await self._close(model)
        except ShoalError as error:
            logger.warning("putting %s to sleep: %s", model.name, error.message)
            model.error = copy(error)

    def _ensure_wake_job(self, model: Model) -> Job:
        """Return the job that wakes the model, starting one if there is none."""
        self._check_open()
        last = self._queue.last(model.name, "load", "wake", "unload", "delete")
        if last is None:
            return self._start_job(ActiveJob(Job("wake", model.name), model.plan), self._load)
        if last.job.action in ("unload", "delete"):
            raise ModelNotReady(f"the model {model.name!r} is being unloaded: load it again", param="model")
        return last.job

    async def _reserve_memory(self, model: Model, plan: Plan, work: ActiveJob, report: ProgressReporter) -> bool:
        """Reserve memory for a model, putting others to sleep if needed. Returns False if a startup model does not fit
        beside the others: it does not evict them."""
        if 0 < self._memory.bounds.bytes < plan.size:
            raise InvalidValue(
                f"{plan.name!r} needs {plan.size} bytes, more than max_loaded_bytes"
                f" ({self._memory.bounds.bytes}): raise it",
                param="model",
            )
        if work.at_start and not self._memory.fits(plan.size):
            return False
        while not (taken := self._memory.take(model, plan.size)):
            if taken is None and work.job.action == "wake" and not model.inflight:
                raise Unavailable("all loaded models are busy, and no request waits for this model any more")
            report(_NO_ROOM if taken is None else "waiting until another model has gone to sleep")
            await self._memory.wait_for_change()
        return True


def _is_compatible(options: LoadOptions, plan: Plan) -> bool:
    """Whether the plan could have been made with these options."""
    return options.backend in ("", plan.backend) and options.text_in in (None, plan.options.text_in)


def _plan_conflict(current: Plan, requested: Plan) -> Conflict:
    return Conflict(
        f"{requested.name!r} is loaded from {current.source} on {current.backend}, not from {requested.source} on"
        f" {requested.backend}: unload it first",
        param="model",
    )


def _is_same_plan(current: Plan, requested: Plan) -> bool:
    return (current.source, current.backend) == (requested.source, requested.backend) and _is_compatible(
        requested.options, current
    )


__all__ = [
    "Action",
    "Entry",
    "Event",
    "FetchResult",
    "Job",
    "Lifecycle",
    "Listing",
    "LoadOptions",
    "Loader",
    "Plan",
    "ProgressReporter",
    "Status",
]
