"""The runner over text generators: fields, lengths, choices, replicas, usage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from shoal.backends.fake.model import SUPPORTED_PARAMETERS, FakeGenerator, FakeScript
from shoal.core.generation.runner import (
    CHOICES_AT_ONCE,
    INLINE_CHARS,
    UNBOUNDED_TOKENS,
    GenerationOptions,
    GenerationRunner,
    _estimate_chars,
)
from shoal.core.protocols import GeneratorFacts, Piece, Prompt
from shoal.core.threads import Threads
from shoal.errors import (
    EngineFailed,
    InvalidValue,
    Overloaded,
    ShoalError,
    TransportFailed,
    Unavailable,
    Unsupported,
)
from shoal.types import (
    Chunk,
    Context,
    Embed,
    Generate,
    Guide,
    Message,
    Part,
    Sampling,
    TokenLogprob,
    Tool,
    ToolCall,
    Usage,
)
from tests.unit.core.conftest import Run, gathered
from tests.unit.core.lanes import context
from tests.unit.core.talks import FACTS, PlainPipeline, make_runner


class Scripted:
    """Yields its pieces, then raises `error`; records its calls."""

    def __init__(
        self,
        *pieces: Piece,
        error: ShoalError | None = None,
        parameters: frozenset[str] = SUPPORTED_PARAMETERS,
        **facts: Any,
    ) -> None:
        self.facts = GeneratorFacts(name="scripted", parameters=parameters, **facts)
        self.pieces = pieces or (Piece(text="x", tokens=1),)
        self.error = error
        self.calls: list[tuple[Prompt, Sampling, str, bool]] = []
        self.closed = 0
        self.is_ready = True
        self.broken: list[Callable[[ShoalError], None]] = []

    async def generate(
        self, prompt: Prompt, sampling: Sampling, ctx: Context, *, adapter: str = "", stream: bool = True
    ) -> AsyncGenerator[Piece]:
        self.calls.append((prompt, sampling, adapter, stream))
        try:
            for piece in self.pieces:
                yield piece
                await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
        finally:
            self.closed += 1

    def when_broken(self, call: Callable[[ShoalError], None]) -> None:
        self.broken.append(call)

    def ready(self) -> bool:
        return self.is_ready

    async def aclose(self) -> None:
        self.is_ready = False

    @property
    def sampling(self) -> Sampling:
        return self.calls[-1][1]


class Silent(Scripted):
    """Fails before its first piece."""

    async def generate(
        self, prompt: Prompt, sampling: Sampling, ctx: Context, *, adapter: str = "", stream: bool = True
    ) -> AsyncGenerator[Piece]:
        self.calls.append((prompt, sampling, adapter, stream))
        if self.error is not None:
            raise self.error
        yield Piece()


def ask(*prompts: str, **fields: Any) -> Generate:
    sampling = {name: fields.pop(name) for name in list(fields) if name in Sampling.__struct_fields__}
    return Generate(model="m", prompts=list(prompts or ("a b c",)), sampling=Sampling(**sampling), **fields)


async def read(runner: Any, task: Generate) -> list[Chunk]:
    return [chunk async for chunk in runner.stream(task, context())]


def texts(chunks: list[Chunk]) -> dict[int, str]:
    found: dict[int, str] = {}
    for chunk in chunks:
        if chunk.usage is None:
            found[chunk.index] = found.get(chunk.index, "") + chunk.text
    return found


def reasons(chunks: list[Chunk]) -> dict[int, str]:
    return {chunk.index: chunk.finish_reason for chunk in chunks if chunk.finish_reason}


def test_prompts_and_choices_are_numbered_prompt_by_prompt(virtual: Run[None]) -> None:
    """Two prompts with two choices each: every choice ends once, and usage counts a prompt once and every answer."""

    async def main() -> None:
        chunks = await read(make_runner(), ask("a b", "c d e", n=2))
        assert texts(chunks) == {0: "a b", 1: "a b", 2: "c d e", 3: "c d e"}
        assert reasons(chunks) == dict.fromkeys(range(4), "stop")
        assert chunks[-1] == Chunk(usage=Usage(prompt_tokens=5, completion_tokens=10))

    virtual(main)


def test_more_choices_than_run_side_by_side_are_all_answered(virtual: Run[None]) -> None:
    """The choices run in turns, never more at once than the limit."""

    async def main() -> None:
        fake_generator, peak = FakeGenerator(FakeScript(token_ms=1)), 0
        async with aclosing(make_runner(fake_generator).stream(ask("a b", n=40), context())) as chunks:
            found: dict[int, str] = {}
            async for chunk in chunks:
                peak = max(peak, fake_generator.running)
                found[chunk.index] = found.get(chunk.index, "") + chunk.text
        assert found == dict.fromkeys(range(40), "a b")
        assert peak == CHOICES_AT_ONCE

    virtual(main)


def test_choices_differ_by_seed(virtual: Run[None]) -> None:
    """Seeds count up from the requested one, else from a random one; a single answer keeps its seed."""

    async def main() -> None:
        model = Scripted()
        await read(make_runner(model), ask(n=3, seed=7))
        assert [sampling.seed for _, sampling, _, _ in model.calls] == [7, 8, 9]
        model.calls.clear()
        await read(make_runner(model), ask(n=2))
        first, second = [sampling.seed for _, sampling, _, _ in model.calls]
        assert first is not None
        assert second == first + 1
        await read(make_runner(model), ask())
        assert model.sampling.seed is None
        seedless = Scripted(parameters=frozenset({"max_tokens"}))
        await read(make_runner(seedless), ask(n=2))
        assert {sampling.seed for _, sampling, _, _ in seedless.calls} == {None}

    virtual(main)


@pytest.mark.parametrize(
    ("max_tokens", "default", "context_tokens", "expected"),
    [
        (None, 0, None, UNBOUNDED_TOKENS),
        (None, 50, None, 50),
        (None, 0, 10, 7),
        (None, 50, 10, 7),
        (5, 50, 10, 5),
        (500, 0, 10, 7),
        (500, 0, None, 500),
        (5, 0, 3, 1),
    ],
)
def test_how_long_an_answer_may_be(
    virtual: Run[None], max_tokens: int | None, default: int, context_tokens: int | None, expected: int
) -> None:
    """The limit is the requested one, else the setting, else the context left by a prompt of three tokens, and never
    more than that."""

    async def main() -> None:
        model = Scripted(context_tokens=context_tokens)
        options = GenerationOptions(model="m", default_max_tokens=default)
        runner = make_runner(model, pipeline=PlainPipeline(counts=True), options=options)
        await read(runner, ask(max_tokens=max_tokens))
        assert model.sampling.max_tokens == expected

    virtual(main)


def test_a_model_that_cannot_count_is_cut_here(virtual: Run[None]) -> None:
    """A model without a length limit is stopped after as many tokens, with "length", and its stream is closed."""

    async def main() -> None:
        model = Scripted(*(Piece(text=str(at)) for at in range(9)), parameters=frozenset())
        chunks = await read(make_runner(model), ask(max_tokens=3))
        assert (texts(chunks), reasons(chunks)) == ({0: "012"}, {0: "length"})
        assert (model.sampling.max_tokens, model.closed) == (None, 1)
        assert reasons(await read(make_runner(model), ask())) == {0: "stop"}

    virtual(main)


def test_no_tokens_are_no_work(virtual: Run[None]) -> None:
    """max_tokens 0 does not call the model; with echo it returns the prompt."""

    async def main() -> None:
        model = Scripted()
        chunks = await read(make_runner(model), ask("hello", max_tokens=0, echo=True))
        assert (texts(chunks), reasons(chunks), model.calls) == ({0: "hello"}, {0: "length"}, [])

    virtual(main)


def test_why_an_answer_ended(virtual: Run[None]) -> None:
    """The reason is the model's; without one it is "length" if all tokens were used, else "stop". A stop text is
    "stop" and ends the generation."""

    async def main() -> None:
        generator = Scripted(Piece(text="x", tokens=1, finish_reason="content_filter"))
        assert reasons(await read(make_runner(generator), ask())) == {0: "content_filter"}
        silent = Scripted(Piece(text="x", tokens=2))
        assert reasons(await read(make_runner(silent), ask(max_tokens=2))) == {0: "length"}
        assert reasons(await read(make_runner(silent), ask(max_tokens=3))) == {0: "stop"}
        fake_generator = FakeGenerator(FakeScript())
        chunks = await read(make_runner(fake_generator), ask("a b END c d", stop=["END"]))
        assert (texts(chunks), reasons(chunks)) == ({0: "a b"}, {0: "stop"})
        assert (fake_generator.produced, fake_generator.closed) == (3, 1)

    virtual(main)


def test_echo_puts_the_prompt_before_the_answer(virtual: Run[None]) -> None:
    """Each answer starts with its own prompt; an empty prompt is no chunk."""

    async def main() -> None:
        chunks = await read(make_runner(Scripted()), ask("one ", "", echo=True))
        assert texts(chunks) == {0: "one x", 1: "x"}

    virtual(main)


def test_fields_that_the_model_lacks_are_refused_by_name(virtual: Run[None], caplog: pytest.LogCaptureFixture) -> None:
    """Unsupported fields are refused before any work, unless the configuration ignores them."""

    async def main() -> None:
        model = Scripted()
        with pytest.raises(Unsupported, match="'min_p'") as caught:
            await read(make_runner(model), ask(min_p=0.1))
        assert caught.value.param == "min_p"
        with pytest.raises(Unsupported, match="'least'"):
            await read(make_runner(model), msgspec.structs.replace(ask(min_p=0.1), names={"min_p": "least"}))
        assert model.calls == []
        lax = make_runner(model, options=GenerationOptions(model="m", ignore=frozenset({"min_p", "best_of"})))
        for _ in range(2):
            chunks = await read(lax, ask(min_p=0.1))
            assert [chunk.ignored for chunk in chunks] == [("min_p",), *[()] * (len(chunks) - 1)]
        assert model.sampling.min_p is None
        assert [record.getMessage() for record in caplog.records] == [
            "m does not support 'min_p' and answers without it"
        ]  # once, and every answer says it itself
        silent = Scripted(parameters=frozenset({"temperature"}))
        best = GenerationOptions(model="m", ignore=frozenset({"best_of"}))
        chunks = await read(make_runner(silent, options=best), msgspec.structs.replace(ask(), best_of=3))
        assert chunks[0].ignored == ("best_of",)
        assert len(silent.calls) == 1

    virtual(main)


def test_the_models_defaults_fill_missing_fields(virtual: Run[None]) -> None:
    """Fields of the request take precedence over the model's defaults."""

    async def main() -> None:
        model = Scripted()
        options = GenerationOptions(model="m", sampling=Sampling(temperature=0.2, top_k=5, max_tokens=9))
        await read(make_runner(model, options=options), ask(temperature=0.9))
        sampling = model.sampling
        assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.9, 5, 9)

    virtual(main)


def test_adapters_are_those_of_the_model(virtual: Run[None]) -> None:
    """The adapter is passed on by name; an unknown one is refused."""

    async def main() -> None:
        model = Scripted(adapters=("sql",))
        await read(make_runner(model), ask(adapter="sql", stream=True))
        assert model.calls[-1][2:] == ("sql", True)
        with pytest.raises(InvalidValue, match="'poems'"):
            await read(make_runner(model), ask(adapter="poems"))

    virtual(main)


GUIDE = Guide(kind="json_schema", value="{}")


@pytest.mark.parametrize("choice", ["required", "function"])
def test_demanded_tools_guide_the_model(virtual: Run[None], choice: str) -> None:
    """Required tools use a guide if the model supports one; else they are refused, or tried if so configured. "auto"
    needs none."""

    async def main() -> None:
        task = ask(tools=[Tool(name="f")], tool_choice=choice)
        able = Scripted(parameters=SUPPORTED_PARAMETERS | {"guide"})
        await read(make_runner(able, pipeline=PlainPipeline(guide=GUIDE)), task)
        assert able.sampling.guide == GUIDE
        for model, pipeline in ((Scripted(), PlainPipeline(guide=GUIDE)), (able, PlainPipeline())):
            with pytest.raises(Unsupported) as caught:
                await read(make_runner(model, pipeline=pipeline), task)
            assert caught.value.param == "tool_choice"
        plain = Scripted()
        lax = GenerationOptions(model="m", ignore=frozenset({"tool_choice"}))
        await read(make_runner(plain, options=lax), task)
        await read(make_runner(plain), ask(tools=[Tool(name="f")]))
        assert len(plain.calls) == 2

    virtual(main)


async def test_optional_guides_of_tools() -> None:
    """A model that follows structural tags gets the guide of "auto" if there are tools, and so does one with a guide of
    the client: the pipeline's has both."""
    parameters, own = SUPPORTED_PARAMETERS | {"guide"}, Guide(kind="regex", value="a", field="guided_regex")
    tagged = Scripted(parameters=parameters, structural_tags=True)
    tools = [Tool(name="f")]
    for model, fields, guide in (
        (tagged, {"tools": tools}, GUIDE),
        (tagged, {"tools": tools, "guide": own}, GUIDE),
        (Scripted(parameters=parameters), {"tools": tools, "guide": own}, GUIDE),
        (tagged, {"guide": own}, own),
        (tagged, {}, None),
        (Scripted(parameters=parameters), {"tools": tools}, None),
    ):
        await read(make_runner(model, pipeline=PlainPipeline(guide=GUIDE)), ask(**fields))
        assert model.sampling.guide == guide


def rated(*values: float) -> list[Piece]:
    return [Piece(text=str(value), tokens=1, logprobs=(TokenLogprob(token="x", logprob=value),)) for value in values]


class Rated(Scripted):
    """Each answer is one token, more likely the later it was requested; one of them has no probability."""

    async def generate(
        self, prompt: Prompt, sampling: Sampling, ctx: Context, *, adapter: str = "", stream: bool = True
    ) -> AsyncGenerator[Piece]:
        self.calls.append((prompt, sampling, adapter, stream))
        number = len(self.calls)
        yield rated(-9.0 / number)[0] if number != 3 else Piece(text="mute", tokens=1)


def test_the_best_of_many_by_their_probability(virtual: Run[None]) -> None:
    """The likeliest answers come first, all of them count, and probabilities are returned only on request."""

    async def main() -> None:
        model = Rated()
        chunks = await read(make_runner(model), ask("p", n=2, best_of=4))
        assert texts(chunks) == {0: "-2.25", 1: "-4.5"}
        assert not any(chunk.logprobs for chunk in chunks)
        assert chunks[-1].usage == Usage(prompt_tokens=1, completion_tokens=4)
        assert model.sampling.logprobs == 0
        model.calls.clear()
        chunks = await read(make_runner(model), ask("p", "q", best_of=2, logprobs=1))
        assert texts(chunks) == {0: "-4.5", 1: "-2.25"}
        assert any(chunk.logprobs for chunk in chunks)

    virtual(main)


def test_best_of_requires_probabilities(virtual: Run[None]) -> None:
    """best_of above n is refused; best_of equal to n needs no choice."""

    async def main() -> None:
        model = Scripted(parameters=frozenset({"seed"}))
        with pytest.raises(Unsupported, match="best_of"):
            await read(make_runner(model), ask(best_of=2))
        await read(make_runner(model), ask(best_of=1))

    virtual(main)


@pytest.mark.parametrize("error", [TransportFailed("gone"), Overloaded("full")], ids=lambda error: error.kind)
def test_another_replica_helps_out_before_the_first_piece(virtual: Run[None], error: ShoalError) -> None:
    """Each replica is tried once; if all fail, or the answer has started, the caller gets the error."""

    async def main() -> None:
        bad, good = Silent(error=error), Scripted()
        assert texts(await read(make_runner(bad, good), ask())) == {0: "x"}
        assert (len(bad.calls), len(good.calls)) == (1, 1)
        with pytest.raises(type(error)):
            await read(make_runner(bad, Silent(error=error)), ask())
        begun, other = Scripted(error=error), Scripted()
        with pytest.raises(type(error)):
            await read(make_runner(begun, other), ask())
        assert other.calls == []

    virtual(main)


def test_other_errors_are_not_tried_again(virtual: Run[None]) -> None:
    """An error of the model on a prompt is not retried, since it may recur on every replica."""

    async def main() -> None:
        bad, good = Silent(error=EngineFailed("no")), Scripted()
        with pytest.raises(EngineFailed):
            await read(make_runner(bad, good), ask())
        assert good.calls == []

    virtual(main)


def test_answers_go_to_the_replica_with_the_fewest(virtual: Run[None]) -> None:
    """Concurrent answers spread; a replica that is not ready gets none, and without any the request fails at once."""

    async def main() -> None:
        first, second = (FakeGenerator(FakeScript(token_ms=1)) for _ in range(2))
        runner = make_runner(first, second)
        await asyncio.gather(*(read(runner, ask("a b c")) for _ in range(6)))
        assert (first.closed, second.closed) == (3, 3)
        first.online = False
        assert runner.ready()
        await asyncio.gather(*(read(runner, ask()) for _ in range(2)))
        assert (first.closed, second.closed) == (3, 5)
        await runner.aclose()
        assert not runner.ready()
        with pytest.raises(Unavailable, match="try again"):
            await read(runner, ask())

    virtual(main)


def test_the_backends_count_of_a_prompt_goes_before_ours(virtual: Run[None]) -> None:
    """The backend's counts of prompt and cached tokens are used; without any, four bytes count as a token."""

    async def main() -> None:
        generator = Scripted(Piece(text="x", tokens=2, prompt_tokens=40, cached_tokens=30))
        pipeline = PlainPipeline(counts=True)
        assert (await read(make_runner(generator, pipeline=pipeline), ask()))[-1].usage == Usage(
            prompt_tokens=40, completion_tokens=2, cached_tokens=30
        )
        mute = Scripted(Piece(text="x"))
        assert (await read(make_runner(mute, pipeline=pipeline), ask("a b c")))[-1].usage == Usage(
            prompt_tokens=3, completion_tokens=1
        )
        assert (await read(make_runner(mute), ask("twelve bytes")))[-1].usage == Usage(
            prompt_tokens=3, completion_tokens=1
        )

    virtual(main)


def test_dropped_messages_are_reported_once(virtual: Run[None]) -> None:
    """Dropped messages are reported on the first chunk."""

    async def main() -> None:
        chunks = await read(make_runner(pipeline=PlainPipeline(cut=2)), ask())
        assert [chunk.cut for chunk in chunks] == [2] + [0] * (len(chunks) - 1)

    virtual(main)


def test_an_invalid_task_is_refused_before_any_work(virtual: Run[None]) -> None:
    """The pipeline's own error is raised."""

    async def main() -> None:
        model, pipeline = Scripted(), PlainPipeline()
        pipeline.error = InvalidValue("no such thing")
        with pytest.raises(InvalidValue, match="no such thing"):
            await read(make_runner(model, pipeline=pipeline), ask())
        assert model.calls == []

    virtual(main)


def test_closing_a_stream_of_many_choices_closes_them_all(virtual: Run[None]) -> None:
    """Running and waiting choices are closed, also when one of them fails."""

    async def main() -> None:
        fake_generator = FakeGenerator(FakeScript(token_ms=1))
        async with aclosing(make_runner(fake_generator).stream(ask("a b c", n=40), context())) as chunks:
            await anext(chunks)
        assert fake_generator.running == 0
        assert fake_generator.closed == CHOICES_AT_ONCE
        outcome = (await gathered(read(make_runner(fake_generator), ask("a b", "poison-item", "c d"))))[0]
        assert isinstance(outcome, EngineFailed)
        assert fake_generator.running == 0

    virtual(main)


async def test_long_prompts_are_prepared_in_a_thread() -> None:
    """Short prompts are prepared on the loop, where a thread hop would cost more than the work."""
    threads = Threads("test", 1)
    hops = 0
    run = threads.run

    async def counted(call: Callable[[], Any]) -> Any:
        nonlocal hops
        hops += 1
        return await run(call)

    threads.run = counted  # type: ignore[method-assign]
    runner = make_runner(Scripted(), options=GenerationOptions(model="m", threads=threads))
    long = "x" * INLINE_CHARS
    turns = [Message(role="user", content=[Part(text=long), Part(text="y")]), Message(role="user", content=long)]
    for task, expected in (
        (ask("x"), 0),
        (ask(long + "y"), 1),
        (Generate(model="m", messages=turns), 2),
        (Generate(model="m", messages=[Message(role="assistant")]), 2),
    ):
        found = [chunk async for chunk in runner.stream(task, soon())]
        assert found
        assert hops == expected
    assert _estimate_chars(ask(tools=[Tool(name="f", parameters={"x": long})])) > INLINE_CHARS
    call = ToolCall(id="c", name="f", arguments=long)
    assert _estimate_chars(Generate(model="m", messages=[Message(role="assistant", tool_calls=[call])])) > INLINE_CHARS
    assert (
        _estimate_chars(Generate(model="m", messages=[Message(role="user", content="")] * INLINE_CHARS)) > INLINE_CHARS
    )
    threads.close()


def soon() -> Context:
    return Context(id="r", deadline=1e12)


async def test_it_does_not_embed() -> None:
    """Embedding is refused with the field's name."""
    with pytest.raises(Unsupported) as caught:
        await make_runner().run(Embed(model="m", inputs=["x"]), soon())
    assert caught.value.param == "model"


def test_a_replica_that_stops_for_good_can_say_so() -> None:
    """Each replica that supports it gets the callback."""
    able, other = Scripted(), FakeGenerator(FakeScript())
    runner = make_runner(able, other)
    runner.when_broken(print)
    assert able.broken == [print]
    assert runner.facts.tasks == ("generate",)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        (
            {"tools": [Tool(name="f")], "tool_choice": "required", "guide": Guide(kind="regex", field="guided_regex")},
            "guided_regex",
        ),
    ],
)
async def test_fields_that_exclude_each_other(fields: dict[str, Any], param: str) -> None:
    """Conflicting fields are refused by `check` and by `stream`, not dropped."""
    runner = make_runner(Scripted(parameters=SUPPORTED_PARAMETERS | {"guide"}), pipeline=PlainPipeline(guide=GUIDE))
    with pytest.raises((InvalidValue, Unsupported)) as caught:
        runner.check(ask(**fields))
    assert caught.value.param == param
    with pytest.raises(type(caught.value)):
        await anext(runner.stream(ask(**fields), soon()))


def test_a_replica_that_hangs_is_used_last(virtual: Run[None]) -> None:
    """A replica that held a request too long comes last; the others keep working."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        hangs, works = FakeGenerator(FakeScript(token_ms=3_600_000)), Scripted()
        options = GenerationOptions(model="m", patience_s=2)
        runner = GenerationRunner(PlainPipeline(), [hangs, works], FACTS, options, loop.time)

        async def read_one() -> None:
            async with asyncio.timeout(5):
                await read(runner, ask())

        with pytest.raises(TimeoutError):
            await read_one()
        for _ in range(5):
            await read_one()
        assert len(works.calls) == 5

    virtual(main)


def test_more_top_logprobs_than_supported(virtual: Run[None]) -> None:
    """Too many top logprobs are refused by the client's field name before any work, or reduced if so configured."""

    async def main() -> None:
        model = Scripted(parameters=SUPPORTED_PARAMETERS | {"logprobs"}, top_logprobs=0)
        for task, name in (
            (ask(logprobs=2), "logprobs"),
            (
                msgspec.structs.replace(ask(logprobs=20), prompts=[], messages=[Message(role="user", content="a")]),
                "top_logprobs",
            ),
        ):
            with pytest.raises(Unsupported, match="chosen token") as caught:
                await read(make_runner(model), task)
            assert caught.value.param == name
        assert model.calls == []
        lax = make_runner(model, options=GenerationOptions(model="m", ignore=frozenset({"top_logprobs"})))
        assert (await read(lax, ask(logprobs=2)))[0].ignored == ("logprobs",)
        assert model.sampling.logprobs == 0

    virtual(main)
