"""The contract of `Runner`, on every runner that Shoal ships."""

from __future__ import annotations

from shoal.backends.fake.model import FakeGenerator, FakeScript
from shoal.core.lane_runner import LaneRunner
from shoal.core.protocols import ModelFacts
from shoal.core.routing import TaskRouter
from tests.contract.runners.contract import EmbedContract, RunnerSetup, StreamContract
from tests.unit.core.lanes import engine, make_lane
from tests.unit.core.talks import make_runner

FACTS = ModelFacts(source="fake", backend="fake", tasks=("embed",))
UNLIKE = (
    FakeScript(delay_ms=1, token_us=50, slots=2, max_batch_size=4),
    FakeScript(delay_ms=5, token_us=500, max_batch_size=16, memory_tokens=300),
    FakeScript(delay_ms=2, token_us=100, padded=0, max_batch_size=8),
)
TALK = FakeScript(token_ms=10)


def batched(*scripts: FakeScript) -> tuple[LaneRunner, RunnerSetup]:
    lane = make_lane(*scripts)
    runner = LaneRunner(lane, FACTS)
    return runner, RunnerSetup(runner, lane, [engine(lane, number) for number in range(len(scripts))])


class TestBatchedOnOneReplica(EmbedContract):
    def opened(self) -> RunnerSetup:
        return batched(FakeScript(delay_ms=5))[1]


class TestBatchedOnUnlikeReplicas(EmbedContract):
    def opened(self) -> RunnerSetup:
        return batched(*UNLIKE)[1]


class TestByTask(EmbedContract, StreamContract):
    def opened(self) -> RunnerSetup:
        runner, opened = batched(*UNLIKE)
        generator = FakeGenerator(TALK)
        return RunnerSetup(TaskRouter([runner, make_runner(generator)]), opened.lane, opened.engines, generator)


class TestGeneration(StreamContract):
    def opened(self) -> RunnerSetup:
        generator = FakeGenerator(TALK)
        return RunnerSetup(make_runner(generator), generator=generator)
