"""The contract of `core.protocols.Runner`, to be inherited by a test class for each kind of runner.

A subclass gives `opened`: a fresh runner on the running loop. Everything runs on a virtual clock.
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
    """A runner and what stands behind it, to look at: lanes, engines and talkers it was made of."""

    runner: Runner
    lane: Lane | None = None
    engines: list[FakeEngine] = field(default_factory=list)
    generator: FakeGenerator | None = None

    @property
    def running(self) -> int:
        return sum(engine.running for engine in self.engines)

    def idle(self) -> bool:
        """No work of anybody is left, and every permit is back."""
        if self.lane is not None and (self.lane.queue_size != (0, 0) or self.lane.admission.items):
            return False
        return not self.running


def embed(*inputs: TextItem) -> Embed:
    return Embed(model="m", inputs=list(inputs), normalize=False)


def generate(words: int) -> Generate:
    return Generate(model="m", prompts=[" ".join(map(str, range(words)))])


class RunnerContract:
    """What every runner promises."""

    def opened(self) -> RunnerSetup:
        raise NotImplementedError

    def test_facts_name_what_it_can(self, virtual: Run[None]) -> None:
        """At least one task, each once."""

        async def main() -> None:
            tasks = self.opened().runner.facts.tasks
            assert tasks
            assert len(set(tasks)) == len(tasks)

        virtual(main)

    def test_tasks_that_it_lacks_are_unsupported(self, virtual: Run[None]) -> None:
        """By the promised family, for `run` and for `stream`."""

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
        """`aclose` twice, also at the same time, is as good as once."""

        async def main() -> None:
            runner = self.opened().runner
            assert runner.ready()
            await asyncio.gather(runner.aclose(), runner.aclose())
            await runner.aclose()

        virtual(main)


class EmbedContract(RunnerContract):
    """What every runner that embeds promises."""

    def test_answers_once_and_in_order(self, virtual: Run[None]) -> None:
        """200 inputs of one request beside 50 requests of one: everybody gets the vectors of its own inputs."""

        async def main() -> None:
            opened = self.opened()
            many: list[TextItem] = [f"word{number} " * (1 + number % 20) for number in range(200)]
            requests = [many]
            requests.extend([f"single{number}"] for number in range(50))
            answers = await asyncio.gather(*(opened.runner.run(embed(*inputs), context()) for inputs in requests))
            for inputs, answer in zip(requests, answers, strict=True):
                assert isinstance(answer, Embedded)
                expected = np.stack([compute_vector(tokenize_item(item), 32) for item in inputs])
                assert np.array_equal(answer.vectors, expected)
                assert answer.tokens == [len(tokenize_item(item)) for item in inputs]
                assert answer.facts.batches >= 1
            await until(opened.idle)

        virtual(main)

    @pytest.mark.parametrize("moment", ["at once", "queued", "running"])
    def test_cancellation_drops_the_work(self, virtual: Run[None], moment: str) -> None:
        """In whatever phase the caller leaves: the work goes, permits come back, others are served."""

        async def main() -> None:
            opened = self.opened()
            calls = [
                asyncio.create_task(opened.runner.run(embed(*(f"{n} {m}" for m in range(40))), context()))
                for n in range(8)
            ]
            if moment == "queued":
                await asyncio.sleep(0)
            if moment == "running":
                await until(lambda: opened.running > 0)
            for call in calls[1:]:
                call.cancel()
            outcomes = await gathered(*calls)
            assert not isinstance(outcomes[0], BaseException)
            assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes[1:])
            await until(opened.idle)
            batches = sum(size for engine in opened.engines for size, _ in engine.batches)
            assert batches <= 40 if moment != "running" else batches < 8 * 40

        virtual(main)

    @pytest.mark.parametrize("trouble", ["poison", "nan", "bad ids", "deadline", "gone", "closed", "full"])
    def test_errors_are_of_the_promised_families(self, virtual: Run[None], trouble: str) -> None:
        """RequestError, CapacityError or BackendError, and afterwards nothing is left."""

        async def main() -> None:
            opened = self.opened()
            inputs: dict[str, list[TextItem]] = {"poison": ["poison-item"], "nan": ["nan-item"], "bad ids": [[-1]]}
            patience = 0.0001 if trouble == "deadline" else 30.0
            task = embed(*inputs.get(trouble, ["a b"] * (10 if trouble == "full" else 1)))
            if trouble == "full" and opened.lane is not None:
                opened.lane.admission.admit("others", "interactive", 20_000, 0)
            call = asyncio.create_task(opened.runner.run(task, context(patience)))
            if trouble in ("gone", "closed"):
                await until(lambda: opened.running > 0)
            if trouble == "gone":
                for engine in opened.engines:
                    engine.online = False
            if trouble == "closed":
                await opened.runner.aclose()
            outcome = (await gathered(call))[0]
            assert isinstance(outcome, PROMISED)
            assert outcome.message
            if trouble != "full":
                await until(opened.idle)

        virtual(main)

    def test_close_fails_what_is_pending(self, virtual: Run[None]) -> None:
        """Everybody who waits gets a retryable error; nobody hangs, and what comes later is refused."""

        async def main() -> None:
            opened = self.opened()
            calls = [asyncio.create_task(opened.runner.run(embed(str(number)), context())) for number in range(200)]
            await until(lambda: opened.running > 0)
            await opened.runner.aclose()
            outcomes = [*await gathered(*calls), *await gathered(opened.runner.run(embed("late"), context()))]
            assert all(isinstance(outcome, ShoalError) and outcome.retryable for outcome in outcomes)
            assert not opened.runner.ready()
            assert opened.idle()

        virtual(main)


class StreamContract(RunnerContract):
    """What every runner that generates promises. `generator` counts what was produced."""

    def stream(self, opened: RunnerSetup, words: int, seconds: float = 30.0) -> AsyncGenerator[Chunk, Any]:
        return opened.runner.stream(generate(words), context(seconds))

    def test_the_last_chunks_say_why_and_how_much(self, virtual: Run[None]) -> None:
        """Every word in order; then one finish reason, then the usage, which stands alone and last."""

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
            opened = self.opened()
            assert opened.generator is not None
            async with aclosing(self.stream(opened, 100)) as chunks:
                await asyncio.sleep(0.1)
                assert opened.generator.produced == 0
                for pulled in range(1, 30):
                    await anext(chunks)
                    await asyncio.sleep(0.5)
                    assert opened.generator.produced <= pulled + 2

        virtual(main)

    def test_closing_stops_the_work(self, virtual: Run[None]) -> None:
        """After `aclose` of the iterator nothing more is produced; so also when its reader is cancelled."""

        async def main() -> None:
            opened = self.opened()
            assert opened.generator is not None
            stream = self.stream(opened, 100)
            await anext(stream)
            await stream.aclose()
            assert opened.generator.closed == 1

            async def read() -> None:
                async with aclosing(self.stream(opened, 100)) as chunks:
                    async for _ in chunks:
                        pass

            reader = asyncio.create_task(read())
            await asyncio.sleep(0.035)
            reader.cancel()
            assert isinstance((await gathered(reader))[0], asyncio.CancelledError)
            assert opened.generator.closed == 2
            produced = opened.generator.produced
            await asyncio.sleep(5)
            assert opened.generator.produced == produced < 10

        virtual(main)

    def test_the_deadline_ends_a_stream(self, virtual: Run[None]) -> None:
        """With the promised family, after the chunks that came in time."""

        async def main() -> None:
            opened, seen = self.opened(), 0
            with pytest.raises(CapacityError):
                async for _ in self.stream(opened, 100, 0.055):
                    seen += 1
            assert 0 < seen < 10
            assert opened.generator is not None
            assert opened.generator.closed == 1

        virtual(main)


__all__ = ["EmbedContract", "RunnerSetup", "StreamContract"]
