"""The life of models: load, download, unload, delete, sleep and wake, behind every door at once.

Everything that is done to one name is done in turn: a job waits for those of its name that were there before it. Jobs
that would undo each other cancel first: an unload cancels a running load, a delete also a download. What is decided
about room and keeping alive is pure and stands in `room`; the states that a model may take stand in `states`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from copy import copy
from dataclasses import replace
from functools import partial

from shoal.core.closing import close_all
from shoal.core.lifecycle.events import Event
from shoal.core.lifecycle.eviction import Bounds
from shoal.core.lifecycle.job_queue import Act, Turns, Work
from shoal.core.lifecycle.jobs import Action, Job, Jobs
from shoal.core.lifecycle.loading import Entry, Fetched, Loader, LoadOptions, Plan, Report
from shoal.core.lifecycle.memory_pool import Residents
from shoal.core.lifecycle.model_status import Standing
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
_NO_ROOM = "waiting until another model may be put to sleep"


CRASHES_APART_S = 60.0
"""A model whose process dies again sooner than this would do so for ever: it stays failed until somebody acts."""


class Lifecycle:
    """Every change of which models are loaded goes through here, one at a time per name.

    A load by API that fails leaves nothing: the model leaves the registry, its reason stays in the listing and is the
    job's error. Models named at start (`add`) stay, as failed. Under `max_loaded_models` and `max_loaded_bytes`
    (0: any) the model that was not used for longest goes to sleep when room is needed, and after `keep_alive_s`
    (0: never) any model does; never one with requests in flight. A sleeping model stays registered and wakes on the
    next request. An explicit unload takes it out of the registry; requests in flight have `unload_timeout_s` to finish,
    new ones are refused with ModelNotReady. Nobody else may add models to the registry or take them out.
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
        self._named: dict[str, Plan] = {}
        self._turns = Turns(self._ended)
        self._standing = Standing(registry, self._turns)
        bounds = Bounds(max_loaded_models, max_loaded_bytes)
        self._residents = Residents(bounds, keep_alive_s, self._turns.__contains__, self._put_to_sleep, clock=clock)
        self._closed = False

    def add(self, plan: Plan, *, required: bool = True) -> Job:
        """Load a model named at start; one that fails stays registered, as failed, and `load` tries it again. One that
        finds no room beside the others begins its life asleep. Raises AddressError when one of its names is taken."""
        self._refuse_if_closed()
        model = self._register(plan, required)
        self._named[plan.name] = plan
        return self._begin(Work(Job("load", plan.name), plan, model, at_start=True, keep=True), self._load)

    def load(self, name: str, options: LoadOptions = _DEFAULTS) -> Job:
        """Load a model. Loaded already: a job that is done, with changed=False; being loaded: that job. One that is
        loaded and cannot answer, because somebody took it off its server, is loaded anew.
        Raises InvalidValue for a bad name, Conflict when the name means another model or this one runs otherwise."""
        self._refuse_if_closed()
        plan = self._resolve(name, options)
        model = self._registry.get(plan.name)
        if model is not None and model.plan is not None and _same(model.plan, plan):
            plan = model.plan
        last = self._turns.last(plan.name, "load", "unload", "delete")
        if last is None or last.job.action == "load":
            current = last.plan if last is not None else model.plan if model is not None else None
            same = current is None or _same(current, plan)
            if not same and current is not None and current.resolved:
                raise _otherwise(current, plan)
            # Behind one that has yet to find its source, the job itself sees whether it is the same.
            if same and last is not None:
                return last.job
            if same and model is not None and model.state == "ready":
                if model.able():
                    return self._nothing_to_do("load", plan.name)
                self._broke(model, model.ready_runner(), Unavailable("it did not answer, and is loaded anew"))
        work = Work(Job("load", plan.name), plan)
        if model is None and plan.name not in self._turns:
            work.model = self._register_late(plan)
        self._standing.forget(plan.name)
        return self._begin(work, self._load)

    def download(self, name: str, options: LoadOptions = _DEFAULTS) -> Job:
        """Fetch a model's files, and nothing more; while that runs, asking again joins it. Raises InvalidValue for a
        bad name, Conflict while another source is downloaded under the same name."""
        self._refuse_if_closed()
        plan = self._resolve(name, options)
        last = self._turns.last(plan.name, "download", "delete")
        if last is not None and last.plan is not None:
            if not _same(last.plan, plan):
                raise Conflict(f"{last.plan.source} is being downloaded as {plan.name!r}: wait for it", param="model")
            return last.job
        return self._begin(Work(Job("download", plan.name), plan), partial(self._download, plan))

    def unload(self, name: str) -> Job:
        """Take a model out once its requests in flight are answered; a running load of it is cancelled.
        Not loaded: a job that is done, with changed=False. Raises InvalidValue for a bad name."""
        self._refuse_if_closed()
        name = self._name_of(name)
        self._standing.forget(name)
        last = self._turns.last(name, "load", "unload", "delete")
        if last is None and self._registry.get(name) is None:
            return self._nothing_to_do("unload", name)
        if last is not None and last.job.action == "unload":
            return last.job
        stopped = self._stop(self._turns.of(name), ("load", "wake"), name)
        return self._begin(Work(Job("unload", name)), partial(self._unload, stopped))

    def delete(self, name: str) -> Job:
        """Unload, then delete the files; a running load or download is cancelled. The job fails with Forbidden, and
        nothing is touched, for what Shoal did not make. Raises InvalidValue for a bad name."""
        self._refuse_if_closed()
        name = self._name_of(name)
        last = self._turns.last(name, "load", "download", "unload", "delete")
        if last is not None and last.job.action == "delete":
            return last.job
        # It does not wait before it has looked whether it may: then it cancels what it would have waited for.
        return self._begin(Work(Job("delete", name)), self._delete, at_once=True)

    def job(self, job_id: str) -> Job:
        """Raises JobNotFound."""
        return self._jobs.find(job_id)

    def jobs(self) -> list[Job]:
        """Those that run and the last 100 that ended, oldest first."""
        return list(self._jobs)

    async def listing(self) -> list[Listing]:
        """What is served, what could be loaded, and what failed. Raises what Loader.entries raises."""
        return self._standing.listing(await self._loader.entries())

    def events(self) -> AsyncGenerator[Event]:
        """What happens from the first `anext` on; a reader that is too slow loses progress, or is cut off."""
        return self._standing.events.watch()

    async def wake(self, model: Model, ctx: Context) -> None:
        """Return when a sleeping model is ready; many requests share one load, which outlives the first to give up.
        The caller has entered the model (`Model.enter`), so that it does not fall asleep again at once.

        Raises DeadlineExceeded, ModelNotReady (somebody unloads it), ModelFailed or Unavailable with the reason why it
        could not be loaded (Unavailable too when all others stay busy until the deadline); it then sleeps on, and a
        later request tries again.
        """
        try:
            async with asyncio.timeout(ctx.remaining(self._clock())):
                while model.resting:
                    await self._waking(model).wait()
        except TimeoutError:
            if model.note == _NO_ROOM:
                raise Unavailable(
                    f"the model {model.name!r} sleeps, and all that are loaded were busy as long as this could wait:"
                    " try again, or raise max_loaded_models or max_loaded_bytes",
                    param="model",
                    retry_after=2.0,
                ) from None
            doing = f" ({model.note})" if model.note else ""
            raise DeadlineExceeded(
                f"the model {model.name!r} was asleep and did not wake in time{doing}: allow more time"
            ) from None
        except Conflict as error:
            raise ModelNotReady(error.message, param="model") from None
        except ModelNotReady:
            raise
        except ShoalError as error:
            message = f"the model {model.name!r} was asleep and could not be loaded again: {error.message}"
            if error.retryable:
                raise Unavailable(message, param="model", retry_after=error.retry_after or 1.0) from error
            raise ModelFailed(message, param="model") from error

    def stays_s(self, name: str) -> float | None:
        """Seconds until a loaded model falls asleep, unless it is asked before; None: it stays. Raises
        ModelNotFound."""
        return self._residents.stays_s(self._registry.find(name))

    def rest(self, name: str) -> bool:
        """Let a model sleep from now on, until the next request for it; False: it is in use, or has no plan to come
        back by. Raises ModelNotFound."""
        model = self._registry.find(name)
        if model.state == "ready" and model.plan is not None and not model.inflight and model.name not in self._turns:
            self._put_to_sleep(model)
        return model.resting

    async def aclose(self) -> None:
        """Cancel jobs and close runners, without unloading them from a server that others use. A second call does
        nothing more."""
        if self._closed:
            return
        self._closed = True
        self._residents.close()
        works = list(self._turns)
        self._turns.stop(works, Unavailable("the server is shutting down: ask again when it is back", retry_after=1.0))
        for work in works:
            await work.job.over.wait()
        self._standing.events.close()
        await close_all(*(model.runner.aclose for model in self._registry if model.runner is not None))

    # Names and plans

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Unavailable("the server is shutting down: ask again when it is back", retry_after=1.0)

    def _resolve(self, name: str, options: LoadOptions) -> Plan:
        """The plan that a name stands for: the one it runs by or was named with at start, else the loader's."""
        model = self._registry.get(name)
        known = model.plan if model is not None else self._named_as(name)
        if known is not None and _agree(options, known):
            return known
        return replace(self._loader.resolve(name, options), options=options)

    def _name_of(self, name: str) -> str:
        model = self._registry.get(name)
        if model is not None:
            return model.name
        if name in self._turns:
            return name
        return (self._named_as(name) or self._loader.resolve(name, _DEFAULTS)).name

    def _named_as(self, name: str) -> Plan | None:
        return next((plan for plan in self._named.values() if name in (plan.name, *plan.aliases)), None)

    def _register(self, plan: Plan, required: bool) -> Model:
        model = Model(plan.name, plan.aliases, plan.default_for, plan=plan, required=required)
        model.idle = partial(self._residents.fell_idle, model)
        self._registry.add(model)
        return model

    def _register_late(self, plan: Plan) -> Model:
        try:
            return self._register(plan, required=False)
        except AddressError as error:
            raise Conflict(f"{plan.name!r} cannot be loaded beside what is served: {error.message}") from None

    # Jobs

    def _nothing_to_do(self, action: Action, name: str) -> Job:
        job = self._jobs.add(Job(action, name, changed=False))
        job.end("done")
        return job

    def _begin(self, work: Work, act: Act, *, at_once: bool = False) -> Job:
        if work.job.action not in ("sleep", "wake"):
            self._jobs.add(work.job)
        self._turns.begin(work, act, at_once=at_once)
        self._standing.tell(work.job.model)
        return work.job

    def _stop(self, works: Iterable[Work], actions: Collection[Action], name: str) -> bool:
        reason = Conflict(f"{name!r} was unloaded or deleted meanwhile: load it again", param="model")
        return self._turns.stop(works, reason, actions)

    def _ended(self, work: Work, error: ShoalError | None) -> None:
        """Whatever became of a job, its books are closed here."""
        name = work.job.model
        if error is not None and work.job.action in ("load", "wake"):
            self._not_loaded(work, error)
        elif error is not None and not work.reason and work.model is not None and work.model.plan is not None:
            self._standing.failed(work.model.plan, error)  # it is not served any longer, but something was left
        if work.job.action == "download":
            if error is None:
                self._standing.forget(name)
                self._standing.events.publish(Event("download_finished", name))
            else:
                self._standing.events.publish(Event("download_failed", name, {"error": error.message}))
        self._standing.tell(name)
        self._residents.tell()

    def _not_loaded(self, work: Work, error: ShoalError) -> None:
        """A load that failed by API leaves nothing but its reason; a model that slept sleeps on; one named at start
        stays and says why it is not there."""
        name, model = work.job.model, work.model
        stopped = work.reason is not None
        if not stopped and not (work.at_start and model is not None and model.required):  # of those the starter tells
            logger.warning("loading %s failed: %s", name, error.message)
        if model is not None and model.state == "loading":
            self._residents.free(model)
            model.note = ""
            if work.keep:
                model.failed(error)
            else:
                model.on("rest")
                model.error = None if stopped else error
                if not model.resting:
                    self._registry.remove(model)
        if not stopped and work.plan is not None and self._registry.get(name) is None:
            self._standing.failed(work.plan, error)

    # What jobs do

    async def _load(self, work: Work) -> None:
        """Also of a model that sleeps or failed: what is registered is seen when its turn has come."""
        plan = work.plan
        assert plan is not None
        model = self._registry.get(plan.name)
        if model is None or model.name != plan.name:
            model = self._register_late(plan)
        if model.state == "ready":
            if model.plan is not None and not _same(model.plan, plan):
                raise _otherwise(model.plan, plan)
            work.job.changed = False
            return
        work.model = model
        if model.state == "failed" and model.runner is not None:
            await self._clear(model, model.runner)
        if model.state != "loading":
            work.keep = model.state == "failed"  # it was there before, and is not to vanish for another try
            model.error = None
            model.on("load")
            self._standing.tell(model.name)
        report = self._standing.report(work.job, model)
        try:
            async with asyncio.timeout(plan.timeout_s or None):
                fetched = await self._loader.fetch(plan, report)
                plan = replace(
                    plan, size=fetched.size or plan.size, source=fetched.source or plan.source, resolved=True
                )
                model.plan = work.plan = plan
                if not await self._take_room(model, plan, work, report):
                    model.resting, model.note = True, ""
                    model.on("rest")
                    return
                runner = await self._loader.open(plan, report)
        except TimeoutError:
            stage = f"; at the last it was {work.job.stage}" if work.job.stage else ""
            raise SetupError(
                f"loading took longer than load_timeout_s ({plan.timeout_s:g} s){stage}: give it more time, or"
                " `shoal pull` it first"
            ) from None
        model.loaded(runner)
        if isinstance(runner, Breakable):
            runner.when_broken(partial(self._broke, model, runner))
        logger.info("%s is ready", model.name)
        self._residents.fell_idle(model)

    def _broke(self, model: Model, runner: Runner, error: ShoalError) -> None:
        if isinstance(error, Crashed) and self._comes_back(model, runner):
            logger.warning("%s: %s; the next request for it loads it again", model.name, error.message)
            model.error, model.crashed = error, self._clock()
            self._put_to_sleep(model)
            return
        model.broke(runner, error)
        self._standing.tell(model.name)
        self._residents.tell()

    def _comes_back(self, model: Model, runner: Runner) -> bool:
        """Whether a model whose process died is to be loaded again by itself: not one that has just done so."""
        return (
            model.runner is runner
            and model.state == "ready"
            and model.plan is not None
            and model.name not in self._turns
            and self._clock() - model.crashed >= CRASHES_APART_S
        )

    async def _clear(self, model: Model, runner: Runner) -> None:
        """Close what a model was served by that broke; what cannot be closed well is not in the way of a new one."""
        assert model.plan is not None
        try:
            await self._loader.close(model.plan, runner)
        except ShoalError as error:
            logger.warning("closing %s, which broke: %s", model.name, error.message)
        model.runner = None
        self._residents.free(model)

    async def _download(self, plan: Plan, work: Work) -> None:
        fetched = await self._loader.fetch(plan, self._standing.report(work.job, None))
        work.job.changed = fetched.changed

    async def _unload(self, stopped: bool, work: Work) -> None:
        work.job.changed = await self._take_out(work) or stopped
        if work.model is not None and work.model.facts is not None:
            self._registry.unloaded(work.model)

    async def _delete(self, work: Work) -> None:
        name = work.job.model
        for entry in await self._loader.entries():
            if entry.name == name and not entry.managed:
                raise Forbidden(f"{name!r} was not made by Shoal and is not deleted: unload it instead", param="model")
        works = self._turns.of(name)
        before = works[: works.index(work)]
        stopped = self._stop(before, ("load", "wake", "download"), name)
        for other in before:
            await other.job.over.wait()
        unloaded = await self._take_out(work)
        removed = await self._loader.remove(name)
        work.job.changed = stopped or unloaded or removed
        self._registry.forget(name)
        self._standing.forget(name)
        self._standing.events.publish(Event("model_remove", name))

    async def _take_out(self, work: Work) -> bool:
        """Out of the registry, drained and closed; whether it was in there."""
        name = work.job.model
        model = work.model = self._registry.get(name)
        if model is None:
            return False
        model.resting = False
        if model.state == "unloaded":
            self._registry.remove(model)
            return True
        model.on("unload")
        self._standing.tell(name)
        try:
            async with asyncio.timeout(self._unload_timeout_s):
                while model.inflight and model.runner is not None:
                    await self._residents.news()
        except TimeoutError:
            logger.warning("%s is closed under %d requests: unload_timeout_s is over", name, model.inflight)
        await self._close(model)
        return True

    async def _close(self, model: Model) -> None:
        """Close its runner, if it has one. When this is cancelled the runner stays, for `aclose` to close."""
        if model.runner is not None:
            assert model.plan is not None
            try:
                await self._loader.close(model.plan, model.runner)
            except Exception:  # whatever went wrong there, the runner itself is closed
                self._closed_runner(model)
                raise
        self._closed_runner(model)

    def _closed_runner(self, model: Model) -> None:
        model.runner, model.note = None, ""
        model.on("closed")
        if not model.resting:
            self._registry.remove(model)
        self._residents.free(model)

    # Sleep and wake

    def _put_to_sleep(self, model: Model) -> None:
        model.resting = True
        model.on("unload")
        self._begin(Work(Job("sleep", model.name)), partial(self._sleep, model))

    async def _sleep(self, model: Model, _: Work) -> None:
        try:
            await self._close(model)
        except ShoalError as error:
            logger.warning("putting %s to sleep: %s", model.name, error.message)
            model.error = copy(error)

    def _waking(self, model: Model) -> Job:
        """The job that wakes it, begun unless there is one."""
        self._refuse_if_closed()
        last = self._turns.last(model.name, "load", "wake", "unload", "delete")
        if last is None:
            return self._begin(Work(Job("wake", model.name), model.plan), self._load)
        if last.job.action in ("unload", "delete"):
            raise ModelNotReady(f"the model {model.name!r} is being unloaded: load it again", param="model")
        return last.job

    async def _take_room(self, model: Model, plan: Plan, work: Work, report: Report) -> bool:
        """Hold memory for it, once others sleep where that is needed; False: a model named at start finds no room
        beside the others, and does not drive them out."""
        if 0 < self._residents.bounds.bytes < plan.size:
            raise InvalidValue(
                f"{plan.name!r} needs {plan.size} bytes, more than max_loaded_bytes"
                f" ({self._residents.bounds.bytes}): raise it",
                param="model",
            )
        if work.at_start and not self._residents.fits(plan.size):
            return False
        while not (taken := self._residents.take(model, plan.size)):
            if taken is None and work.job.action == "wake" and not model.inflight:
                raise Unavailable("everything that is loaded is busy, and nobody waits for this any longer")
            report(_NO_ROOM if taken is None else "waiting until another model has gone to sleep")
            await self._residents.news()
        return True


def _agree(options: LoadOptions, plan: Plan) -> bool:
    """Whether the plan is one that these options could have made."""
    return options.backend in ("", plan.backend) and options.text_in in (None, plan.options.text_in)


def _otherwise(current: Plan, asked: Plan) -> Conflict:
    return Conflict(
        f"{asked.name!r} is loaded from {current.source} on {current.backend}, not from {asked.source} on"
        f" {asked.backend}: unload it first",
        param="model",
    )


def _same(current: Plan, asked: Plan) -> bool:
    return (current.source, current.backend) == (asked.source, asked.backend) and _agree(asked.options, current)


__all__ = [
    "Action",
    "Entry",
    "Event",
    "Fetched",
    "Job",
    "Lifecycle",
    "Listing",
    "LoadOptions",
    "Loader",
    "Plan",
    "Report",
    "Status",
]
