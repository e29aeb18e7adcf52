"""Records of tasks: what lanes and the gateway note in them, what is kept, and what a tracer is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec
import pytest

from shoal.backends.fake.model import FakeGenerator, FakeScript
from shoal.core.gateway import Gateway
from shoal.core.lane_runner import LaneRunner
from shoal.core.protocols import ModelFacts, Piece, Prompt
from shoal.core.recording import (
    RECORD,
    BatchRecord,
    BatchSpan,
    Found,
    RequestLog,
    RequestRecord,
    RequestSpan,
    TaskRecord,
    count_retries,
    name_error,
    outgoing_trace,
    record_attempt,
)
from shoal.core.registry import Model, Registry
from shoal.core.scheduling.lane import Lane
from shoal.errors import DeadlineExceeded, InputRejected, NotFinite, TransportFailed
from shoal.types import Context, Generate, Sampling, Task
from tests.unit.core.conftest import Run
from tests.unit.core.lanes import context, embed, engine, make_lane
from tests.unit.core.talks import make_runner

PARENT = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"


class Span:
    """A span whose context is `trace`."""

    def __init__(self, trace: str, ended: list[tuple[str, object, float]]) -> None:
        self.trace = trace
        self._ended = ended

    def end(self, record: object, called: float = 0.0) -> None:
        self._ended.append((self.trace, record, called))


class RecordingTracer:
    """Names spans "task ID" and "batch N", and collects what it is told."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, object, float]] = []
        self.batches: list[list[str]] = []
        self.tasks: list[str] = []

    def begin_request(
        self,
        method: str,
        route: str,
        headers: Mapping[bytes, bytes],
        started: float,
        *,
        grpc: bool = False,
        trusted: bool = True,
    ) -> RequestSpan:
        return Span("request", self.ended)

    def begin_task(self, record: TaskRecord, task: Task) -> None:
        record.trace = f"task-{record.request_id}"

    def end_task(self, record: TaskRecord) -> None:
        self.tasks.append(f"{record.trace} {record.outcome}")

    def begin_batch(self, model: str, traces: Sequence[str]) -> BatchSpan:
        self.batches.append(list(traces))
        return Span(f"batch-{len(self.batches)}", self.ended)


def serve(lane: Lane, log: RequestLog | None) -> Gateway:
    """Return a gateway whose model `m` runs on the lane."""
    registry = Registry()
    model = Model(name="m", created=1)
    registry.add(model)
    model.mark_loaded(LaneRunner(lane, ModelFacts(source="fake:", backend="fake", tasks=("embed",), dimension=32)))
    return Gateway(registry, log=log, clock=asyncio.get_running_loop().time)


def request(request_id: str, trace: str = "") -> Context:
    return Context(id=request_id, deadline=asyncio.get_running_loop().time() + 30, client="c", trace=trace)


async def test_a_task_has_its_batches() -> None:
    """A request of two batches notes both, each with its size and its replica."""
    log = RequestLog(5)
    lane = make_lane(FakeScript(), max_batch_size=2)
    await serve(lane, log).run(embed("a", "b", "c"), request("one"))
    await lane.aclose()
    (task,) = log.look_up("one").tasks
    assert (task.outcome, task.model, task.task, task.items, task.input_tokens) == ("ok", "m", "embed", 3, 3)
    assert [(each.size, each.replica, each.error, each.tokens > 0) for each in task.attempts] == [
        (2, "fake-0", "", True),
        (1, "fake-0", "", True),
    ]


async def test_a_failure_has_what_followed() -> None:
    log = RequestLog(5)
    lane = make_lane(FakeScript())
    with pytest.raises(InputRejected):
        await serve(lane, log).run(embed("good", "reject-item"), request("bad"))
    await lane.aclose()
    (task,) = log.look_up("bad").tasks
    failed = [(each.size, each.error, each.step) for each in task.attempts if each.error]
    assert (task.outcome, failed) == ("input_rejected", [(2, "input_rejected", "halve"), (1, "input_rejected", "fail")])


async def test_a_row_that_fails_alone_has_its_batch() -> None:
    """Others in the batch have their rows; two bad items are one call."""
    log = RequestLog(5)
    lane = make_lane(FakeScript())
    with pytest.raises(NotFinite):
        await serve(lane, log).run(embed("good", "nan-item", "nan-item b"), request("bad"))
    await lane.aclose()
    (task,) = log.look_up("bad").tasks
    assert [(each.size, each.error, each.step) for each in task.attempts] == [(3, "not_finite", "fail")]


def test_requests_that_do_not_wait_for_the_end_of_their_batch(virtual: Run[None]) -> None:
    """The deadline of one passes, and the caller of another leaves, while both are in a batch with a third."""

    async def run() -> None:
        log = RequestLog(5)
        lane = make_lane(FakeScript())
        infer = engine(lane).infer

        async def hang(*arguments: object) -> object:
            await asyncio.sleep(1.0)
            return await infer(*arguments)  # type: ignore[arg-type]

        engine(lane).infer = hang  # type: ignore[method-assign,assignment]
        gateway = serve(lane, log)
        soon = msgspec.structs.replace(request("late"), deadline=asyncio.get_running_loop().time() + 0.5)
        late = asyncio.create_task(gateway.run(embed("a"), soon))
        left = asyncio.create_task(gateway.run(embed("b"), request("left")))
        done = asyncio.create_task(gateway.run(embed("c"), request("done")))
        await asyncio.sleep(0.1)
        left.cancel()
        await done
        with pytest.raises(DeadlineExceeded):
            await late
        await lane.aclose()
        tasks = {name: log.look_up(name).tasks[0] for name in ("late", "left", "done")}
        calls = {name: [(each.error, round(each.seconds, 3)) for each in task.attempts] for name, task in tasks.items()}
        assert calls == {"late": [("deadline", 0.5)], "left": [("cancelled", 0.1)], "done": [("", 1.0)]}

    virtual(run)


def test_a_batch_without_waiters_is_a_cancelled_span(virtual: Run[None]) -> None:
    async def run() -> None:
        tracer = RecordingTracer()
        log = RequestLog(5, tracer)
        lane = make_lane(FakeScript(delay_ms=1000), tracer=tracer)
        task = asyncio.create_task(serve(lane, log).run(embed("a"), request("left")))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.sleep(0.1)
        await lane.aclose()
        ((_, span, called),) = tracer.ended
        assert isinstance(span, BatchRecord) and (span.error, called > 0) == ("cancelled", True)
        assert [each.error for each in log.look_up("left").tasks[0].attempts] == ["cancelled"]

    virtual(run)


async def test_a_failed_batch_without_a_record() -> None:
    """A lane that is used without a gateway has nowhere to note it."""
    RECORD.set(None)
    lane = make_lane(FakeScript())
    with pytest.raises(InputRejected):
        await lane.run(embed("reject-item"), context())
    await lane.aclose()


async def test_batches_run_inside_a_span() -> None:
    """The tracer gets the tasks of each batch, and calls of its engine carry the batch's own context."""
    tracer = RecordingTracer()
    lane = make_lane(FakeScript(), tracer=tracer)
    seen: list[tuple[tuple[str, str], ...]] = []
    infer = engine(lane).infer

    async def noting(*arguments: object) -> object:
        seen.append(outgoing_trace())
        return await infer(*arguments)  # type: ignore[arg-type]

    engine(lane).infer = noting  # type: ignore[method-assign,assignment]
    gateway = serve(lane, RequestLog(0, tracer))
    await asyncio.gather(gateway.run(embed("a"), request("1")), gateway.run(embed("b"), request("2")))
    await asyncio.sleep(0)
    RECORD.set(None)
    await lane.run(embed("c"), context())
    await lane.aclose()
    assert tracer.batches == [["task-1", "task-2"], []]
    assert seen == [(("traceparent", "batch-1"),), (("traceparent", "batch-2"),)]
    assert tracer.tasks == ["task-1 ok", "task-2 ok"]
    (_, first, called), _ = tracer.ended
    assert isinstance(first, BatchRecord) and (first.size, first.error) == (2, "")
    assert called >= first.started


async def test_only_the_last_ones_are_kept() -> None:
    log = RequestLog(1)
    lane = make_lane(FakeScript())
    gateway = serve(lane, log)
    for name in ("1", "2"):
        await gateway.run(embed("a"), request(name))
    await lane.aclose()
    assert await log.find("1") is None
    assert await log.find("2") is not None


class Unreachable(FakeGenerator):
    """Fails before its first piece."""

    async def generate(
        self, prompt: Prompt, sampling: Sampling, ctx: Context, *, adapter: str = "", stream: bool = True
    ) -> AsyncGenerator[Piece]:
        for piece in list[Piece]():
            yield piece
        raise TransportFailed("it is gone")


async def test_a_generation_has_its_tries() -> None:
    """A call of a replica that cannot be reached, and the one that answered."""
    log = RequestLog(5)
    registry = Registry()
    model = Model(name="m", created=1)
    registry.add(model)
    model.mark_loaded(make_runner(Unreachable(FakeScript(), "gone"), FakeGenerator(FakeScript(), "there")))
    gateway = Gateway(registry, log=log, clock=asyncio.get_running_loop().time)
    task = Generate(model="m", prompts=["one two three"], sampling=Sampling(max_tokens=2))
    async for _ in gateway.stream(task, request("1")):
        pass
    (record,) = log.look_up("1").tasks
    assert [(each.replica, each.error) for each in record.attempts] == [("gone", "transport"), ("there", "")]
    assert (record.task, record.outcome, record.output_tokens) == ("generate", "ok", 2)
    assert record.first_seconds is not None


class Refusing(FakeGenerator):
    """Refuses its input, or waits for ever."""

    refuses = True

    async def generate(
        self, prompt: Prompt, sampling: Sampling, ctx: Context, *, adapter: str = "", stream: bool = True
    ) -> AsyncGenerator[Piece]:
        for piece in list[Piece]():
            yield piece
        if self.refuses:
            raise InputRejected("not this one")
        await asyncio.Event().wait()


class Hanging(Refusing):
    refuses = False


@pytest.mark.parametrize(("kind", "error"), [(Refusing, "input_rejected"), (Hanging, "cancelled")])
def test_how_a_generation_s_call_ended(kind: type[Refusing], error: str, virtual: Run[None]) -> None:
    """Also one that is refused or stopped has an end, and does not count as good."""

    async def run() -> None:
        log = RequestLog(5)
        registry = Registry()
        model = Model(name="m", created=1)
        registry.add(model)
        model.mark_loaded(make_runner(kind(FakeScript(), "r")))
        gateway = Gateway(registry, log=log, clock=asyncio.get_running_loop().time)
        task = Generate(model="m", prompts=["one"], sampling=Sampling(max_tokens=2))
        with pytest.raises((InputRejected, DeadlineExceeded)):
            async for _ in gateway.stream(task, request("1")):
                pytest.fail("it answered")
        (record,) = log.look_up("1").tasks
        assert [each.error for each in record.attempts] == [error]

    virtual(run)


def call(started: float, seconds: float, error: str = "", step: str = "") -> BatchRecord:
    return BatchRecord(0, 1, 1, "", "r", seconds, started, error=error, step=step)


@pytest.mark.parametrize(
    ("calls", "retries"),
    [
        ([], 0),
        ([call(0.0, 1.0)], 0),
        ([call(0.0, 1.0, "transport")], 0),
        ([call(0.1, 0.2, "transport"), call(0.1 + 0.2, 1.0)], 1),
        ([call(0.0, 1.0, "transport"), call(1.0, 1.0, "transport")], 1),
        ([call(0.0, 1.0, "backend"), call(0.1, 1.0)], 0),
        ([call(0.0, 1.0, "backend", "fail"), call(1.5, 1.0)], 0),
    ],
)
def test_only_a_failure_that_is_followed_by_a_call_is_a_retry(calls: list[BatchRecord], retries: int) -> None:
    assert count_retries(calls) == retries


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (None, ""),
        (TransportFailed("x"), "transport"),
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
        (KeyError(), "internal"),
    ],
)
def test_names_of_ends(error: BaseException | None, name: str) -> None:
    assert name_error(error) == name


def record(started: float, request_id: str = "r") -> RequestRecord:
    return RequestRecord(request_id, "openai", "POST", "/", 200, 0.0, started, 0.1, "c", "m", "")


async def test_other_processes_are_asked() -> None:
    """One has the request, another its tasks, which come in their order; those of others with the id do not."""
    log = RequestLog(5)
    log.requests.append(record(2.0))
    earlier, beside, first, second = (
        TaskRecord("r", "m", "embed", 1, started, arrived=arrived, outcome="ok")
        for arrived, started in ((1.0, 1.0), (1.9, 2.15), (2.0, 2.1), (2.0, 2.2))
    )
    log.tasks += [second, earlier, beside]
    asked: list[str] = []

    async def ask(request_id: str) -> list[Found]:
        asked.append(request_id)
        return [Found(), Found(tasks=[first])]

    log.connect(ask)
    assert await log.find("r") == Found(record(2.0), [first, second])
    assert asked == ["r"]


async def test_tasks_of_a_request_that_is_not_over() -> None:
    log = RequestLog(5)
    other, task = (TaskRecord("r", "m", "embed", 1, at, arrived=at, outcome="ok") for at in (1.0, 2.0))
    log.tasks += [other, task]
    assert await log.find("r") == Found(None, [task])


@pytest.mark.parametrize(
    ("task", "headers"),
    [
        (None, {}),
        (TaskRecord("r", "m", "embed", 1, 1.0), {}),
        (TaskRecord("r", "m", "embed", 1, 1.0, PARENT, outcome="ok"), {}),
        (TaskRecord("r", "m", "embed", 1, 1.0, PARENT), {"traceparent": PARENT}),
        (TaskRecord("r", "m", "embed", 1, 1.0, f"{PARENT} a=b,c=d"), {"traceparent": PARENT, "tracestate": "a=b,c=d"}),
    ],
)
async def test_headers_for_other_servers(task: TaskRecord | None, headers: dict[str, str]) -> None:
    RECORD.set(task)
    assert dict(outgoing_trace()) == headers


async def test_calls_outside_of_a_task_are_not_noted() -> None:
    over = TaskRecord("r", "m", "generate", 1, 1.0, outcome="ok")
    for task in (None, over):
        RECORD.set(task)
        record_attempt("a", 1.0, 2.0)
    assert over.attempts == []


async def test_a_gateway_without_a_log() -> None:
    RECORD.set(None)
    lane = make_lane(FakeScript())
    await serve(lane, None).run(embed("a"), request("1"))
    await lane.aclose()
    assert RECORD.get() is None
