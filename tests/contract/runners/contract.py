"""The contract of `core.protocols.Runner`: a test class for each kind of runner inherits it.

A subclass provides `opened`: a fresh runner on the running loop. Everything runs on a virtual clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from shoal.backends.fake.model import FakeEngine, FakeGenerator, compute_vector, tokenize_item
from shoal.core.protocols import Runner
from shoal.core.scheduling.lane import Lane
from shoal.errors import BackendError, CapacityError, RequestError, ShoalError
from shoal.types import Chunk, Embed, Embedded, Generate, TextItem, Usage
from tests.unit.core.conftest import Run, gathered, until
from tests.unit.core.lanes import context

PROMISED = (RequestError, CapacityError, BackendError)


@dataclass(slots=True)
class RunnerSetup:
    """A runner and its parts for inspection: lanes, engines and talkers."""

    runner: Runner
    lane: Lane | None = None
    engines: list[FakeEngine] = field(default_factory=list)
    generator: FakeGenerator | None = None

    @property
    def running(self) -> int:
        return sum(engine.running for engine in self.engines)

    def idle(self) -> bool:
        """No work is left, and every permit is released."""
        if self.lane is not None and (self.lane.queue_size != (0, 0) or self.lane.admission.items):
            return False
        return not self.running


def embed(*inputs: TextItem) -> Embed:
    return Embed(model="m", inputs=list(inputs), normalize=False)


def generate(words: int) -> Generate:
    return Generate(model="m", prompts=[" ".join(map(str, range(words)))])


class RunnerContract:
    """The contract of every runner."""

    def opened(self) -> RunnerSetup:
        raise NotImplementedError

    def test_facts_list_each_task_once(self, virtual: Run[None]) -> None:
        """There is at least one."""

        async def main() -> None:
            tasks = self.opened().runner.facts.tasks
            assert tasks
            assert len(set(tasks)) == len(tasks)

        virtual(main)

    def test_tasks_that_it_lacks_are_unsupported(self, virtual: Run[None]) -> None:
        """`run` and `stream` raise an error of the promised family."""

        async def main() -> None:
            runner = self.opened().runner
            if "embed" not in runner.facts.tasks:
                with pytest.raises(RequestError):
                    await runner.run(embed("x"), context())
            if "generate" not in runner.facts.tasks:
                with pytest.raises(RequestError):
                    await anext(runner.stream(generate(1), context()))

        virtual(main)

    def test_ready_until_closed_and_closing_may_be_repeated(self, virtual: Run[None]) -> None:
        """Repeated or concurrent `aclose` has the same effect as one."""

        async def main() -> None:
            runner = self.opened().runner
            assert runner.ready()
            await asyncio.gather(runner.aclose(), runner.aclose())
            await runner.aclose()

        virtual(main)


class EmbedContract(RunnerContract):
    """The contract of every runner that embeds."""

    def test_answers_once_and_in_order(self, virtual: Run[None]) -> None:
        """200 inputs of one request beside 50 requests of one: each gets the vectors of its own inputs."""

        async def main() -> None:
            setup = self.opened()
            many: list[TextItem] = [f"word{number} " * (1 + number % 20) for number in range(200)]
            requests = [many]
            requests.extend([f"single{number}"] for number in range(50))
            answers = await asyncio.gather(*(setup.runner.run(embed(*inputs), context()) for inputs in requests))
            for inputs, answer in zip(requests, answers, strict=True):
                assert isinstance(answer, Embedded)
                expected = np.stack([compute_vector(tokenize_item(item), 32) for item in inputs])
                assert np.array_equal(answer.vectors, expected)
                assert answer.tokens == [len(tokenize_item(item)) for item in inputs]
                assert answer.facts.batches >= 1
            await until(setup.idle)

        virtual(main)

    @pytest.mark.parametrize("moment", ["at once", "queued", "running"])
    def test_cancellation_drops_the_work(self, virtual: Run[None], moment: str) -> None:
        """In every phase: the work is dropped, permits are released, others are served."""

        async def main() -> None:
            setup = self.opened()
            calls = [
                asyncio.create_task(setup.runner.run(embed(*(f"{n} {m}" for m in range(40))), context()))
                for n in range(8)
            ]
            if moment == "queued":
                await asyncio.sleep(0)
            if moment == "running":
                await until(lambda: setup.running > 0)
            for call in calls[1:]:
                call.cancel()
            outcomes = await gathered(*calls)
            assert not isinstance(outcomes[0], BaseException)
            assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes[1:])
            await until(setup.idle)
            batches = sum(size for engine in setup.engines for size, _ in engine.batches)
            assert batches <= 40 if moment != "running" else batches < 8 * 40

        virtual(main)

    @pytest.mark.parametrize("trouble", ["poison", "nan", "bad ids", "deadline", "gone", "closed", "full"])
    def test_errors_are_of_the_promised_families(self, virtual: Run[None], trouble: str) -> None:
        """RequestError, CapacityError or BackendError, and afterwards no work is left."""

        async def main() -> None:
            setup = self.opened()
            inputs: dict[str, list[TextItem]] = {"poison": ["poison-item"], "nan": ["nan-item"], "bad ids": [[-1]]}
            patience = 0.0001 if trouble == "deadline" else 30.0
            task = embed(*inputs.get(trouble, ["a b"] * (10 if trouble == "full" else 1)))
            if trouble == "full" and setup.lane is not None:
                setup.lane.admission.admit("others", "interactive", 20_000, 0)
            call = asyncio.create_task(setup.runner.run(task, context(patience)))
            if trouble in ("gone", "closed"):
                await until(lambda: setup.running > 0)
            if trouble == "gone":
                for engine in setup.engines:
                    engine.online = False
            if trouble == "closed":
                await setup.runner.aclose()
            outcome = (await gathered(call))[0]
            assert isinstance(outcome, PROMISED)
            assert outcome.message
            if trouble != "full":
                await until(setup.idle)

        virtual(main)

    def test_close_fails_pending_requests(self, virtual: Run[None]) -> None:
        """Pending requests get a retryable error, none hangs, and later ones are rejected."""

        async def main() -> None:
            setup = self.opened()
            calls = [asyncio.create_task(setup.runner.run(embed(str(number)), context())) for number in range(200)]
            await until(lambda: setup.running > 0)
            await setup.runner.aclose()
            outcomes = [*await gathered(*calls), *await gathered(setup.runner.run(embed("late"), context()))]
            assert all(isinstance(outcome, ShoalError) and outcome.retryable for outcome in outcomes)
            assert not setup.runner.ready()
            assert setup.idle()

        virtual(main)


class StreamContract(RunnerContract):
    """The contract of every runner that generates. `generator` counts the words that it produced."""

    def stream(self, opened: RunnerSetup, words: int, seconds: float = 30.0) -> AsyncGenerator[Chunk, Any]:
        return opened.runner.stream(generate(words), context(seconds))

    def test_a_stream_ends_with_reason_and_usage(self, virtual: Run[None]) -> None:
        """Every word in order; then one finish reason, then the usage, alone in the last chunk."""

        async def main() -> None:
            *words, end, usage = [chunk async for chunk in self.stream(self.opened(), 5)]
            assert "".join(chunk.text for chunk in words) == "0 1 2 3 4"
            assert {chunk.finish_reason for chunk in words} == {None}
            assert (end.finish_reason, end.usage) == ("stop", None)
            assert usage == Chunk(usage=Usage(prompt_tokens=5, completion_tokens=5))

        virtual(main)

    def test_the_reader_sets_the_pace(self, virtual: Run[None]) -> None:
        """Nothing is produced before the first pull, and never far ahead of a slow reader."""

        async def main() -> None:
            setup = self.opened()
            assert setup.generator is not None
            async with aclosing(self.stream(setup, 100)) as chunks:
                await asyncio.sleep(0.1)
                assert setup.generator.produced == 0
                for pulled in range(1, 30):
                    await anext(chunks)
                    await asyncio.sleep(0.5)
                    assert setup.generator.produced <= pulled + 2

        virtual(main)

    def test_closing_stops_the_work(self, virtual: Run[None]) -> None:
        """Nothing more is produced after `aclose` of the iterator, or after its reader is cancelled."""

        async def main() -> None:
            setup = self.opened()
            assert setup.generator is not None
            stream = self.stream(setup, 100)
            await anext(stream)
            await stream.aclose()
            assert setup.generator.closed == 1

            async def read() -> None:
                async with aclosing(self.stream(setup, 100)) as chunks:
                    async for _ in chunks:
                        pass

            reader = asyncio.create_task(read())
            await asyncio.sleep(0.035)
            reader.cancel()
            assert isinstance((await gathered(reader))[0], asyncio.CancelledError)
            assert setup.generator.closed == 2
            produced = setup.generator.produced
            await asyncio.sleep(5)
            assert setup.generator.produced == produced < 10

        virtual(main)

    def test_the_deadline_ends_a_stream(self, virtual: Run[None]) -> None:
        """With an error of the promised family, after the chunks that came in time."""

        async def main() -> None:
            setup, chunks = self.opened(), 0
            with pytest.raises(CapacityError):
                async for _ in self.stream(setup, 100, 0.055):
                    chunks += 1
            assert 0 < chunks < 10
            assert setup.generator is not None
            assert setup.generator.closed == 1

        virtual(main)


__all__ = ["EmbedContract", "RunnerSetup", "StreamContract"]
