from __future__ import annotations

import asyncio
import re
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from shoal.backends.fake.model import (
    MAX_TOKENS,
    RANGES,
    FakeEngine,
    FakeGenerator,
    FakePipeline,
    FakeScript,
    compute_vector,
    tokenize_item,
    word_id,
)
from shoal.core.protocols import Piece, Prepared, Prompt
from shoal.errors import (
    AddressError,
    DeadlineExceeded,
    EngineFailed,
    InputRejected,
    InvalidValue,
    NotFinite,
    OutOfMemory,
    TransportFailed,
)
from shoal.types import Context, Embed, Sampling, TextItem
from tests.unit.core.conftest import Run, gathered, run_virtual, until


@pytest.fixture
def virtual() -> Run[Any]:
    return run_virtual


def soon(seconds: float = 30.0) -> float:
    return asyncio.get_running_loop().time() + seconds


def prepared(*items: TextItem, script: FakeScript | None = None, **options: Any) -> list[Prepared]:
    task = Embed(model="m", inputs=[], **options)
    found = FakePipeline(script or FakeScript()).prepare([(task, item) for item in items])
    return [one for one in found if isinstance(one, Prepared)]


def batch(*items: TextItem) -> dict[str, Any]:
    return FakePipeline(FakeScript()).collate(prepared(*items), FakeEngine(FakeScript()).facts)


def test_scripts_are_read_from_addresses() -> None:
    """Options are parsed by name and type; missing ones have their defaults."""
    script = FakeScript.parse({"delay_ms": "5", "slots": "2", "poison": "bad"})
    assert script == FakeScript(delay_ms=5.0, slots=2, poison="bad")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speed": "5"}, "unknown option 'speed'; valid options: delay_ms"),
        ({"slots": "two"}, "slots='two' is not a number"),
        ({"slots": "1.5"}, "slots='1.5' is not a number"),
        ({"slots": "0"}, "slots must be between 1 and 256 (got 0)"),
        ({"dimension": "0"}, "dimension must be between 1 and 65536 (got 0)"),
        ({"dimension": "99999999999"}, "dimension must be between 1 and 65536 (got 99999999999)"),
        ({"labels": "30000000"}, "labels must be between 0 and 65536 (got 30000000)"),
        ({"max_batch_size": "-3"}, "max_batch_size must be between 1"),
        ({"delay_ms": "-1"}, "delay_ms must be between 0 and 3600000 (got -1)"),
        ({"delay_ms": "nan"}, "delay_ms must be between"),
        ({"token_ms": "inf"}, "token_ms must be between"),
    ],
)
def test_options_that_cannot_work_are_named(options: dict[str, str], message: str) -> None:
    """The error names the option and the valid values."""
    with pytest.raises(AddressError, match=re.escape(message)):
        FakeScript.parse(options)


def test_every_number_has_a_range() -> None:
    """An address cannot set a number without a bound, which could cost unbounded memory and time."""
    numbers = {field.name for field in fields(FakeScript) if field.type in ("int", "float")}
    assert numbers == set(RANGES)


def test_vectors_are_functions_of_their_words() -> None:
    """The same words give the same vector, other words or another order a different one; ids stay unchanged."""
    ids = tokenize_item("a b")
    assert ids == [word_id("a"), word_id("b")]
    assert tokenize_item(ids) == ids
    seen = [compute_vector(tokenize_item(text), 16).tobytes() for text in ("a b", "b a", "a", "a b b", "a  b")]
    assert len(set(seen)) == 4
    assert seen[0] == seen[4]
    assert compute_vector(ids, 16).dtype == np.float32


def test_long_texts_are_cut() -> None:
    """Texts are truncated to MAX_TOKENS and marked so; usage counts the tokens that are kept, as for every model."""
    (cut,) = prepared("w " * (MAX_TOKENS + 5))
    (whole,) = prepared("w " * MAX_TOKENS)
    assert (cut.cost, cut.tokens, cut.truncated) == (MAX_TOKENS, MAX_TOKENS, True)
    assert (whole.cost, whole.tokens, whole.truncated) == (MAX_TOKENS, MAX_TOKENS, False)
    (empty,) = prepared("")
    assert (empty.cost, empty.tokens) == (1, 0)


def test_equal_keys_mean_equal_answers() -> None:
    """Options that change the answer change the key."""
    keys = {prepared("a", **options)[0].key for options in ({}, {"normalize": False}, {"dimensions": 3})}
    assert len(keys) == 3
    assert prepared("a")[0].key == prepared([word_id("a")])[0].key


def test_bad_ids_and_dimensions_are_refused() -> None:
    """Bad ids fail their item, bad dimensions the task; values at the bounds are valid."""
    pipeline = FakePipeline(FakeScript(dimension=8))
    outcomes = pipeline.prepare([(Embed(model="m", inputs=[]), [bad]) for bad in (0, 2**31, 1, 2**31 - 1)])
    assert [isinstance(outcome, InvalidValue) for outcome in outcomes] == [True, True, False, False]
    for fine in (None, 1, 8):
        pipeline.check(Embed(model="m", inputs=[], dimensions=fine))
    for bad in (0, 9):
        with pytest.raises(InvalidValue, match="between 1 and 8"):
            pipeline.check(Embed(model="m", inputs=[], dimensions=bad))


def test_estimates_are_near() -> None:
    """Ids are counted exactly, texts by their length, up to the truncation limit."""
    pipeline = FakePipeline(FakeScript())
    assert [pipeline.estimate(item) for item in ([1, 2, 3], "abcdef", "x" * 10**6)] == [3, 3, MAX_TOKENS + 1]


def test_rows_are_finished_with_the_tasks_options() -> None:
    """Rows are truncated, then normalized; NaN fails only its row; padding rows are left out."""
    pipeline = FakePipeline(FakeScript())
    items = [*prepared("a", dimensions=5), *prepared("b", normalize=False), *prepared("c")]
    rows = np.stack([compute_vector(tokenize_item(text), 32) for text in "abcd"])
    rows[2] = np.nan
    first, second, third = pipeline.finish({"embedding": rows}, items)
    assert isinstance(first, np.ndarray)
    assert np.allclose(first, rows[0, :5] / np.linalg.norm(rows[0, :5]))
    assert isinstance(second, np.ndarray)
    assert np.array_equal(second, rows[1])
    assert isinstance(third, NotFinite)


def test_engines_compute_each_row_from_what_they_received(virtual: Run[None]) -> None:
    """Padding does not change the vectors; the time is the batch's delay plus its padded tokens."""

    async def main() -> None:
        engine = FakeEngine(FakeScript(delay_ms=10, token_us=1000), "e")
        loop = asyncio.get_running_loop()
        begun = loop.time()
        answer = await engine.infer(batch("a b c", "d"), ["embedding"], {}, soon())
        assert loop.time() - begun == pytest.approx(0.010 + 6 * 0.001)
        assert [row.tobytes() for row in answer["embedding"]] == [
            compute_vector(tokenize_item(text), 32).tobytes() for text in ("a b c", "d")
        ]
        assert list(engine.batches) == [(2, 3)]
        assert engine.facts.name == "e"

    virtual(main)


@pytest.mark.parametrize(("parallel", "seconds"), [(0, 0.01), (2, 0.01), (1, 0.02)])
def test_slots_beyond_the_parallel_ones_wait_their_turn(virtual: Run[None], parallel: int, seconds: float) -> None:
    """Two batches in two slots run in parallel if allowed, else one after the other."""

    async def main() -> None:
        engine = FakeEngine(FakeScript(delay_ms=10, slots=2, parallel=parallel))
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await asyncio.gather(*(engine.infer(batch(text), [], {}, soon()) for text in "ab"))
        assert loop.time() - begun == pytest.approx(seconds)

    virtual(main)


@pytest.mark.parametrize(
    ("word", "error"), [("poison-item", EngineFailed), ("reject-item", InputRejected), ("fine", None)]
)
def test_scripted_words_fail_the_batch(virtual: Run[None], word: str, error: type[Exception] | None) -> None:
    """The whole batch fails, whatever else is in it."""

    async def main() -> None:
        outcome = (await gathered(FakeEngine(FakeScript()).infer(batch("a", f"b {word}"), [], {}, soon())))[0]
        assert isinstance(outcome, error or dict)

    virtual(main)


def test_nan_stays_in_its_row(virtual: Run[None]) -> None:
    async def main() -> None:
        answer = await FakeEngine(FakeScript()).infer(batch("a", "x nan-item"), [], {}, soon())
        assert np.isfinite(answer["embedding"]).all(axis=1).tolist() == [True, False]

    virtual(main)


def test_engines_fail_as_scripted(virtual: Run[None]) -> None:
    """Each kind of failure raises its own error: closed, broken, out of memory, deadline, too many batches."""

    async def main() -> None:
        engine = FakeEngine(FakeScript(delay_ms=10, memory_tokens=4))
        with pytest.raises(OutOfMemory):
            await engine.infer(batch("a b c d e"), [], {}, soon())
        await engine.infer(batch("a b c d"), [], {}, soon())
        with pytest.raises(DeadlineExceeded):
            await engine.infer(batch("a"), [], {}, soon(0.005))
        engine.broken = True
        with pytest.raises(EngineFailed, match="without a reason"):
            await engine.infer(batch("a"), [], {}, soon())
        first, second = await gathered(*(engine.infer(batch("a"), [], {}, soon()) for _ in range(2)))
        assert "without a reason" in str(first)
        assert "more batches than slots" in str(second)
        await engine.aclose()
        assert not engine.ready()
        with pytest.raises(TransportFailed):
            await engine.infer(batch("a"), [], {}, soon())
        assert (engine.running, engine.cancelled) == (0, 0)

    virtual(main)


def test_cancelled_calls_are_counted_and_free_the_slot(virtual: Run[None]) -> None:
    """Tests can then check that nothing is computed for a cancelled call."""

    async def main() -> None:
        engine = FakeEngine(FakeScript(delay_ms=10))
        call = asyncio.create_task(engine.infer(batch("a"), [], {}, soon()))
        await until(lambda: engine.running == 1)
        call.cancel()
        await gathered(call)
        assert (engine.running, engine.cancelled) == (0, 1)

    virtual(main)


async def generate(generator: FakeGenerator, prompt: str, **sampling: Any) -> list[Piece]:
    pieces = generator.generate(Prompt(text=prompt), Sampling(**sampling), Context(id="r", deadline=soon()))
    return [piece async for piece in pieces]


@pytest.mark.parametrize(
    ("prompt", "sampling", "words", "reason"),
    [
        ("a b", {}, ["a", " b"], "stop"),
        ("a b", {"max_tokens": 1}, ["a"], "length"),
        ("a b", {"max_tokens": 9}, ["a", " b"], "stop"),
        ("a b", {"min_tokens": 3}, ["a", " b", " a"], "stop"),
        ("a b", {"min_tokens": 9, "max_tokens": 3}, ["a", " b", " a"], "length"),
        ("", {}, [""], "stop"),
    ],
)
def test_generators_repeat_the_prompt(
    virtual: Run[None], prompt: str, sampling: dict[str, Any], words: list[str], reason: str
) -> None:
    """One word per piece up to the limit, starting over only for `min_tokens`; the last piece has the finish reason."""

    async def main() -> None:
        generator = FakeGenerator(FakeScript())
        pieces = await generate(generator, prompt, **sampling)
        assert [piece.text for piece in pieces] == words
        assert [piece.finish_reason for piece in pieces] == [None] * (len(words) - 1) + [reason]
        assert (generator.produced, generator.closed, generator.running) == (len(words), 1, 0)

    virtual(main)


def test_generators_return_log_probabilities(virtual: Run[None]) -> None:
    """Each word has its log probability and as many alternatives as requested; none by default."""

    async def main() -> None:
        generator = FakeGenerator(FakeScript())
        assert [piece.logprobs for piece in await generate(generator, "a b")] == [(), ()]
        first, second = [piece.logprobs[0] for piece in await generate(generator, "a b", logprobs=2)]
        assert (first.token, first.logprob, second.token, second.logprob) == ("a", 0, " b", -0.1)
        assert [(each.token, each.logprob) for each in second.top] == [(" b", -0.1), (" b1", -0.2)]

    virtual(main)


def test_generators_fail_as_scripted(virtual: Run[None]) -> None:
    """A prompt is rejected before the first word or fails in mid-answer; no generation is left running."""

    async def main() -> None:
        generator = FakeGenerator(FakeScript())
        with pytest.raises(InputRejected):
            await generate(generator, "a reject-item")
        with pytest.raises(EngineFailed, match="without a reason"):
            await generate(generator, "a poison-item b")
        assert generator.produced == 1
        await generator.aclose()
        assert not generator.ready()
        with pytest.raises(TransportFailed):
            await generate(generator, "a")
        late = generator.generate(Prompt(text="a"), Sampling(), Context(id="r", deadline=0.0))
        generator.online = True
        with pytest.raises(DeadlineExceeded):
            await anext(late)
        assert generator.running == 0

    virtual(main)


def test_adapters_change_the_answer(virtual: Run[None]) -> None:
    """Tests can then check which adapter ran."""

    async def main() -> None:
        generator = FakeGenerator(FakeScript())
        pieces = generator.generate(Prompt(text="a b"), Sampling(), Context(id="r", deadline=soon()), adapter="loud")
        assert [piece.text async for piece in pieces] == ["A", " B"]

    virtual(main)


def test_texts_are_guessed_by_their_length() -> None:
    """This includes a text of 28 MB; a pair counts both texts."""
    pipeline = FakePipeline(FakeScript())
    assert [pipeline.estimate(item) for item in ("abcdef", ("abc", "def"), [7, 8, 9])] == [3, 3, 3]
    long = "word " * 5_600_000
    assert pipeline.estimate(long) == pipeline.estimate((long, long)) == MAX_TOKENS + 1
