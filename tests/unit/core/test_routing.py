from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.core.protocols import Runner, TextCodec
from shoal.core.routing import TaskRouter
from shoal.errors import Unsupported
from shoal.types import Context, Embed, Generate, Sampling
from tests.unit.core.runners import Codec, Embedder
from tests.unit.core.talks import PlainPipeline, make_runner

CTX = Context(id="r", deadline=1e12)
EMBED = Embed(model="m", inputs=["x"])
GENERATE = Generate(model="m", prompts=["a b"])


async def test_each_task_goes_to_the_runner_that_can() -> None:
    """The first runner that lists the task runs it."""
    embeds, talks, both = Embedder(("embed",)), Embedder(("generate",)), Embedder(("generate", "embed"))
    runner: Runner = TaskRouter([embeds, talks, both])
    assert await runner.run(EMBED, CTX) is embeds.answer
    assert [chunk.text async for chunk in runner.stream(GENERATE, CTX)] == ["a", "b"]
    assert (embeds.begun, talks.begun, both.begun) == (1, 1, 0)


async def test_tokens_are_counted_by_the_runner_that_generates() -> None:
    """If it counts them; else they are estimated."""
    assert await TaskRouter([Embedder(("embed",)), make_runner()]).count_tokens(GENERATE, CTX) == 1
    talks = make_runner(pipeline=PlainPipeline(counts=True))
    assert await TaskRouter([Embedder(("embed",)), talks]).count_tokens(GENERATE, CTX) == 2
    with pytest.raises(Unsupported, match="cannot generate"):
        await TaskRouter([Embedder(("embed",))]).count_tokens(GENERATE, CTX)


async def test_facts_are_the_first_ones_with_all_tasks() -> None:
    """Tasks come in the order of the runners, each once."""
    runner = TaskRouter([Embedder(("embed",)), Embedder(("generate", "embed"))])
    assert runner.facts.tasks == ("embed", "generate")
    assert runner.facts.source == "s"


async def test_what_nobody_can_is_unsupported() -> None:
    """Both calls raise Unsupported with the field's name."""
    with pytest.raises(Unsupported, match="cannot generate") as caught:
        TaskRouter([Embedder(("embed",))]).stream(GENERATE, CTX)
    assert caught.value.param == "model"
    with pytest.raises(Unsupported, match="cannot embed"):
        await TaskRouter([Embedder(("generate",))]).run(EMBED, CTX)


async def test_ready_and_close_mean_all() -> None:
    """The model is ready if all runners are, and closing closes all of them."""
    first, second = Embedder(("embed",)), Embedder(("generate",))
    runner = TaskRouter([first, second])
    assert runner.ready()
    second.is_ready = False
    assert not runner.ready()
    await runner.aclose()
    assert (first.closed, second.closed) == (1, 1)


async def test_one_that_fails_to_close_keeps_no_other_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is raised after all others were closed."""
    first, second = Embedder(("embed",)), Embedder(("generate",))

    async def failing() -> None:
        raise OSError("broken")

    monkeypatch.setattr(first, "aclose", failing)
    with pytest.raises(OSError, match="broken"):
        await TaskRouter([first, second]).aclose()
    assert second.closed == 1


def test_facts_hold_what_only_later_ones_know() -> None:
    """Context and adapters come from the runner that generates; of equal details the first one counts."""
    embeds, talks = Embedder(("embed",)), Embedder(("generate",))
    embeds.facts = replace(embeds.facts, details={"a": 1})
    talks.facts = replace(talks.facts, context_tokens=64, adapters=("x",), details={"a": 2, "b": 3})
    facts = TaskRouter([embeds, talks]).facts
    assert (facts.context_tokens, facts.adapters, facts.details) == (64, ("x",), {"a": 1, "b": 3})


async def test_what_generates_can_check() -> None:
    """Only the runner that generates can check a task before it runs."""
    TaskRouter([Embedder(("generate",))]).check(GENERATE)
    with pytest.raises(Unsupported, match="min_p"):
        TaskRouter([Embedder(("embed",)), make_runner()]).check(
            Generate(model="m", prompts=["a"], sampling=Sampling(min_p=0.5))
        )


class Shows(Embedder, Codec):
    """A runner that embeds and has a tokenizer."""


class Hides(Embedder, Codec):
    """A runner that has the methods but no tokenizer."""

    async def tokenize(self, texts: object, *, add_special_tokens: bool, prompt_name: str | None) -> Any:
        raise Unsupported("no tokenizer")

    async def decode(self, ids: object, *, skip_special_tokens: bool) -> Any:
        raise Unsupported("no tokenizer")


async def test_the_tokenizer_is_of_the_first_one_that_shows_any() -> None:
    """The first runner with a tokenizer is used for every task."""
    model = TaskRouter([Embedder(("generate",)), Hides(("rerank",)), Shows(("embed",))])
    assert isinstance(model, TextCodec)
    tokens = await model.tokenize(["ab"], add_special_tokens=True, prompt_name="p")
    assert [token.text for token in tokens[0]] == ["p", "a", "b"]
    assert await model.decode([[97]], skip_special_tokens=False) == ["a$"]


@pytest.mark.parametrize("runner", [Embedder(), Hides()])
async def test_a_tokenizer_that_nobody_shows(runner: Runner) -> None:
    """The error is the one of a model without a tokenizer."""
    model = TaskRouter([runner])
    with pytest.raises(Unsupported, match="does not expose its tokenizer"):
        await model.tokenize(["a"], add_special_tokens=True, prompt_name=None)
    with pytest.raises(Unsupported, match="does not expose its tokenizer"):
        await model.decode([[1]], skip_special_tokens=True)
