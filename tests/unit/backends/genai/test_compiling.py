"""Guides that would hang or exhaust a process, while the model keeps answering."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import pytest

from shoal.backends.genai import compiling, start_generator
from shoal.backends.genai.compiling import GuideChecker
from shoal.backends.genai.messages import Verdict
from shoal.core.protocols import Prompt
from shoal.errors import Crashed, DeadlineExceeded, InvalidValue, OutOfMemory, Overloaded, TransportFailed
from shoal.types import Guide, Sampling
from tests.unit.backends.genai.conftest import EXACT, IR, LIMIT_S, Model, answer, context

if find_spec("openvino_genai") is None:
    pytest.skip("needs the 'llm' extra", allow_module_level=True)

PROMPT = [1, 50, 60, 70]
SLOW = "((.*){1,50}){1,50}"
"""A schema that passes the size check but takes seconds to compile."""
PATIENCE_S = 1.5
"""Time after which `impatient` ends such a trial."""
WIDTH = 448


def regex(text: str) -> Guide:
    return Guide(kind="regex", value=text, field="guided_regex")


@pytest.fixture
async def trials() -> AsyncIterator[GuideChecker]:
    """Trials without a model; `prepared` records the guides in order."""
    made = GuideChecker(IR, WIDTH, Prepared(), limit_s=LIMIT_S)
    yield made
    await made.aclose()


@contextmanager
def impatience() -> Iterator[None]:
    """Trials that begin in the block end after PATIENCE_S, as if their process did not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "GRACE_S", PATIENCE_S - LIMIT_S)
        yield


@pytest.fixture
def impatient() -> Iterator[None]:
    with impatience():
        yield


class Prepared(list[Guide]):
    async def __call__(self, guide: Guide) -> None:
        self.append(guide)


def has_exited(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def until(true: Callable[[], bool]) -> None:
    for _ in range(200_000):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


class TestBombs:
    @pytest.mark.usefixtures("impatient")
    @pytest.mark.parametrize(
        ("kind", "value"),
        [
            ("regex", "((a{1,1000}){1,1000}){1,1000}"),
            ("json_schema", {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}),
            ("json_schema", {"items": {"items": {"patternProperties": {"((a{1,999}){1,999}){1,999}": {}}}}}),
            ("grammar", 'root ::= (("a"{1,1000}){1,1000}){1,1000}'),
            ("grammar", 'root ::= a{1000}\na ::= b{1000}\nb ::= "x"{1000}'),
            ("json_schema", {"type": "string", "maxLength": 2_000_000_000}),
            ("json_schema", {"type": "array", "items": {"type": "string"}, "minItems": 10_000_000}),
            ("json_schema", '{"items":' * 20_000 + "{}" + "}" * 20_000),
            ("regex", "(" * 50_000),
            ("regex", SLOW),
            ("grammar", "root ::= root root root root {9999}{9999}"),
        ],
    )
    def test_refused_beside_an_answer(self, model: Model, kind: Any, value: Any) -> None:
        """The error names the client's field, and other requests are answered meanwhile."""
        text = value if isinstance(value, str) else json.dumps(value)
        guide = Guide(kind=kind, value=text, field="guided")

        async def beside() -> None:
            refused = asyncio.create_task(answer(model.generator, PROMPT, guide=guide, max_tokens=4))
            await asyncio.sleep(0)
            ids, _ = await answer(model.generator, PROMPT, max_tokens=4, ignore_eos=True)
            assert len(ids) == 4
            with pytest.raises(InvalidValue) as caught:
                await refused
            assert caught.value.param == "guided"

        model.run(beside())
        assert model.generator.ready()

    @pytest.mark.usefixtures("impatient")
    @pytest.mark.parametrize(
        ("kind", "value"),
        [
            ("regex", ".{1,100000}"),
            ("regex", "(.*){1,30}"),
            ("regex", "(a{1,100}){1,100}"),
            ("grammar", 'root ::= root "a" | "a"'),
            ("grammar", 'root ::= root root | "a" | ""'),
            ("grammar", "root ::= a\na ::= a"),
            ("json_schema", '{"type": "string", "maxLength": 65535}'),
            ("json_schema", '{"enum": ' + json.dumps([f"value {number}" for number in range(2000)]) + "}"),
        ],
    )
    def test_answered_or_refused(self, model: Model, kind: Any, value: str) -> None:
        """A large guide is either used or rejected."""
        with suppress(InvalidValue):
            model.answer(PROMPT, guide=Guide(kind=kind, value=value), max_tokens=4)
        assert model.generator.ready()

    async def test_memory(self, monkeypatch: pytest.MonkeyPatch, trials: GuideChecker) -> None:
        """A process that ends without its alarm counts as out of memory."""
        await trials.check(regex("a"))
        pid = trials.pid
        checking = asyncio.create_task(trials.check(regex(SLOW)))
        await until(lambda: any(running.has_started for running in trials._trials.values()))
        os.kill(pid or 0, signal.SIGABRT)
        with pytest.raises(InvalidValue, match="too much memory"):
            await checking
        assert has_exited(pid)

    @pytest.mark.usefixtures("impatient")
    async def test_slow_at_each_token(self, trials: GuideChecker) -> None:
        """A guide that compiles quickly but slows every step is rejected."""
        with pytest.raises(InvalidValue, match=r"per token|takes longer"):
            await trials.check(regex("((.{1,20}){1,20}){1,20}"))


class TestTrials:
    async def test_a_process_goes_on_after_another(self, trials: GuideChecker) -> None:
        """A process that ended for any reason is replaced, and the next guide passes."""
        await trials.check(regex("a"))
        first = trials.pid
        with impatience(), pytest.raises(InvalidValue, match="longer than 60 s") as caught:
            await trials.check(regex(SLOW))
        assert caught.value.param == "guided_regex"
        await trials.check(regex("b"))
        second = trials.pid
        assert has_exited(first)
        os.kill(second or 0, signal.SIGKILL)
        await until(lambda: trials._child is not None and trials._child.result().process.returncode is not None)
        await trials.check(regex("c"))
        assert trials.pid not in (first, second, None)

    async def test_what_is_known_is_not_tried_again(
        self, monkeypatch: pytest.MonkeyPatch, trials: GuideChecker
    ) -> None:
        """Results are cached, good or bad, until evicted; the field in the error is each request's own."""
        monkeypatch.setattr(compiling, "MAX_REMEMBERED", 2)
        prepared: Prepared = trials._prepare  # type: ignore[assignment]
        for _ in range(3):
            await trials.check(regex("a"))
            with pytest.raises(InvalidValue) as caught:
                await trials.check(Guide(kind="regex", value="[0-9", field="other"))
            assert caught.value.param == "other"
        assert prepared == [regex("a")]
        await trials.check(regex("b"))
        await trials.check(regex("c"))
        await trials.check(regex("a"))
        assert [guide.value for guide in prepared] == ["a", "b", "c", "a"]
        assert trials.size >= 0

    async def test_a_refusal_does_not_stand_for_ever(
        self, monkeypatch: pytest.MonkeyPatch, trials: GuideChecker
    ) -> None:
        """A rejection may be due to load, so the guide is tried again after some time."""
        monkeypatch.setattr(compiling, "REJECTION_TTL_S", -1.0)
        with pytest.raises(InvalidValue):
            await trials.check(regex("["))
        guides: list[Guide] = []

        async def passed(guide: Guide) -> Verdict:
            guides.append(guide)
            return Verdict()

        monkeypatch.setattr(trials, "_get_verdict", passed)
        await trials.check(regex("["))
        await trials.check(regex("["))
        assert len(guides) == 1

    async def test_one_trial_for_all_who_ask(self, trials: GuideChecker) -> None:
        """Concurrent requests with the same guide compile it once."""
        await asyncio.gather(*(trials.check(regex("a+")) for _ in range(100)))
        assert trials._prepare == [regex("a+")]  # type: ignore[comparison-overlap]

    async def test_one_that_leaves(self, monkeypatch: pytest.MonkeyPatch, trials: GuideChecker) -> None:
        """A cancelled request leaves the queue, and a running trial ends by itself."""
        monkeypatch.setattr(compiling, "MAX_WAITING", 2)
        await trials.check(regex("a"))
        checks = [asyncio.create_task(trials.check(regex(text))) for text in (SLOW, "queued")]
        with impatience():
            await until(lambda: any(running.has_started for running in trials._trials.values()))
        with pytest.raises(Overloaded, match="try again"):
            await trials.check(regex("third"))
        checks[1].cancel()
        await asyncio.gather(checks[1], return_exceptions=True)
        third = asyncio.create_task(trials.check(regex("third")))
        checks[0].cancel()
        await third
        assert not trials._trials
        assert [guide.value for guide in trials._prepare] == ["a", "third"]  # type: ignore[attr-defined]

    async def test_what_prepare_raises(self) -> None:
        """The request gets the error, and it is not cached."""
        tries = 0

        async def prepare(guide: Guide) -> None:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise OutOfMemory("full")

        trials = GuideChecker(IR, WIDTH, prepare)
        with pytest.raises(OutOfMemory):
            await trials.check(regex("a"))
        await trials.check(regex("a"))
        await trials.aclose()

    async def test_a_process_that_did_not_start_is_tried_again(
        self, monkeypatch: pytest.MonkeyPatch, trials: GuideChecker
    ) -> None:
        """The next guide starts a new process after any failure."""
        spawn = compiling._TrialProcess.spawn

        async def failing(*_: Any) -> Any:
            monkeypatch.setattr(compiling._TrialProcess, "spawn", spawn)
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(compiling._TrialProcess, "spawn", failing)
        with pytest.raises(RuntimeError):
            await trials.check(regex("a"))
        await trials.check(regex("a"))
        assert trials._prepare == [regex("a")]  # type: ignore[comparison-overlap]

    async def test_closing(self, trials: GuideChecker) -> None:
        """Waiting requests get the reason, the process ends, and no other one starts."""
        await trials.check(regex("a"))
        pid = trials.pid
        waiting = [asyncio.create_task(trials.check(regex(text))) for text in (SLOW, "queued")]
        await until(lambda: any(running.has_started for running in trials._trials.values()))
        await trials.aclose()
        for each in waiting:
            with pytest.raises(TransportFailed, match="unloaded"):
                await each
        assert has_exited(pid)
        with pytest.raises(TransportFailed):
            await trials.check(regex("b"))

    async def test_no_process(self, monkeypatch: pytest.MonkeyPatch, trials: GuideChecker) -> None:
        """A failed start is reported, and the next request tries again."""
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/nowhere")
            with pytest.raises(Crashed, match="cannot be started"):
                await trials.check(regex("a"))
            patch.setattr(sys, "executable", "/bin/false")
            with pytest.raises(Crashed, match="did not start"):
                await trials.check(regex("a"))
        await trials.check(regex("a"))

    async def test_worn(self, monkeypatch: pytest.MonkeyPatch, trials: GuideChecker) -> None:
        """A process that reports too much memory is replaced without an error."""
        await trials.check(regex("a"))
        pid, child = trials.pid, trials._child
        assert child is not None
        ask = child.result().try_guide

        async def worn(guide: Guide, patience_s: float) -> Any:
            return Verdict(refused=(await ask(guide, patience_s)).refused, needs_restart=True)

        monkeypatch.setattr(child.result(), "try_guide", worn)
        await trials.check(regex("b"))
        await trials.check(regex("c"))
        assert has_exited(pid)


class TestTheModel:
    def test_a_plain_schema_costs_little(self, model: Model) -> None:
        """A running process tries one schema after another."""

        async def tried(number: int) -> int | None:
            schema = {"type": "object", "properties": {f"p{number}": {"type": "string"}}, "required": [f"p{number}"]}
            await model.generator._trials.check(Guide(kind="json_schema", value=json.dumps(schema)))
            return model.generator._trials.pid

        assert len({model.run(tried(number)) for number in range(8)} - {None}) == 1

    def test_the_steps_go_on(self, model: Model) -> None:
        """Answers continue while the model's own process compiles a guide that passed."""
        guide = regex("(.*){1,31}")

        async def beside() -> bool:
            task = asyncio.create_task(model.generator._prepare(guide))
            await answer(model.generator, PROMPT, max_tokens=1)
            meanwhile = not task.done()
            await task
            return meanwhile

        assert model.run(beside())

    def test_the_deadline(self, model: Model) -> None:
        """A request waits for its guide until its deadline at most."""

        async def ask() -> None:
            stream = model.generator.generate(
                Prompt(text="", ids=tuple(PROMPT)), Sampling(guide=regex(SLOW.replace("50", "49"))), context(0.01)
            )
            await anext(stream)

        with impatience(), pytest.raises(DeadlineExceeded, match="output format"):
            model.run(ask())

    async def test_closing_ends_both_processes(self) -> None:
        """Closing ends the model's process and the compiling one."""
        made = await start_generator(IR, name="two", options=EXACT)
        assert (await answer(made, PROMPT, guide=regex("[ab]{3}")))[0]
        pids = made.pid, made._trials.pid
        checking = asyncio.create_task(answer(made, PROMPT, guide=regex(SLOW)))
        await until(lambda: any(running.has_started for running in made._trials._trials.values()))
        await made.aclose()
        with pytest.raises(TransportFailed):
            await checking
        assert all(has_exited(pid) for pid in pids)
