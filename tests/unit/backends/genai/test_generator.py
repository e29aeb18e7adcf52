"""A language model in its own process: a tiny Llama with random weights, run by the real library."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from shoal.backends.genai import GenaiGenerator, GenaiOptions, hang_watch, start_generator
from shoal.backends.genai import generator as generating
from shoal.backends.genai.messages import Produced
from shoal.core.protocols import Breakable, Prompt, TextGenerator
from shoal.errors import (
    Crashed,
    DeadlineExceeded,
    InvalidValue,
    MissingExtra,
    ModelFileError,
    OutOfMemory,
    ShoalError,
    TransportFailed,
)
from shoal.types import Guide, Sampling
from tests.unit.backends.genai.conftest import EXACT, GGUF, IR, Model, answer, context

if find_spec("openvino_genai") is None:
    pytest.skip("needs the 'llm' extra", allow_module_level=True)

PROMPT = [1, 50, 60, 70]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture
async def fresh() -> AsyncIterator[GenaiGenerator]:
    """A model for one test, with memory for 96 tokens."""
    options = msgspec.structs.replace(EXACT, kv_cache_mb=0)
    made = await start_generator(
        IR, name="fresh", options=msgspec.structs.replace(options, max_streams=1, context_tokens=96)
    )
    yield made
    await made.aclose()


@pytest.fixture
def many_files() -> Iterator[None]:
    """Open more files than select() supports."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (-1, resource.RLIM_INFINITY) and hard < 2000:
        pytest.skip("this system allows no 2000 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for one in descriptors:
        os.close(one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def until(condition: Callable[[], bool]) -> None:
    """Run the loop until the process has done its part."""
    async with asyncio.timeout(20):
        for _ in iter(condition, True):
            await asyncio.sleep(0)


def text_of(ids: Sequence[int]) -> str:
    tokenizer = Tokenizer.from_file(str(IR / "tokenizer.json"))
    return str(tokenizer.decode(list(ids)))


class TestAnswers:
    def test_pieces_come_one_by_one(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        """The process sends each token at once. How many the reader gets together depends on timing; the tokens are
        the same."""
        sent: list[int] = []
        put = generating._PendingOutput.put

        def seen(self: generating._PendingOutput, made: Produced) -> None:
            sent.append(len(made.ids))
            put(self, made)

        monkeypatch.setattr(generating._PendingOutput, "put", seen)
        once = model.answer(PROMPT, **GREEDY)
        assert sent == [1] * 24
        assert len(once) == 24
        assert model.answer(PROMPT, **GREEDY) == once

    def test_many_at_once_each_get_their_own(self, model: Model) -> None:
        """Sixteen requests in one batch get the same answers as each one alone."""
        prompts = [[1, 20 + number, 60] for number in range(16)]

        async def together() -> list[list[int]]:
            answers = await asyncio.gather(*(answer(model.generator, prompt, **GREEDY) for prompt in prompts))
            return [ids for ids, _ in answers]

        assert model.run(together()) == [model.answer(prompt, **GREEDY) for prompt in prompts]

    def test_several_choices_of_one_prompt(self, model: Model) -> None:
        """Parallel choices differ by their seeds."""

        async def choices() -> list[list[int]]:
            several = (answer(model.generator, PROMPT, max_tokens=12, temperature=1.5, seed=seed) for seed in range(4))
            return [ids for ids, _ in await asyncio.gather(*several)]

        assert len({tuple(ids) for ids in model.run(choices())}) == 4

    def test_seeds(self, model: Model) -> None:
        """The same seed gives the same answer; without a seed answers differ."""
        warm = {"max_tokens": 24, "temperature": 1.5, "ignore_eos": True}
        assert model.answer(PROMPT, seed=5, **warm) == model.answer(PROMPT, seed=5, **warm)
        assert len({tuple(model.answer(PROMPT, **warm)) for _ in range(4)}) == 4
        assert model.answer(PROMPT, seed=-1, **warm) == model.answer(PROMPT, seed=2**32 - 1, **warm)

    def test_the_likeliest_alone(self, model: Model) -> None:
        """top_k 1 and top_p 0 leave one token, at any temperature."""
        greedy = model.answer(PROMPT, **GREEDY)
        for narrow in ({"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-6}, {"min_p": 0.99}):
            assert model.answer(PROMPT, **(GREEDY | {"temperature": 2.0} | narrow)) == greedy

    def test_penalties_change_the_answer(self, model: Model) -> None:
        """A penalty reduces the repetitions of a greedy answer."""
        plain = model.answer(PROMPT, **(GREEDY | {"max_tokens": 100}))
        for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 1.8}):
            other = model.answer(PROMPT, **(GREEDY | {"max_tokens": 100} | penalty))
            assert len(set(other)) > len(set(plain))

    def test_unicode(self, model: Model) -> None:
        """Ids of any script are accepted, and the answer has ids of the vocabulary."""
        ids = Tokenizer.from_file(str(IR / "tokenizer.json")).encode("東京 नमस्ते 🦊").ids
        assert all(0 <= one < 448 for one in model.answer(ids, **GREEDY))

    def test_log_probabilities(self, model: Model) -> None:
        """Each token has its log probability, with its text or bytes."""
        ids, _ = model.run(answer(model.generator, PROMPT, **GREEDY))

        async def collect() -> list[Any]:
            stream = model.generator.generate(
                Prompt(text="", ids=tuple(PROMPT)), Sampling(**GREEDY, logprobs=0), context()
            )
            return [each async for piece in stream for each in piece.logprobs]

        logprobs = model.run(collect())
        assert len(logprobs) == len(ids)
        assert all(-20 < each.logprob <= 0 for each in logprobs)
        assert b"".join(each.data or each.token.encode() for each in logprobs).decode(errors="replace") == text_of(ids)


class TestEnds:
    def test_the_requested_length(self, model: Model) -> None:
        """An answer is cut at max_tokens, with that reason."""
        ids, last = model.run(answer(model.generator, PROMPT, **(GREEDY | {"max_tokens": 3})))
        assert (len(ids), last.finish_reason) == (3, "length")

    def test_a_stop_token_ends_it_and_is_not_part_of_it(self, model: Model) -> None:
        """A stop token counts as generated, and is part of the answer only with include_stop."""
        greedy = model.answer(PROMPT, **GREEDY)
        stop: dict[str, Any] = {"stop_token_ids": [greedy[5]], "temperature": 0.0, "max_tokens": 24}
        before = greedy[: greedy.index(greedy[5])]

        async def counted(**more: Any) -> tuple[list[int], int, str | None]:
            made: list[int] = []
            tokens, reason = 0, None
            stream = model.generator.generate(Prompt(text="", ids=tuple(PROMPT)), Sampling(**stop, **more), context())
            async for piece in stream:
                made += piece.ids
                tokens += piece.tokens or 0
                reason = piece.finish_reason
            return made, tokens, reason

        assert model.run(counted()) == (before, len(before) + 1, "stop")
        assert model.run(counted(include_stop=True)) == ([*before, greedy[5]], len(before) + 1, "stop")

    def test_not_before_the_least(self, model: Model) -> None:
        """min_tokens suppresses a stop token."""
        stop = model.answer(PROMPT, **GREEDY)[2]
        assert len(model.answer(PROMPT, temperature=0.0, max_tokens=24, stop_token_ids=[stop], min_tokens=9)) >= 9

    def test_the_model_ends_by_its_files(self, model: Model) -> None:
        """The tokens of generation_config.json end an answer, unless ignored."""
        guide = Guide(kind="choice", value='["yes"]')
        ids, last = model.run(answer(model.generator, PROMPT, guide=guide, max_tokens=20))
        assert (text_of(ids), last.finish_reason) == ("yes", "stop")


class TestGuides:
    def test_a_schema(self, model: Model) -> None:
        """The answer is JSON of that schema."""
        schema = {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "東京"]}, "hot": {"type": "boolean"}},
            "required": ["city", "hot"],
            "additionalProperties": False,
        }
        guide = Guide(kind="json_schema", value=json.dumps(schema))
        ended = 0
        for seed in range(12):  # a model with random weights tends to generate spaces forever, which the schema allows
            ids, last = model.run(
                answer(model.generator, PROMPT, guide=guide, max_tokens=150, temperature=2.0, seed=seed)
            )
            if last.finish_reason == "stop":
                ended += 1
                made = json.loads(text_of(ids))
                assert made["city"] in ("Paris", "東京")
                assert isinstance(made["hot"], bool)
        assert ended

    @pytest.mark.parametrize(
        ("guide", "pattern"),
        [
            (Guide(kind="regex", value="[0-9]{3}-[a-f]{2}"), "[0-9]{3}-[a-f]{2}"),
            (Guide(kind="grammar", value='root ::= "a" ("b" | "c")'), "ab|ac"),
            (Guide(kind="choice", value=json.dumps(["größe\n\x01ab"])), "größe\n\x01ab"),
            (Guide(kind="choice", value=json.dumps(['"x\\'])), r'"x\\'),
            (Guide(kind="json_schema", value='{"enum": ["größe"]}'), '"größe"'),
            (Guide(kind="json_object"), r"\{(.|\s)*"),
            (
                Guide(
                    kind="structural_tag",
                    value='{"type": "structural_tag", "format": {"type": "const_string", "value": "tag"}}',
                ),
                "tag",
            ),
        ],
    )
    def test_other_forms(self, model: Model, guide: Guide, pattern: str) -> None:
        """Expressions, grammars, choices with any character, and tags work."""
        assert re.fullmatch(pattern, text_of(model.answer(PROMPT, guide=guide, max_tokens=60)))

    def test_an_optional_guide(self, model: Model) -> None:
        """It is followed where it can be; one that is invalid or not compiled in time does not fail the answer."""
        free = model.answer(PROMPT, **GREEDY)
        good, bad, slow = (Guide(kind="regex", value=text, optional=True) for text in ("[0-9]{24}", "(", "[a-f]{30}"))
        assert re.fullmatch("[0-9]{24}", text_of(model.answer(PROMPT, guide=good, temperature=0.0, max_tokens=60)))
        assert model.answer(PROMPT, guide=bad, **GREEDY) == free
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(generating, "OPTIONAL_S", 0.0)
            assert model.answer(PROMPT, guide=slow, **GREEDY) == free
            patch.setattr(generating, "MAX_OPTIONAL_BYTES", -1)
            patch.setattr(generating, "OPTIONAL_S", 5.0)
            assert model.answer(PROMPT, guide=Guide(kind="regex", value="[a-f]{40}", optional=True), **GREEDY) == free
            assert text_of(model.answer(PROMPT, guide=good, temperature=0.0, max_tokens=60)).isdigit()

    @pytest.mark.parametrize(
        "guide",
        [
            Guide(kind="regex", value="[0-9"),
            Guide(kind="grammar", value='root ::= "a" | nowhere'),
            Guide(kind="json_schema", value='{"type": "nonsense"}'),
            Guide(kind="json_schema", value="{"),
            Guide(kind="structural_tag", value='{"x": 1}'),
        ],
    )
    def test_a_bad_form_hurts_nobody_else(self, model: Model, guide: Guide) -> None:
        """An invalid guide is rejected, and a parallel answer completes."""
        alone = model.answer(PROMPT, **GREEDY)

        async def beside() -> list[int]:
            other = asyncio.create_task(answer(model.generator, PROMPT, **GREEDY))
            await asyncio.sleep(0)
            with pytest.raises(InvalidValue, match=r"output format|JSON schema") as caught:
                await answer(model.generator, PROMPT, guide=guide)
            assert caught.value.param == "response_format"
            assert "/" not in caught.value.message.split(":")[1]
            return (await other)[0]

        assert model.run(beside()) == alone
        assert model.generator.ready()


class TestRefusals:
    @pytest.mark.parametrize("ids", [None, (), (1, 448), (-1,)])
    def test_prompts_that_are_none(self, model: Model, ids: tuple[int, ...] | None) -> None:
        """Empty prompts and ids outside the vocabulary are rejected before the model is called."""

        async def ask() -> None:
            async for _ in model.generator.generate(Prompt(text="x", ids=ids), Sampling(), context()):
                pass

        with pytest.raises(InvalidValue):
            model.run(ask())

    def test_adapters(self, model: Model) -> None:
        """Adapters are unsupported."""

        async def ask() -> None:
            prompt = Prompt(text="", ids=(1,))
            async for _ in model.generator.generate(prompt, Sampling(), context(), adapter="lora"):
                pass

        with pytest.raises(InvalidValue, match="adapters"):
            model.run(ask())

    @pytest.mark.parametrize("fields", [{"presence_penalty": 99.0}, {"repetition_penalty": -1.0}, {"min_p": 7.0}])
    def test_values_that_the_library_refuses(self, model: Model, fields: dict[str, Any]) -> None:
        """Invalid values are request errors, and the model keeps working."""
        with pytest.raises(InvalidValue):
            model.answer(PROMPT, **(GREEDY | {"temperature": 1.0} | fields))
        assert model.generator.ready()

    def test_the_deadline(self, model: Model) -> None:
        """A late answer ends with DeadlineExceeded."""

        async def ask() -> None:
            stream = model.generator.generate(Prompt(text="", ids=(1, 5)), Sampling(max_tokens=1900), context(0.001))
            async for _ in stream:
                pass

        with pytest.raises(DeadlineExceeded):
            model.run(ask())

    @pytest.mark.parametrize(
        "fields", [{"seed": 2**80}, {"stop_token_ids": [2**70]}, {"guide": Guide(kind="regex", value="\ud800")}]
    )
    def test_values_that_cannot_be_sent(self, model: Model, fields: dict[str, Any]) -> None:
        """Values that cannot be encoded are request errors, and leave no state."""
        with pytest.raises(InvalidValue, match="cannot be encoded"):
            model.answer(PROMPT, **(GREEDY | fields))
        assert model.generator._outputs == {}
        assert model.generator.ready()


class TestRoom:
    async def test_facts(self, fresh: GenaiGenerator) -> None:
        """The context is the model's, or what fits into memory."""
        assert fresh.facts.context_tokens == 96
        assert fresh.facts.details["kv_cache_tokens"] == 96
        assert fresh.facts.details["kv_cache_mb"] == 0.0
        assert fresh.facts.output_mode == "ids"
        assert isinstance(fresh, Breakable)
        typed: TextGenerator = fresh
        assert typed.ready()

    async def test_a_prompt_that_fits_nowhere(self, fresh: GenaiGenerator) -> None:
        """The error names the setting to change, and a shorter prompt is answered."""
        with pytest.raises(OutOfMemory, match="kv_cache_mb"):
            await answer(fresh, [5] * 96)
        assert len((await answer(fresh, [5] * 80, **(GREEDY | {"max_tokens": 500})))[0]) == 16

    async def test_more_than_fit_at_once(self, fresh: GenaiGenerator) -> None:
        """Requests beyond the cache wait, and all complete."""
        prompts = [[1, number, *[7] * 40] for number in range(10, 16)]
        alone = [(await answer(fresh, prompt, **GREEDY))[0] for prompt in prompts]
        together = await asyncio.gather(*(answer(fresh, prompt, **GREEDY) for prompt in prompts))
        assert [ids for ids, _ in together] == alone

    async def test_a_cancelled_answer_gives_its_room_back(self, fresh: GenaiGenerator) -> None:
        """The request that waited for memory is answered."""
        stream = fresh.generate(Prompt(text="", ids=(5,) * 10), Sampling(**(GREEDY | {"max_tokens": 80})), context())
        async with aclosing(stream):
            made = 0
            while made < 70:
                made += len((await anext(stream)).ids)
            waiting = asyncio.create_task(answer(fresh, [6] * 60, **GREEDY))
            await asyncio.sleep(0)
        assert len((await waiting)[0]) == 24

    @pytest.mark.parametrize("enabled", [True, False])
    async def test_prefixes(self, model: Model, enabled: bool) -> None:
        """Answers are the same with and without prefix caching, also for repeated prompts."""
        options = msgspec.structs.replace(EXACT, prefix_caching=enabled)
        made = await start_generator(IR, name="prefix", options=options)
        prompt = [1, *range(20, 120)]
        answers = [(await answer(made, prompt, **GREEDY))[0] for _ in range(3)]
        longer = (await answer(made, [*prompt, 9], **GREEDY))[0]
        await made.aclose()
        expected = await asyncio.to_thread(lambda: [model.answer(p, **GREEDY) for p in (prompt, [*prompt, 9])])
        assert answers == [expected[0]] * 3
        assert longer == expected[1]


class TestLife:
    async def test_the_loop_stays_free(self) -> None:
        """The event loop runs while a model loads and answers."""
        made = await start_generator(IR, name="free", options=EXACT)
        iterations, done = 0, asyncio.Event()

        async def turn() -> None:
            nonlocal iterations
            while not done.is_set():
                await asyncio.sleep(0)
                iterations += 1

        turning = asyncio.create_task(turn())
        await asyncio.gather(*(answer(made, [1, number], **GREEDY) for number in range(32)))
        done.set()
        await turning
        await made.aclose()
        assert iterations > 24, "one for each token that all of them were given at least"

    async def test_closing_in_the_middle(self, caplog: pytest.LogCaptureFixture) -> None:
        """Waiting requests get an error, the process ends, and closing again has no effect."""
        made = await start_generator(IR, name="closing", options=EXACT)
        stream = made.generate(Prompt(text="", ids=(1, 9)), Sampling(**(GREEDY | {"max_tokens": 1900})), context())
        await anext(stream)
        pid = made.pid
        closing = asyncio.create_task(made.aclose())
        with pytest.raises(TransportFailed, match="unloaded"):
            async for _ in stream:
                pass
        await closing
        await made.aclose()
        assert not made.ready()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(TransportFailed):
            await answer(made, PROMPT)
        assert caplog.messages == []

    async def test_a_process_that_dies(self) -> None:
        """All its requests fail, each callback is called once, and nothing waits forever."""
        made = await start_generator(IR, name="dying", options=EXACT)
        errors: list[ShoalError] = []
        made.when_broken(errors.append)
        stream = made.generate(Prompt(text="", ids=(1, 9)), Sampling(**(GREEDY | {"max_tokens": 1900})), context())
        await anext(stream)
        os.kill(made.pid, signal.SIGKILL)
        with pytest.raises(Crashed, match="SIGKILL"):
            async for _ in stream:
                pass
        with pytest.raises(Crashed):
            await answer(made, PROMPT)
        assert not made.ready()
        await made.aclose()
        assert [type(error) for error in errors] == [Crashed]

    async def test_a_process_that_died_before_the_first_request(self) -> None:
        """A later callback is called once, in the next turn of the loop."""
        made = await start_generator(IR, name="early", options=EXACT)
        os.kill(made.pid, signal.SIGKILL)
        await until(lambda: not made.ready())
        errors: list[ShoalError] = []
        made.when_broken(errors.append)
        assert errors == []
        await asyncio.sleep(0)
        assert [type(error) for error in errors] == [Crashed]
        await made.aclose()
        assert len(errors) == 1

    async def test_one_that_was_closed_is_not_broken(self) -> None:
        """Closing calls no callback."""
        made = await start_generator(IR, name="closed", options=EXACT)
        errors: list[ShoalError] = []
        made.when_broken(errors.append)
        await made.aclose()
        made.when_broken(errors.append)
        await asyncio.sleep(0)
        assert errors == []

    async def test_a_process_that_hangs_and_goes_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A hung process is out of service until it responds again, and then answers waiting requests."""
        made = await start_generator(IR, name="stopped", options=EXACT)
        monkeypatch.setattr(hang_watch, "LOOK_S", 0.01)
        monkeypatch.setattr(hang_watch, "GONE_AT", 10**6)
        os.kill(made.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(answer(made, PROMPT, **GREEDY))
        await until(lambda: not made.ready())
        with pytest.raises(TransportFailed, match="is not responding"):
            await answer(made, PROMPT)
        os.kill(made.pid, signal.SIGCONT)
        assert len((await waiting)[0]) == 24
        assert made.ready()
        await made.aclose()

    async def test_requests_that_were_given_up_count_as_well(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Requests with short deadlines do not hide a hang."""
        made = await start_generator(IR, name="stopped", options=EXACT)
        monkeypatch.setattr(hang_watch, "LOOK_S", 0.01)
        monkeypatch.setattr(hang_watch, "GONE_AT", 10**6)
        os.kill(made.pid, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded):
            await anext(made.generate(Prompt(text="", ids=(1,)), Sampling(), context(0.001)))
        await until(lambda: not made.ready())
        os.kill(made.pid, signal.SIGCONT)
        await until(made.ready)
        assert len((await answer(made, PROMPT, **GREEDY))[0]) == 24
        await made.aclose()

    async def test_a_process_that_hangs_for_good(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process that hangs for good is killed, its requests fail, and callbacks are called."""
        made = await start_generator(IR, name="stuck", options=EXACT)
        monkeypatch.setattr(hang_watch, "LOOK_S", 0.01)
        errors: list[ShoalError] = []
        made.when_broken(errors.append)
        os.kill(made.pid, signal.SIGSTOP)
        with pytest.raises(Crashed, match="did not answer for"):
            await answer(made, PROMPT)
        await made._receive_task
        assert made._worker.process.returncode == -signal.SIGKILL
        await made.aclose()
        assert [type(error) for error in errors] == [Crashed]

    async def test_every_step_is_a_sign_of_life(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A long prompt that takes many steps without output does not count as a hang."""
        made = await start_generator(IR, name="long", options=EXACT)
        states: list[bool] = []
        monkeypatch.setattr(made._watch, "record_message", lambda *, owes: states.append(owes))
        _, last = await answer(made, [5] * 1500, max_tokens=1, temperature=0.0)
        await made.aclose()
        assert last.finish_reason
        assert len(states) > 3

    async def test_what_is_not_understood(self, caplog: pytest.LogCaptureFixture) -> None:
        """A process that sends invalid messages is killed, with an error."""
        made = await start_generator(IR, name="babel", options=EXACT)
        made._worker._reader.feed_data(b"\x00\x00\x00\x01\xc1")
        with pytest.raises(ShoalError, match="an invalid message"):
            await answer(made, PROMPT, max_tokens=1900)
        await made.aclose()
        assert "cannot decode a message" in caplog.text


class TestOpening:
    async def test_a_gguf(self, model: Model) -> None:
        """The same weights in one file give the same answer, and the context capacity is known too."""
        options = msgspec.structs.replace(EXACT, stop_ids=(4,), vocab_size=448, cache_heads=((4, 8),) * 4)
        made = await start_generator(GGUF, name="gguf", options=options)
        ids = (await answer(made, PROMPT, **GREEDY))[0]
        details = made.facts.details
        await made.aclose()
        assert ids == await asyncio.to_thread(model.answer, PROMPT, **GREEDY)
        assert details["kv_cache_tokens"] == model.generator.facts.details["kv_cache_tokens"] == 8192
        assert details["kv_cache_mb"] == model.generator.facts.details["kv_cache_mb"] == 4.0

    async def test_many_open_files(self, many_files: None) -> None:
        """The process can use its socket whatever descriptor number the gateway has for it."""
        made = await start_generator(IR, name="many", options=EXACT)
        assert len((await answer(made, PROMPT, **GREEDY))[0]) == 24
        await made.aclose()

    async def test_broken_files_are_named(self, tmp_path: Path) -> None:
        """An unreadable graph is an error of the model and names the file."""
        shutil.copytree(IR, tmp_path / "broken")
        (tmp_path / "broken" / "openvino_model.xml").write_text("<net/>")
        with pytest.raises(ModelFileError, match=r"openvino_model\.xml") as caught:
            await start_generator(tmp_path / "broken", name="broken", options=EXACT)
        assert caught.value.file == "openvino_model.xml"

    async def test_too_much_memory(self) -> None:
        """A cache larger than the machine's memory is rejected, naming the setting to change."""
        with pytest.raises((OutOfMemory, Crashed)):
            await start_generator(IR, name="huge", options=msgspec.structs.replace(EXACT, kv_cache_mb=2**31))

    async def test_without_the_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The error names the extra before anything starts."""
        monkeypatch.setattr(generating, "find_spec", lambda name: None)
        with pytest.raises(MissingExtra, match="llm"):
            await start_generator(IR, name="none", options=GenaiOptions())
