"""Load, download, unload and delete: joining, undoing, rejecting and failing."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from shoal.core.lifecycle.lifecycle import Entry, Job, Lifecycle, LoadOptions, Plan, ProgressReporter
from shoal.core.protocols import Runner
from shoal.core.statistics import Counts
from shoal.errors import (
    AddressError,
    Conflict,
    Forbidden,
    InternalError,
    InvalidValue,
    JobNotFound,
    ModelNotFound,
    ModelNotReady,
    SetupError,
    SourceError,
    TransportFailed,
    Unavailable,
)
from shoal.types import Embedded
from tests.unit.core.conftest import Run, gathered, until
from tests.unit.core.lives import Stack


def test_a_load_fetches_opens_and_serves(virtual: Run[None]) -> None:
    """The model is listed at once, as loading and not required; it answers once the job ends."""

    async def main() -> None:
        stack = Stack()
        job = stack.lifecycle.load("a")
        assert (job.action, job.model, job.state, job.finished) == ("load", "a", "running", None)
        assert stack.state("a") == "loading"
        with pytest.raises(ModelNotReady, match="is loading"):
            await stack.ask("a")
        assert stack.gateway.ready()
        await job.wait()
        assert (job.state, job.error, job.changed, job.fraction) == ("done", None, True, 1.0)
        assert job.finished is not None
        assert (await stack.ask("a")).tokens == [1]
        assert stack.loads.log == [("fetch", "a"), ("open", "a")]
        assert stack.lifecycle.job(job.id) is job
        assert stack.lifecycle.jobs() == [job]

    virtual(main)


def test_the_same_load_twice_is_one(virtual: Run[None]) -> None:
    """A request during a load gets its job; a later one gets a finished job that changed nothing."""

    async def main() -> None:
        stack = Stack()
        first = stack.lifecycle.load("a")
        await asyncio.sleep(0.5)
        assert stack.lifecycle.load("a") is first
        assert stack.lifecycle.load("hf:a") is first
        assert stack.lifecycle.load("a", LoadOptions(backend="local")) is first
        await first.wait()
        again = stack.lifecycle.load("a")
        assert (again.state, again.changed, again is first) == ("done", False, False)
        await again.wait()
        assert stack.loads.log == [("fetch", "a"), ("open", "a")]

    virtual(main)


def test_a_name_means_one_model(virtual: Run[None]) -> None:
    """Another source, backend or other options are rejected while the name is loading or loaded."""

    async def main() -> None:
        stack = Stack()
        job = stack.lifecycle.load("a")
        for _ in range(2):
            with pytest.raises(Conflict, match="loaded from hf:a on local, not from hf:a on triton: unload it first"):
                stack.lifecycle.load("a", LoadOptions(backend="triton"))
            with pytest.raises(Conflict, match="unload it first"):
                stack.lifecycle.load("a", LoadOptions(text_in=True))
            stack.loads.sources["a"] = "file:/elsewhere"
            with pytest.raises(Conflict, match="not from file:/elsewhere"):
                stack.lifecycle.load("hf:a")
            assert stack.lifecycle.load("a").model == "a"
            del stack.loads.sources["a"]
            await job.wait()
        assert [model.name for model in stack.registry] == ["a"]

    virtual(main)


def test_a_name_means_its_resolved_source(virtual: Run[None]) -> None:
    """If a name resolves to another source, the address of that source joins its load, and no other does."""

    async def main() -> None:
        stack = Stack()
        stack.loads.found["a"] = "pypi:a"
        job = stack.lifecycle.load("a")
        await asyncio.sleep(1.5)
        assert stack.lifecycle.load("a") is job
        stack.loads.sources["a"] = "pypi:a"
        assert stack.lifecycle.load("a") is job
        await job.wait()
        assert not stack.lifecycle.load("hf:a").changed
        del stack.loads.sources["a"]
        with pytest.raises(Conflict, match="'a' is loaded from pypi:a on local, not from hf:a on local"):
            stack.lifecycle.load("hf:a")
        assert not stack.lifecycle.load("a").changed

    virtual(main)


@pytest.mark.parametrize("found", ["pypi:a", "hf:a", ""])
def test_an_address_waits_for_the_source_of_a_name(virtual: Run[None], found: str) -> None:
    """It waits for its turn; only then is it known whether both mean the same model, and whether it exists."""

    async def main() -> None:
        stack = Stack()
        stack.loads.resolved = False
        if found:
            stack.loads.found["a"] = found
        else:
            stack.loads.errors["fetch", "a"] = SourceError("the hub has no such model")
        named = stack.lifecycle.load("a")
        await asyncio.sleep(0.5)
        stack.loads.resolved = True
        stack.loads.sources["a"] = "pypi:a"
        addressed = stack.lifecycle.load("hf:a")
        assert addressed is not named
        if found == "hf:a":
            with pytest.raises(Conflict, match="loaded from hf:a on local, not from pypi:a"):
                await addressed.wait()
            return
        await asyncio.sleep(1.0)
        stack.loads.errors.clear()
        if not found:
            with pytest.raises(SourceError):
                await named.wait()
        await addressed.wait()
        assert addressed.changed == (not found)
        model = stack.registry.find("a")
        assert model.plan is not None
        assert model.plan.source == "pypi:a"

    virtual(main)


def test_when_a_model_falls_asleep(virtual: Run[None]) -> None:
    """Idle time counts from the end of the last request; a model never sleeps if nothing unloads it."""

    async def main() -> None:
        stack = Stack(keep_alive_s=60.0)
        await stack.lifecycle.load("a").wait()
        assert stack.lifecycle.seconds_until_sleep("a") == pytest.approx(60.0)
        await asyncio.sleep(20)
        assert stack.lifecycle.seconds_until_sleep("a") == pytest.approx(40.0)
        model = stack.registry.find("a")
        model.enter()
        await asyncio.sleep(20)
        assert stack.lifecycle.seconds_until_sleep("a") == pytest.approx(60.0)
        model.leave()
        assert stack.lifecycle.seconds_until_sleep("a") == pytest.approx(60.0)
        stack = Stack()
        await stack.lifecycle.load("a").wait()
        assert stack.lifecycle.seconds_until_sleep("a") is None

    virtual(main)


def test_aliases_are_names_too(virtual: Run[None]) -> None:
    """An alias loads, unloads and deletes its model; no other model can take it, now or in the queue."""

    async def main() -> None:
        stack = Stack()
        await stack.lifecycle.add(stack.loads.plan("a", aliases=("x", "y"))).wait()
        assert not stack.lifecycle.load("x").changed
        with pytest.raises(Conflict, match="'x' is loaded from hf:a"):
            stack.lifecycle.load("hf:x")
        stack.loads.sources["x"] = "hf:a"
        assert stack.lifecycle.load("hf:x").model == "a"
        del stack.loads.sources["x"]
        with pytest.raises(AddressError):
            stack.lifecycle.add(stack.loads.plan("b", aliases=("y",)))
        await stack.lifecycle.unload("x").wait()
        assert stack.state("a") == "gone"
        again = stack.lifecycle.load("y")
        assert again.model == "a"
        await again.wait()

    virtual(main)


def test_a_name_taken_meanwhile_is_a_conflict(virtual: Run[None]) -> None:
    """A conflict fails at once, or as the job's error if the load was queued."""

    async def main() -> None:
        stack = Stack()
        download = stack.lifecycle.download("x")
        job = stack.lifecycle.load("x")
        assert stack.state("x") == "gone"
        await stack.lifecycle.add(stack.loads.plan("a", aliases=("x",))).wait()
        with pytest.raises(
            Conflict, match="'x' cannot be loaded alongside the served models: the name 'x' is used by two models"
        ):
            await job.wait()
        await download.wait()
        plan = stack.loads.plan("b", aliases=("x",))
        stack.loads.resolve = lambda name, options: plan  # type: ignore[method-assign]
        with pytest.raises(Conflict, match="'b' cannot be loaded"):
            stack.lifecycle.load("b")
        assert [model.name for model in stack.registry] == ["a"]

    virtual(main)


@pytest.mark.parametrize("stage", ["fetch", "open"])
@pytest.mark.parametrize("error", [SourceError("the hub is down"), ZeroDivisionError("by hand")], ids=["told", "bug"])
def test_a_failed_load_leaves_only_its_reason(virtual: Run[None], stage: str, error: Exception) -> None:
    """The model is removed, the job and the list have the reason, and the next load starts anew."""

    async def main() -> None:
        stack = Stack()
        stack.loads.errors[stage, "a"] = error
        job = stack.lifecycle.load("a")
        expected = SourceError if isinstance(error, SourceError) else InternalError
        with pytest.raises(expected, match=r"the hub is down|by hand"):
            await job.wait()
        assert (job.state, job.error is not None) == ("failed", True)
        assert not list(stack.registry)
        with pytest.raises(ModelNotFound):
            await stack.ask("a")
        [listing] = await stack.lifecycle.listing()
        assert (listing.name, listing.source, listing.status) == ("a", "hf:a", "failed")
        assert listing.error is not None and str(error) in listing.error
        stack.loads.errors.clear()
        await stack.loaded("a")
        assert [each.status for each in await stack.lifecycle.listing()] == ["loaded"]

    virtual(main)


@pytest.mark.parametrize("at_start", [True, False])
def test_a_failed_load_frees_its_frames(virtual: Run[None], at_start: bool) -> None:
    """The error is kept, for as long as a model named at startup is served, but not its frames or those of waiting
    callers."""

    class Weights: ...

    async def main() -> None:
        stack = Stack()
        references: list[weakref.ref[Weights]] = []

        async def verified(plan: Plan, report: ProgressReporter) -> Runner:
            weights = Weights()
            references.append(weakref.ref(weights))
            raise SourceError("they do not agree") from ValueError(weights)

        async def wait(job: Job) -> None:
            body = Weights()
            references.append(weakref.ref(body))
            await job.wait()

        stack.loads.open = verified  # type: ignore[method-assign]
        job = stack.lifecycle.add(stack.loads.plan("a")) if at_start else stack.lifecycle.load("a")
        for _ in range(3):
            with pytest.raises(SourceError, match="do not agree"):
                await wait(job)
        await until(stack.idle)
        gc.collect()
        assert [each() for each in references] == [None] * 4
        assert isinstance(job.error, SourceError)

    virtual(main)


def test_failures_are_remembered_for_the_last_hundred_names(virtual: Run[None]) -> None:
    """An unload, a successful download or a delete removes one from the list."""

    async def main() -> None:
        stack = Stack()
        for number in range(103):
            stack.loads.errors["open", f"m{number}"] = SourceError("no")
        for number in range(103):
            await gathered(stack.lifecycle.load(f"m{number}").wait())
        names = [each.name for each in await stack.lifecycle.listing()]
        assert (len(names), names[0]) == (100, "m3")
        assert not stack.lifecycle.unload("m3").changed
        await stack.lifecycle.download("m4").wait()
        await stack.lifecycle.delete("m5").wait()
        assert next(each.name for each in await stack.lifecycle.listing()) == "m6"

    virtual(main)


def test_load_timeout(virtual: Run[None]) -> None:
    """After the timeout, the error names the setting and the stage; without a timeout a load may take a day."""

    async def main() -> None:
        stack = Stack()
        stack.loads.timeout_s = 60.0
        stack.loads.seconds["open"] = 86_400.0
        with pytest.raises(SetupError, match=r"load_timeout_s \(60 s\); its last stage was opening: raise it"):
            await stack.lifecycle.load("a").wait()
        assert stack.states("a") == ["gone"]
        stack.loads.timeout_s = 0
        await stack.loaded("a")

        async def silent(*_: object) -> None:
            await asyncio.sleep(100)

        stack.loads.fetch = silent  # type: ignore[assignment,method-assign]
        stack.loads.timeout_s = 60.0
        with pytest.raises(SetupError, match=r"\(60 s\): raise it"):
            await stack.lifecycle.load("b").wait()

    virtual(main)


def test_models_named_at_start_stay_when_they_fail(virtual: Run[None]) -> None:
    """They report the reason, keep the server from being ready, and may be retried any number of times."""

    async def main() -> None:
        stack = Stack()
        stack.loads.errors["open", "a"] = TransportFailed("triton is not there")
        first = stack.lifecycle.add(stack.loads.plan("a"))
        assert not stack.gateway.ready()
        assert isinstance((await gathered(first.wait()))[0], TransportFailed)
        for _ in range(2):
            assert (stack.state("a"), stack.gateway.ready()) == ("failed", False)
            [listing] = await stack.lifecycle.listing()
            assert (listing.status, listing.error) == ("failed", "triton is not there")
            assert isinstance((await gathered(stack.lifecycle.load("a").wait()))[0], TransportFailed)
        stack.loads.errors.clear()
        await stack.loaded("a")
        assert stack.gateway.ready()
        stack.lifecycle.add(stack.loads.plan("b"), required=False)
        assert stack.gateway.ready()
        await stack.lifecycle.unload("b").wait()

    virtual(main)


def test_unload_lets_requests_finish_and_refuses_new_ones(virtual: Run[None]) -> None:
    """Requests in flight are answered; then the runner is closed and the name is free."""

    async def main() -> None:
        stack = Stack()
        await stack.loaded("a")
        stack.loads.infer_s = 0.0
        stack.loads.runners[0].seconds = 5.0
        calls = [asyncio.create_task(stack.ask("a")) for _ in range(3)]
        await until(lambda: stack.loads.runners[0].begun == 3)
        job = stack.lifecycle.unload("a")
        assert stack.lifecycle.unload("a") is job
        await asyncio.sleep(1)
        assert stack.state("a") == "unloading"
        with pytest.raises(ModelNotReady, match="is unloading"):
            await stack.ask("a")
        assert not job.done_event.is_set()
        await job.wait()
        assert [answer.tokens for answer in await asyncio.gather(*calls)] == [[1]] * 3
        assert (stack.loads.runners[0].closed, stack.state("a"), job.changed) == (1, "gone", True)
        again = stack.lifecycle.unload("a")
        assert (again.state, again.changed) == ("done", False)

    virtual(main)


def test_unload_timeout(virtual: Run[None]) -> None:
    """A request that outlasts unload_timeout_s ends with the runner's own error."""

    async def main() -> None:
        stack = Stack(unload_timeout_s=10.0)
        stack.loads.infer_s = 100.0
        await stack.loaded("a")
        call = asyncio.create_task(stack.ask("a", 1000))
        await until(lambda: bool(stack.loads.runners) and stack.loads.runners[0].begun == 1)
        begun = asyncio.get_running_loop().time()
        await stack.lifecycle.unload("a").wait()
        assert asyncio.get_running_loop().time() - begun == pytest.approx(11)
        assert isinstance((await gathered(call))[0], Unavailable)

    virtual(main)


def test_unload_does_not_wait_for_cancelled_streams(virtual: Run[None]) -> None:
    """Cancelled requests do not delay an unload either."""

    async def main() -> None:
        stack = Stack()
        stack.loads.infer_s = 100.0
        await stack.loaded("a")
        call = asyncio.create_task(stack.ask("a", 1000))
        await until(lambda: stack.loads.runners[0].begun == 1)
        job = stack.lifecycle.unload("a")
        await asyncio.sleep(1)
        call.cancel()
        await asyncio.sleep(1.5)
        assert job.state == "done"

    virtual(main)


def test_a_failed_unload_reports_it_and_closes_the_runner(virtual: Run[None]) -> None:
    """Shoal drops the model in any case; a failure to undo it elsewhere is the job's error."""

    async def main() -> None:
        stack = Stack()
        for error in (TransportFailed("triton went away"), ZeroDivisionError("by hand")):
            await stack.loaded("a")
            stack.loads.errors["close", "a"] = error
            job = stack.lifecycle.unload("a")
            with pytest.raises((TransportFailed, InternalError), match=r"triton went away|by hand"):
                await job.wait()
            assert (stack.state("a"), stack.loads.runners[-1].closed, job.state) == ("gone", 1, "failed")
        [listing] = await stack.lifecycle.listing()
        assert listing.status == "failed"

    virtual(main)


def test_unload_cancels_a_load(virtual: Run[None]) -> None:
    """At any stage; waiting callers learn who cancelled it, and the name is free for another source."""

    async def main() -> None:
        stack = Stack()
        for after in (0.0, 0.5, 1.5):
            job = stack.lifecycle.load("a")
            waits = asyncio.create_task(job.wait())
            await asyncio.sleep(after)
            undo = stack.lifecycle.unload("a")
            stack.loads.sources["a"] = f"file:{after}"
            then = stack.lifecycle.load("a")
            await undo.wait()
            assert (undo.changed, job.state) == (True, "cancelled")
            assert isinstance((await gathered(waits))[0], Conflict)
            await then.wait()
            assert stack.state("a") == "ready"
            await stack.lifecycle.unload("a").wait()
        assert not stack.loads.running
        assert [each.status for each in await stack.lifecycle.listing()] == []

    virtual(main)


def test_unload_of_a_model_that_still_loads_at_start(virtual: Run[None]) -> None:
    """It is removed as any other, and readiness no longer depends on it."""

    async def main() -> None:
        stack = Stack()
        job = stack.lifecycle.add(stack.loads.plan("a"))
        await stack.lifecycle.unload("a").wait()
        assert (job.state, stack.state("a"), stack.gateway.ready()) == ("cancelled", "gone", True)
        stack.loads.sources["a"] = "elsewhere"
        await stack.loaded("a")
        [listing] = await stack.lifecycle.listing()
        assert listing.source == "hf:a"

    virtual(main)


def test_jobs_on_one_name_take_turns(virtual: Run[None]) -> None:
    """Load, unload, load, delete, download: one stage at a time, and the last job wins."""

    async def main() -> None:
        stack = Stack()
        await stack.loaded("a")
        unload = stack.lifecycle.unload("a")
        load = stack.lifecycle.load("a")
        assert stack.lifecycle.load("a") is load
        await load.wait()
        assert (unload.state, stack.state("a")) == ("done", "ready")
        delete = stack.lifecycle.delete("a")
        assert stack.lifecycle.delete("a") is delete
        unload, download = stack.lifecycle.unload("a"), stack.lifecycle.download("a")
        await gathered(unload.wait(), download.wait(), delete.wait())
        assert (delete.changed, unload.changed, download.changed) == (True, False, True)
        assert stack.state("a") == "gone"
        assert stack.loads.log[-3:] == [("close", "a"), ("remove", "a"), ("fetch", "a")]

    virtual(main)


def test_conversion_steps_report_no_bytes(virtual: Run[None]) -> None:
    """Conversion progress is a fraction of its step, until bytes are reported again."""

    async def main() -> None:
        stack = Stack()
        job = stack.lifecycle.load("a")
        await asyncio.sleep(1.5)
        stack.loads.reports["a"]("verify", fraction=0.5)
        assert (job.stage, job.fraction, job.done, job.total) == ("verify", 0.5, None, None)
        [listing] = await stack.lifecycle.listing()
        assert (listing.note, listing.fraction) == ("verify", 0.5)
        stack.loads.reports["a"]("writing", 30.0, 120.0)
        assert (job.fraction, job.done, job.total) == (0.25, 30.0, 120.0)
        await job.wait()

    virtual(main)


def test_downloads_are_joined_and_change_nothing_the_second_time(virtual: Run[None]) -> None:
    """The model is not served; another source of the same name is rejected until the download ends."""

    async def main() -> None:
        stack = Stack()
        job = stack.lifecycle.download("a")
        assert stack.lifecycle.download("a") is job
        stack.loads.sources["a"] = "file:/b"
        with pytest.raises(Conflict, match="hf:a is being downloaded as 'a': wait for it"):
            stack.lifecycle.download("a")
        [listing] = await stack.lifecycle.listing()
        assert (listing.status, listing.note, listing.fraction) == ("downloading", "", None)
        await asyncio.sleep(0.5)
        [listing] = await stack.lifecycle.listing()
        assert (listing.status, listing.note, listing.fraction) == ("downloading", "downloading", 0.0)
        await job.wait()
        assert (job.changed, list(stack.registry)) == (True, [])
        again = stack.lifecycle.download("a")
        await again.wait()
        assert not again.changed

    virtual(main)


def test_unload_cancels_a_download(virtual: Run[None]) -> None:
    """Also one of a model that is served, which is unloaded, too."""

    async def main() -> None:
        stack = Stack()
        for name in ("absent", "served"):
            if name == "served":
                await stack.loaded(name)
            job = stack.lifecycle.download(name)
            await asyncio.sleep(0.5)
            undo = stack.lifecycle.unload(name)
            await undo.wait()
            assert (undo.changed, job.state, stack.state(name)) == (True, "cancelled", "gone")

    virtual(main)


def test_delete_unloads_and_removes(virtual: Run[None]) -> None:
    """In that order; jobs in progress are cancelled; for an absent model nothing changes."""

    async def main() -> None:
        stack = Stack()
        await stack.loaded("a")
        job = stack.lifecycle.delete("a")
        await job.wait()
        assert stack.loads.log[2:] == [("close", "a"), ("remove", "a")]
        assert (job.changed, stack.state("a")) == (True, "gone")
        nothing = stack.lifecycle.delete("a")
        await nothing.wait()
        assert not nothing.changed
        for begin in (stack.lifecycle.load, stack.lifecycle.download):
            begun = begin("a")
            await asyncio.sleep(0.5)
            job = stack.lifecycle.delete("a")
            await job.wait()
            assert (begun.state, job.changed, stack.state("a")) == ("cancelled", True, "gone")

    virtual(main)


def test_foreign_models_are_not_deleted(virtual: Run[None]) -> None:
    """Nothing changes: it stays served, and a load of it continues."""

    async def main() -> None:
        stack = Stack()
        for name in ("other", "a"):
            stack.loads.on_disk[name] = Entry(name=name, source="triton", backend="triton", managed=name != "a")
        await stack.loaded("a")
        for state in ("ready", "loading"):
            job = stack.lifecycle.delete("a")
            with pytest.raises(Forbidden, match="'a' was not created by Shoal"):
                await job.wait()
            assert stack.state("a") == state
            await stack.lifecycle.unload("a").wait()
            stack.lifecycle.load("a")
        await stack.loaded("a")

    virtual(main)


def test_bad_names_change_nothing(virtual: Run[None]) -> None:
    """The loader rejects them at once, before a job exists."""

    async def main() -> None:
        stack = Stack()
        for act in (stack.lifecycle.load, stack.lifecycle.download, stack.lifecycle.unload, stack.lifecycle.delete):
            for name in ("", "..", "a/../../b"):
                with pytest.raises(InvalidValue):
                    act(name)
        assert (stack.lifecycle.jobs(), stack.loads.log) == ([], [])

    virtual(main)


def test_cancelling_a_wait_keeps_the_job(virtual: Run[None]) -> None:
    """A caller's deadline or a closed connection does not stop the load."""

    async def main() -> None:
        stack = Stack()
        job = stack.lifecycle.load("a")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await job.wait()
        await job.wait()
        assert stack.state("a") == "ready"

    virtual(main)


def test_the_loader_reports_its_stage(virtual: Run[None]) -> None:
    """The job, the card, rejected requests and the list report its stage, during the load and after it."""

    async def main() -> None:
        stack = Stack()
        job = stack.lifecycle.load("a")
        await asyncio.sleep(0.5)
        assert (job.stage, job.done, job.total, job.fraction) == ("downloading", 0, 100, 0.0)
        await asyncio.sleep(1)
        stack.loads.reports["a"]("waiting for triton at h:1: connection refused")
        assert stack.gateway.model("a").note == "waiting for triton at h:1: connection refused"
        with pytest.raises(ModelNotReady, match=r"is loading \(waiting for triton at h:1: connection refused\): try"):
            await stack.ask("a")
        [listing] = await stack.lifecycle.listing()
        assert (listing.status, listing.note) == ("loading", "waiting for triton at h:1: connection refused")
        await job.wait()
        assert stack.gateway.model("a").note == ""
        stack.loads.reports["a"]("connecting again", 1, 2)
        assert (stack.gateway.model("a").note, job.stage) == ("connecting again", job.stage)
        assert job.stage != "connecting again"
        await stack.lifecycle.unload("a").wait()
        stack.loads.reports["a"]("nobody listens")

    virtual(main)


def test_the_list_has_models_and_entries(virtual: Run[None]) -> None:
    """Served models first, with the facts of their files; then entries, the first of each name, without duplicates."""

    async def main() -> None:
        stack = Stack()
        for entry in (
            Entry(name="a", source="hf:a", backend="local", size=7, created=5),
            Entry(name="b", source="repo", backend="triton", size=8, managed=False, reason="no backend for it"),
        ):
            stack.loads.on_disk[entry.name] = entry
        stack.loads.on_disk["b again"] = Entry(name="b", source="store", backend="local")
        stack.lifecycle.add(stack.loads.plan("c", aliases=("see",)))
        await stack.loaded("a")
        a, b, c = sorted(await stack.lifecycle.listing(), key=lambda each: each.name)
        assert (a.status, a.size, a.source, a.managed) == ("loaded", 7, "hf:a", True)
        assert a.facts is not None
        assert (b.status, b.size, b.source, b.managed, b.note) == ("unloaded", 8, "repo", False, "no backend for it")
        assert (c.status, c.aliases, c.size) == ("loaded", ("see",), 0)
        load = stack.lifecycle.load("b")
        await asyncio.sleep(0.5)
        _, _, b = sorted(await stack.lifecycle.listing(), key=lambda each: each.name == "b")
        assert (b.status, b.fraction, b.managed) == ("loading", 0.0, False)
        await load.wait()

    virtual(main)


def test_unknown_jobs(virtual: Run[None]) -> None:
    """The error says that only the last jobs are kept."""

    async def main() -> None:
        with pytest.raises(JobNotFound, match="only the most recent jobs are kept"):
            Stack().lifecycle.job("job_x")

    virtual(main)


@pytest.mark.parametrize("after", [0.0, 0.5, 1.5, 2.5])
def test_closing_ends_everything(virtual: Run[None], after: float) -> None:
    """Jobs are cancelled, runners are closed once without unloading them elsewhere, and nothing new starts."""

    async def main() -> None:
        stack = Stack()
        await stack.loaded("stays")
        jobs = [
            stack.lifecycle.load("a"),
            stack.lifecycle.download("b"),
            stack.lifecycle.unload("stays"),
            stack.lifecycle.load("stays"),
        ]
        await asyncio.sleep(after)
        await stack.lifecycle.aclose()
        await stack.lifecycle.aclose()
        assert all(job.done_event.is_set() for job in jobs)
        assert all(isinstance(job.error, Unavailable) for job in jobs if job.state == "cancelled")
        assert [life.closed >= 1 for life in stack.loads.runners] == [True] * len(stack.loads.runners)
        assert not stack.loads.running
        for act in (stack.lifecycle.load, stack.lifecycle.download, stack.lifecycle.unload, stack.lifecycle.delete):
            with pytest.raises(Unavailable, match="shutting down"):
                act("c")
        with pytest.raises(Unavailable):
            stack.lifecycle.add(stack.loads.plan("c"))

    virtual(main)


def test_a_failing_close_does_not_stop_the_others(virtual: Run[None]) -> None:
    """The error is raised after all runners were closed."""

    async def main() -> None:
        stack = Stack()
        await stack.loaded("a", "b")

        async def fail() -> None:
            raise ZeroDivisionError

        for broken in stack.loads.runners:
            broken.closed = 0
        stack.loads.runners[1].aclose = fail  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            await stack.lifecycle.aclose()
        assert stack.loads.runners[0].closed == 1

    virtual(main)


def test_the_settings_have_their_defaults() -> None:
    """Any number of models of any size, without expiry, drained for 30 s."""
    defaults = Lifecycle.__init__.__kwdefaults__
    assert defaults is not None
    assert [defaults[name] for name in ("max_loaded_models", "max_loaded_bytes", "keep_alive_s")] == [0, 0, 0.0]
    assert defaults["unload_timeout_s"] == 30.0


def test_an_unload_forgets_the_request_that_it_waited_for(virtual: Run[None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if closing takes no time: the next model with the name starts with no requests in flight."""

    async def main() -> None:
        stack, counts = Stack(), Counts()
        monkeypatch.setattr(stack.gateway, "_observer", counts)
        monkeypatch.setattr(stack.gateway, "_counts", counts)

        async def close(plan: Plan, runner: Runner) -> None:
            """At once."""

        monkeypatch.setattr(stack.loads, "close", close)
        await stack.loaded("a")
        asking = asyncio.create_task(stack.ask("a"))
        await asyncio.sleep(0.05)
        await stack.lifecycle.unload("a").wait()
        assert isinstance(await asking, Embedded)
        await asyncio.sleep(1)
        assert counts.stats_for("a").inference_stats.success.count == 0

    virtual(main)
