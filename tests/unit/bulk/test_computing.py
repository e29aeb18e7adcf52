"""Blocks through a scripted call: order, sorting by length, bad inputs, retries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.bulk.computing import RETRIES, BlockRunner, Column, Task, Texts
from shoal.errors import EngineFailed, InputRejected, Overloaded, ShoalError, TooLong


class Script:
    """Answers each text with its length; fails for texts that contain a key of `errors`."""

    def __init__(self, errors: Mapping[str, ShoalError] | None = None, busy: int = 0) -> None:
        self.errors = errors or {}
        self.busy = busy
        self.calls: list[list[str]] = []

    async def __call__(self, texts: Sequence[Texts]) -> Mapping[str, Column]:
        self.calls.append([text for (text,) in texts])
        if self.busy:
            self.busy -= 1
            raise Overloaded("full", retry_after=100.0)
        for place, (text,) in enumerate(texts):
            for key, error in self.errors.items():
                if key in text:
                    raise error.at_input(place)
        return {
            "size": np.array([[len(text)] for (text,) in texts], np.float32),
            "copy": [text for (text,) in texts],
        }


def runner_of(script: Script, size: int = 4) -> tuple[BlockRunner, list[float]]:
    """Return a runner, and the pauses that it makes."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    empty: dict[str, Column] = {"size": np.empty((0, 1), np.float32), "copy": []}
    return BlockRunner(Task(script, size, 2, empty), pause), pauses


@given(st.lists(st.sampled_from(["a", "bb", "ccc", "dddd bad", "e poison"]), max_size=20))
async def test_each_row_gets_its_own_result(texts: list[str]) -> None:
    """Results are in the order of the block, and a bad text costs no other its result."""
    script = Script({"bad": InputRejected("refused"), "poison": EngineFailed("broke")})
    runner, _ = runner_of(script)
    advances: list[int] = []
    results = await runner.run([(text,) for text in texts], advances.append)
    good = [place for place, text in enumerate(texts) if "bad" not in text and "poison" not in text]
    assert results.kept == good
    assert results.columns["copy"] == [texts[place] for place in good]
    assert np.array_equal(results.columns["size"], [[len(texts[place])] for place in good] or np.empty((0, 1)))
    assert results.reasons == {
        place: "refused" if "bad" in text else "broke" for place, text in enumerate(texts) if place not in good
    }
    assert sum(advances) == len(texts)


async def test_texts_of_a_call_have_similar_lengths() -> None:
    """The longest come first."""
    script = Script()
    await runner_of(script, size=2)[0].run([("a",), ("dddd",), ("bb",), ("ccc",)])
    assert script.calls == [["dddd", "ccc"], ["bb", "a"]]


async def test_a_busy_model_is_asked_again_with_pauses() -> None:
    """Pauses follow the server's wish, within 30 s; a model that stays busy ends the run."""
    script = Script(busy=2)
    runner, pauses = runner_of(script)
    assert (await runner.run([("a",)])).kept == [0]
    assert pauses == [30.0, 30.0]
    with pytest.raises(Overloaded):
        await runner_of(Script(busy=RETRIES + 1))[0].run([("a",)])


@pytest.mark.parametrize("error", [EngineFailed("broke"), TooLong("no dimension fits")])
async def test_an_engine_that_answers_nothing_ends_the_run(error: ShoalError) -> None:
    """The rows are not to blame if the plainest text fails too."""

    async def call(texts: Sequence[Texts]) -> Mapping[str, Column]:
        raise error

    with pytest.raises(type(error)):
        await BlockRunner(Task(call, 4, 2, {}), _no_pause).run([("some text",)] * 9)


async def _no_pause(seconds: float) -> None:
    return
