from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from shoal.backends.fake.model import FakeGenerator, FakeScript
from shoal.core.gateway import Gateway
from shoal.core.generation.runner import GenerationRunner
from shoal.core.lane_runner import LaneRunner
from shoal.core.lifecycle.loading import Plan
from shoal.core.protocols import GenerationReport, Observer, Runner
from shoal.core.registry import Model, Registry
from shoal.core.statistics import Counts
from shoal.errors import (
    DeadlineExceeded,
    EmptyInput,
    EngineFailed,
    InputRejected,
    InternalError,
    InvalidValue,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    SetupError,
    ShoalError,
    TooLong,
    Unavailable,
    Unsupported,
)
from shoal.types import (
    BatchTask,
    Classify,
    Context,
    Embed,
    Generate,
    Image,
    Modality,
    Rerank,
    Result,
    Sampling,
    TaskKind,
    TextItem,
    TrafficClass,
    Untranslated,
)
from tests.unit.core.conftest import Run, gathered, until
from tests.unit.core.lanes import context, make_lane
from tests.unit.core.runners import Codec, Embedder
from tests.unit.core.talks import make_runner


class Recorder(Observer):
    """An observer that records every call, without durations."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.surfaces: list[str] = []

    def refused(self, reason: str, surface: str = "") -> None:
        self.calls.append(("refused", reason, surface))

    def accepted(self, model: str, task: TaskKind, items: int, traffic: TrafficClass, surface: str = "") -> None:
        self.calls.append(("accepted", model, task, items, traffic))
        self.surfaces.append(surface)

    def finished(
        self, model: str, task: TaskKind, outcome: str, seconds: float, result: Result | None, surface: str = ""
    ) -> None:
        assert 0 <= seconds < 10
        self.calls.append(("finished", model, task, outcome, result))
        self.surfaces.append(surface)

    async def settled_calls(self) -> list[tuple[Any, ...]]:
        """Return all calls; the observer is called after the answer, so the loop must run once."""
        await asyncio.sleep(0)
        return self.calls


def gateway(*runners: Runner | None, max_streams: int = 256) -> tuple[Gateway, Recorder]:
    """Return a gateway with models m0, m1 ... (m0 is also "alias"); None is a model that is still loading."""
    registry, recorder = Registry(), Recorder()
    for number, runner in enumerate(runners):
        model = Model(f"m{number}", ("alias",) if not number else ())
        model.plan = Plan(name=model.name, source="s", backend="b", max_streams=max_streams)
        registry.add(model)
        if runner is not None:
            model.mark_loaded(runner)
    return Gateway(registry, recorder), recorder


def soon(seconds: float = 30.0, client: str = "c") -> Context:
    return Context(id="r", deadline=time.monotonic() + seconds, client=client, surface="openai")


def embed(model: str = "", *inputs: TextItem) -> Embed:
    return Embed(model=model, inputs=list(inputs or ["x"]))


def generate(prompt: str = "a b c", model: str = "") -> Generate:
    return Generate(model=model, prompts=[prompt])


async def text_of(gate: Gateway, task: Generate, ctx: Context) -> str:
    return " ".join([chunk.text async for chunk in gate.stream(task, ctx)])


@pytest.mark.parametrize("name", ["", "m0", "alias"])
async def test_a_task_reaches_its_model(name: str) -> None:
    """A task reaches its model by name, alias or as the default; the observer gets the name, size and class."""
    runner = Embedder()
    gate, recorder = gateway(runner, Embedder(error=EngineFailed("the wrong one")))
    assert await gate.run(embed(name, *"abcdefghi"), soon()) is runner.answer
    assert await recorder.settled_calls() == [
        ("accepted", "m0", "embed", 9, "bulk"),
        ("finished", "m0", "embed", "ok", runner.answer),
    ]
    assert recorder.surfaces == ["openai", "openai"]


async def test_unknown_models_are_refused() -> None:
    """An unknown model is refused before any model counts the request."""
    gate, recorder = gateway(Embedder())
    with pytest.raises(ModelNotFound):
        await gate.run(embed("nobody"), soon())
    with pytest.raises(ModelNotFound):
        await text_of(gate, generate(model="nobody"), soon())
    assert await recorder.settled_calls() == [
        ("refused", "model_not_found", "openai"),
        ("refused", "model_not_found", "openai"),
    ]


async def test_surfaces_report_what_they_refuse() -> None:
    """The error's kind is the reason."""
    gate, recorder = gateway()
    gate.report_refusal(TooLong("x"), "tei")
    assert await recorder.settled_calls() == [("refused", "too_long", "tei")]


@pytest.mark.parametrize(
    "error", [InvalidValue("x"), Overloaded("x"), EngineFailed("x"), InternalError("x")], ids=lambda error: error.kind
)
@pytest.mark.parametrize("task", ["embed", "generate"])
async def test_errors_pass_with_their_kind(error: ShoalError, task: TaskKind) -> None:
    """The caller gets the runner's own error, and the observer gets its kind once."""
    gate, recorder = gateway(Embedder(("embed", "generate"), error=error))
    with pytest.raises(type(error)) as caught:
        await (gate.run(embed(), soon()) if task == "embed" else text_of(gate, generate(), soon()))
    assert caught.value is error
    assert [call[:4] for call in await recorder.settled_calls()] == [
        ("accepted", "m0", task, 1),
        ("finished", "m0", task, error.kind),
    ]


@pytest.mark.parametrize("task", ["embed", "generate"])
async def test_bugs_become_internal_errors(task: TaskKind) -> None:
    """An unexpected exception becomes an InternalError with its cause, and "internal" for the observer."""
    gate, recorder = gateway(Embedder(("embed", "generate"), error=ZeroDivisionError("by hand")))
    with pytest.raises(InternalError, match="by hand") as caught:
        await (gate.run(embed(), soon()) if task == "embed" else text_of(gate, generate(), soon()))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert (await recorder.settled_calls())[1:] == [("finished", "m0", task, "internal", None)]


@pytest.mark.parametrize("task", ["embed", "generate"])
async def test_a_cancelled_request_is_reported_as_such(task: TaskKind) -> None:
    """A request whose caller leaves is reported as cancelled."""
    runner = Embedder(("embed", "generate"), release=asyncio.Event())
    gate, recorder = gateway(runner)
    work = gate.run(embed(), soon()) if task == "embed" else text_of(gate, generate(), soon())
    call = asyncio.create_task(work)
    await until(lambda: bool(runner.begun))
    call.cancel()
    assert isinstance((await gathered(call))[0], asyncio.CancelledError)
    assert (await recorder.settled_calls())[1:] == [("finished", "m0", task, "cancelled", None)]


@pytest.mark.parametrize("task", ["embed", "generate"])
async def test_a_past_deadline_starts_nothing(task: TaskKind) -> None:
    """A request whose deadline has passed never reaches the runner."""
    runner = Embedder(("embed", "generate"))
    gate, recorder = gateway(runner)
    with pytest.raises(DeadlineExceeded, match="allow more time"):
        await (gate.run(embed(), soon(-0.001)) if task == "embed" else text_of(gate, generate(), soon(-0.001)))
    assert not runner.begun
    assert (await recorder.settled_calls())[1:] == [("finished", "m0", task, "deadline", None)]


async def test_unsupported_tasks_are_refused() -> None:
    """A model refuses a task it does not support and names the ones it does."""
    gate, recorder = gateway(Embedder(("embed",)), Embedder(("generate",)))
    with pytest.raises(Unsupported, match="'m0' cannot generate; it can: embed") as caught:
        await text_of(gate, generate(model="m0"), soon())
    assert caught.value.param == "model"
    with pytest.raises(Unsupported, match="'m1' cannot embed; it can: generate"):
        await gate.run(embed("m1"), soon())
    assert [call[3] for call in await recorder.settled_calls() if call[0] == "finished"] == ["unsupported"] * 2


async def test_what_only_the_models_server_understands() -> None:
    """A body that was not translated goes to models that may pass it on, and to no other."""
    speaks, other = Embedder(("generate",)), Embedder(("generate",))
    speaks.facts = replace(speaks.facts, passes=("openai.responses",))
    gate, _ = gateway(speaks, other)
    gate.ensure_single_state()
    why = Untranslated(message="'conversation' is not supported", param="conversation")
    task = msgspec.structs.replace(generate(), raw=("openai.responses", {}), untranslated=why)
    assert await text_of(gate, task, soon()) == "a b c"
    for refused in (msgspec.structs.replace(task, model="m1"), msgspec.structs.replace(task, raw=None)):
        with pytest.raises(Unsupported, match="'conversation' is not supported") as caught:
            await text_of(gate, refused, soon())
        assert caught.value.param == "conversation"


async def test_no_input_is_an_error() -> None:
    """An empty list is refused before the runner is called, with the name of the field."""
    runner = Embedder()
    gate, recorder = gateway(runner)
    with pytest.raises(EmptyInput) as caught:
        await gate.run(Embed(model="", inputs=[]), soon())
    assert caught.value.param == "input"
    assert not runner.begun
    assert await recorder.settled_calls() == [
        ("accepted", "m0", "embed", 0, "interactive"),
        ("finished", "m0", "embed", "empty", None),
    ]


async def test_a_loading_model_is_not_ready() -> None:
    """Requests for a loading model are counted for that model, with the reason."""
    gate, recorder = gateway(None)
    with pytest.raises(ModelNotReady):
        await gate.run(embed(), soon())
    with pytest.raises(ModelNotReady):
        await text_of(gate, generate(), soon())
    assert [call[3] for call in await recorder.settled_calls() if call[0] == "finished"] == ["not_ready"] * 2


async def test_a_stream_passes_every_chunk() -> None:
    """A stream passes every chunk in order and is reported once as ok."""
    gate, recorder = gateway(Embedder(("generate",)))
    assert await text_of(gate, generate(), soon()) == "a b c"
    assert await recorder.settled_calls() == [
        ("accepted", "m0", "generate", 1, "interactive"),
        ("finished", "m0", "generate", "ok", None),
    ]
    assert recorder.surfaces == ["openai", "openai"]


async def test_closing_a_stream_stops_it_and_frees_its_slot() -> None:
    """When a reader leaves after one chunk, the runner's stream closes at once and its slot is free again."""
    runner = Embedder(("generate",))
    gate, recorder = gateway(runner, max_streams=1)
    async with aclosing(gate.stream(generate(), soon())) as chunks:
        await anext(chunks)
    assert runner.streams_closed == 1
    assert (await recorder.settled_calls())[-1] == ("finished", "m0", "generate", "cancelled", None)
    assert await text_of(gate, generate(), soon()) == "a b c"


async def test_a_stream_that_waits_for_a_slot_can_time_out_or_be_cancelled() -> None:
    """A stream over the limit waits without starting, ends at its deadline or on cancellation, and the next one gets
    the slot."""
    runner = Embedder(("generate",), release=asyncio.Event())
    gate, recorder = gateway(runner, max_streams=1)
    holds = asyncio.create_task(text_of(gate, generate(), soon()))
    await until(lambda: runner.begun == 1)
    with pytest.raises(DeadlineExceeded, match="slot"):
        await text_of(gate, generate(), soon(0.01))
    leaves, stays = (asyncio.create_task(text_of(gate, generate(), soon())) for _ in range(2))
    await until(lambda: sum(call[0] == "accepted" for call in recorder.calls) == 4)
    leaves.cancel()
    with suppress(asyncio.CancelledError):
        await leaves
    assert runner.begun == 1
    assert runner.release is not None
    runner.release.set()
    assert [*await asyncio.gather(holds, stays)] == ["a b c", "a b c"]
    outcomes = [call[3] for call in await recorder.settled_calls() if call[0] == "finished"]
    assert outcomes == ["deadline", "cancelled", "ok", "ok"]


async def test_the_codec_is_that_of_the_model() -> None:
    """The tokenizer of a model is returned as it is; models without one, unknown names and loading models raise their
    errors."""
    batched = LaneRunner(make_lane(FakeScript()), Embedder().facts, Codec())
    gate, _ = gateway(batched, Embedder(), None)
    async with gate.using_codec("alias", context()) as shown:
        assert shown is batched
    for name, error in (("m1", Unsupported), ("m2", ModelNotReady), ("m3", ModelNotFound)):
        with pytest.raises(error):
            async with gate.using_codec(name, context()):
                raise AssertionError
    assert [model.inflight for model in gate.registry] == [0, 0, 0]


async def test_removed_models_are_not_counted() -> None:
    """A model that is later loaded under the same name starts at zero."""
    registry, model = Registry(), Model("m0")
    gate = Gateway(registry, Counts())
    registry.add(model)
    model.mark_loaded(Embedder())
    await gate.run(Embed(model="m0", inputs=["x"]), context())
    assert (await gate.statistics())[0].inference_stats.success.count == 1
    gate.registry.remove(model)
    gate.registry.add(model)
    assert (await gate.statistics())[0].inference_stats.success.count == 0


async def test_cards_come_in_served_order() -> None:
    """Cards are listed in order, and each is found by any of its names."""
    gate, _ = gateway(Embedder(), None)
    cards = gate.models()
    assert [(card.name, card.state) for card in cards] == [("m0", "ready"), ("m1", "loading")]
    assert [gate.model("alias"), gate.model(""), gate.model("m1")] == [cards[0], cards[0], cards[1]]
    with pytest.raises(ModelNotFound):
        gate.model("m2")


async def test_ready_needs_every_model() -> None:
    """Readiness is off while any model is loading, failed, gone or unable to serve, and while the server drains."""
    first, second = Embedder(), Embedder()
    gate, _ = gateway(first, second)
    assert gate.ready()
    second.is_ready = False
    assert not gate.ready()
    second.is_ready = True
    gate.draining = True
    assert not gate.ready()
    gate.draining = False
    assert gate.ready()
    gate.registry.find("m1").transition("broke")
    assert not gate.ready()
    assert not gateway(Embedder(), None)[0].ready()
    (failed := Model("f")).mark_failed(SetupError("x"))
    (other := gateway(Embedder())[0]).registry.add(failed)
    assert not other.ready()


async def test_only_models_named_at_start_count_for_readiness() -> None:
    """Models loaded later do not affect readiness; a sleeping model counts as ready."""
    gate, _ = gateway(Embedder())
    gate.registry.add(Model("later", required=False))
    assert gate.ready()
    gate.registry.add(sleeper := Model("sleeper", is_sleeping=True))
    assert gate.ready()
    sleeper.is_sleeping = False
    assert not gate.ready()


@pytest.mark.parametrize("error", [None, EngineFailed("x"), ZeroDivisionError(), asyncio.CancelledError()])
@pytest.mark.parametrize("task", ["embed", "generate"])
async def test_requests_in_flight_are_counted(task: TaskKind, error: BaseException | None) -> None:
    """A request is in flight from before it is parsed until it leaves, whatever its outcome."""
    runner = Embedder(("embed", "generate"), error=error, release=asyncio.Event())
    gate, _ = gateway(runner)
    model, idle = gate.registry.find("m0"), []
    model.idle = lambda model: idle.append(model.inflight)
    call = asyncio.create_task(gate.run(embed(), soon()) if task == "embed" else text_of(gate, generate(), soon()))
    await until(lambda: bool(runner.begun))
    assert model.inflight == 1
    assert runner.release is not None
    runner.release.set()
    await gathered(call)
    assert (model.inflight, idle) == (0, [0])


async def test_an_observer_is_optional() -> None:
    """The gateway works without an observer."""
    registry = Registry()
    registry.add(model := Model("m"))
    model.mark_loaded(runner := Embedder())
    assert await Gateway(registry).run(embed(), soon()) is runner.answer


async def test_too_many_waiting_streams_are_refused() -> None:
    """Streams over max_queued_streams, or over half of it for one client, are refused; those that wait keep their
    places."""
    runner = Embedder(("generate",), release=asyncio.Event())
    gate, _ = gateway(runner, max_streams=1)
    model = gate.registry.find("m0")
    assert model.plan is not None
    model.plan = replace(model.plan, max_queued_streams=4)
    holds = asyncio.create_task(text_of(gate, generate(), soon()))
    await until(lambda: runner.begun == 1)
    waiting = [asyncio.create_task(text_of(gate, generate(), soon(client="a"))) for _ in range(2)]
    await until(lambda: gate._get_stream_limit(model).waiting == 2)
    with pytest.raises(
        Overloaded, match=r"this client already has 2 of 4 queued streams, its half of " r"max_queued_streams"
    ) as caught:
        await text_of(gate, generate(), soon(client="a"))
    assert caught.value.retry_after
    waiting += [asyncio.create_task(text_of(gate, generate(), soon(client=name))) for name in "bc"]
    await until(lambda: gate._get_stream_limit(model).waiting == 4)
    with pytest.raises(Overloaded, match=r"full \(max_queued_streams is 4\)"):
        await text_of(gate, generate(), soon(client="d"))
    assert runner.release is not None
    runner.release.set()
    assert [*await asyncio.gather(holds, *waiting)] == ["a b c"] * 5
    assert gate._get_stream_limit(model).waiting == 0


async def test_observers_get_the_usage_of_generations() -> None:
    """The observer gets the token counts and the time to the first chunk, also of a stream whose reader left early."""

    class GenerationRecorder(Observer):
        def __init__(self) -> None:
            self.reports: list[GenerationReport] = []

        def generated(self, report: GenerationReport) -> None:
            self.reports.append(report)

    observer, registry = GenerationRecorder(), Registry()
    registry.add(model := Model("m"))
    model.mark_loaded(make_runner())
    gate = Gateway(registry, observer)
    assert await text_of(gate, generate("a b c"), soon())
    with pytest.raises(InputRejected):
        await text_of(gate, generate("reject-item"), soon())
    async with aclosing(gate.stream(generate("a b c"), soon())) as chunks:
        await anext(chunks)
        await anext(chunks)
    first, second, third = observer.reports
    assert third.completion_tokens == 2
    assert (first.model, first.prompt_tokens, first.completion_tokens) == ("m", 3, 3)
    assert first.first_seconds is not None
    assert 0 <= first.first_seconds <= first.seconds
    assert (second.completion_tokens, second.first_seconds) == (0, None)


def test_a_silent_model_times_out(virtual: Run[None]) -> None:
    """A silent model times out if the client streams; an unstreamed answer may use the whole deadline."""

    async def main() -> None:
        generator = FakeGenerator(FakeScript(token_ms=3000))
        registry = Registry()
        registry.add(model := Model("m"))
        model.mark_loaded(make_runner(generator))
        loop = asyncio.get_running_loop()
        gate = Gateway(registry, first_token_timeout_s=5, token_timeout_s=2, clock=loop.time)

        async def read(*, stream: bool) -> str:
            ctx = Context(id="r", deadline=loop.time() + 100)
            task = Generate(model="m", prompts=["a b c"], stream=stream)
            return "".join([chunk.text async for chunk in gate.stream(task, ctx)])

        assert await read(stream=False) == "a b c"
        with pytest.raises(DeadlineExceeded, match="no token for 2 s"):
            await read(stream=True)
        assert generator.running == 0

    virtual(main)


async def test_names_of_clients_mean_models_and_adapters() -> None:
    """`model:latest` is the model and `model:adapter` one of its adapters; other names are not found, and the error
    lists those that exist."""
    gate, _ = gateway(make_runner(), Embedder(("generate",)), None)
    gate.registry.find("m0").facts = None
    runner = gate.registry.find("m0").runner
    assert isinstance(runner, GenerationRunner)
    runner._facts = replace(runner.facts, adapters=("loud",))
    assert gate.resolve("m0") == gate.resolve("alias") == gate.resolve("alias:latest") == ("m0", "")
    assert gate.resolve("m0:loud") == ("m0", "loud")
    assert gate.resolve("") == ("m0", "")
    for name, words in (
        ("m0:x", "it has loud"),
        ("m1:x", "it has no adapters"),
        ("m2:x", "it has no adapters"),
        ("x:y", "exist"),
    ):
        with pytest.raises(ModelNotFound, match=words):
            gate.resolve(name)
    gate.registry.remove(gate.registry.find("m1"))
    assert gate.resolve("m0") == ("m0", "")


def test_generations_can_be_aborted(virtual: Run[None]) -> None:
    """Each reader gets the chunks so far and then an error that asks to retry; no generation keeps running."""

    async def main() -> None:
        generator = FakeGenerator(FakeScript(token_ms=1000))
        registry = Registry()
        registry.add(model := Model("m"))
        model.mark_loaded(make_runner(generator))
        gate = Gateway(registry, clock=asyncio.get_running_loop().time)
        ctx = Context(id="r", deadline=asyncio.get_running_loop().time() + 100)
        seen: list[str] = []

        async def read() -> None:
            async for chunk in gate.stream(generate("a b c d e"), ctx):
                seen.append(chunk.text)  # noqa: PERF401 - what came before it broke off is what the test is about

        reader = asyncio.create_task(read())
        await asyncio.sleep(2.5)
        gate.abort_generations()
        outcome = (await gathered(reader))[0]
        assert isinstance(outcome, Unavailable)
        assert outcome.retry_after
        assert (seen, generator.running) == (["a", " b"], 0)
        gate.abort_generations()

    virtual(main)


async def test_invalid_requests_do_not_wait_for_a_slot() -> None:
    """A request that the runner can refuse at once does not wait for a slot."""
    gate, _ = gateway(make_runner(), max_streams=1)
    model = gate.registry.find("m0")
    await gate._get_stream_limit(model).enter(soon())
    with pytest.raises(Unsupported, match="min_p"):
        await text_of(gate, Generate(model="m0", prompts=["a"], sampling=Sampling(min_p=0.5)), soon())


IMAGE = Image(b"picture")


@pytest.mark.parametrize(
    ("modalities", "task", "message"),
    [
        (("text",), Embed(model="", inputs=["a", IMAGE]), "'m0' accepts only text: send text"),
        (("text",), Classify(model="", inputs=[IMAGE]), "'m0' accepts only text: send text"),
        (("image",), Embed(model="", inputs=["a", IMAGE]), "'m0' accepts only images: send images"),
        (("image",), Rerank(model="", queries=["q"], documents=["d"]), "'m0' accepts only images: send images"),
    ],
)
async def test_inputs_that_a_model_does_not_take(
    modalities: tuple[Modality, ...], task: BatchTask, message: str
) -> None:
    """Unsupported inputs are refused by name before the runner sees them."""
    runner = Embedder(("embed", "rerank", "classify"))
    runner.facts = replace(runner.facts, modalities=modalities)
    front, _ = gateway(runner)
    with pytest.raises(InvalidValue, match=message) as caught:
        await front.run(task, soon())
    assert caught.value.param == "input"
    assert not runner.begun


async def test_modalities_are_checked_before_a_download() -> None:
    """Inputs are checked before a download where the model's inputs are known; a loading model's are not."""
    runner = Embedder()
    front, recorder = gateway(runner, None)
    front.check_modality("m0", "text")
    with pytest.raises(InvalidValue, match="'m0' accepts only text"):
        front.check_modality("alias", "image")
    front.check_modality("m1", "image")
    with pytest.raises(ModelNotFound):
        front.check_modality("nobody", "image")
    assert await recorder.settled_calls() == [], "the surface counts the refusal"
    runner.facts = replace(runner.facts, modalities=("text", "image"))
    front.check_modality("", "image")
    await front.run(Embed(model="", inputs=[IMAGE, "a"]), soon())
    await front.run(Embed(model="", inputs=[IMAGE]), soon())
