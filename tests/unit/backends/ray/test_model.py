"""A model over replicas on real sockets; only Ray Serve's answers are made up."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from shoal.backends.ray.cluster import Cluster, DeploymentId, DeploymentState, ReplicaAddress
from shoal.backends.ray.model import ABSENT_LOOKS, RayModel
from shoal.core.gateway import Gateway
from shoal.core.protocols import Observer
from shoal.core.recording import RECORD, TaskRecord
from shoal.errors import Crashed, ModelFailed, ModelNotReady, ShoalError, TransportFailed, Unavailable
from shoal.ray.replica import FarGateway
from shoal.types import Context, Embed, Generate
from shoal.workers.models import ModelServer
from tests.unit.core.runners import Embedder
from tests.unit.workers.kit import answer_nothing, build_gateway, build_model, until

DEPLOYMENT = DeploymentId("shoal", "m")
HEALTHY = DeploymentState("HEALTHY")
TOKEN = b"t" * 32
EMBED = Embed(model="m", inputs=["a"])


def within(seconds: float) -> Context:
    return Context(id="r", deadline=time.monotonic() + seconds)


class ReplicaEnd:
    """A replica: its server, and how to stop it."""

    def __init__(self, name: str, runner: Embedder, token: bytes = TOKEN) -> None:
        self.runner = runner
        self.gateway = build_gateway(build_model(runner))
        self.stop = asyncio.Event()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        host, port = listener.getsockname()
        self.address = ReplicaAddress(name, host, port, TOKEN)
        self.server = ModelServer(
            cast(Gateway, FarGateway(self.gateway)),
            answer_nothing,
            observer=Observer(),
            record_lag=lambda seconds: None,
            describe_remote=lambda model: b"",
            token=token,
        )
        self.done = asyncio.create_task(self.server.run(listener, self.stop, 30.0))

    async def kill(self) -> None:
        """End it as a process ends: its connections close."""
        self.done.cancel()
        await asyncio.gather(self.done, return_exceptions=True)


class ScriptedCluster(Cluster):
    """Answers with the replicas that it is told of; `wake` waits until there is one."""

    def __init__(self) -> None:
        self.replicas: list[ReplicaEnd] = []
        self.wakes = 0
        self.errors = 0
        self._came = asyncio.Event()

    def start_replica(self, name: str, runner: Embedder | None = None, token: bytes = TOKEN) -> ReplicaEnd:
        end = ReplicaEnd(name, runner or Embedder(("embed", "generate")), token)
        self.replicas.append(end)
        self._came.set()
        return end

    async def find_replicas(self, deployment: DeploymentId) -> list[ReplicaAddress]:
        return [each.address for each in self.replicas if not each.done.done()]

    async def wake(self, deployment: DeploymentId) -> ReplicaAddress:
        self.wakes += 1
        if self.errors:
            self.errors -= 1
            raise TransportFailed("the controller is restarting")
        await self._came.wait()
        alive = [each for each in self.replicas if not each.done.done() and not each.stop.is_set()]
        if not alive:
            self._came.clear()
            await self._came.wait()
            alive = self.replicas[-1:]
        return alive[-1].address


class Opened:
    def __init__(self) -> None:
        self.cluster = ScriptedCluster()
        self.notes: list[str] = []
        self.model = RayModel(self.cluster, DEPLOYMENT, "m", "session", self.notes.append)

    def see(self, running: int) -> None:
        """Let the model see what Serve says: so many replicas run."""
        self.model.note_state(DeploymentState("HEALTHY", "", {"RUNNING": running}))


@asynccontextmanager
async def opened(*runners: Embedder) -> AsyncIterator[Opened]:
    """A model with a replica for each runner, all connected."""
    given = Opened()
    try:
        for number, runner in enumerate(runners):
            given.cluster.start_replica(f"r{number}", runner)
        if runners:
            await given.model.open()
            given.see(len(runners))
            await until(lambda: len(given.model.replicas()) == len(runners))
            await until(lambda: all(each.state == "in_service" for each in given.model.replicas()))
        yield given
    finally:
        await given.model.aclose()
        for each in given.cluster.replicas:
            await each.kill()


def embedders(count: int) -> list[Embedder]:
    return [Embedder(("embed", "generate")) for _ in range(count)]


async def test_a_trace_goes_on_in_the_replica() -> None:
    """The replica continues the trace of the front's task, whose record names the replica and how each call ended."""
    runner = Embedder(("embed", "generate"))
    async with opened(runner) as given:
        record = TaskRecord("r", "m", "embed", 1, time.monotonic(), "00-1-2-01 k=v")
        RECORD.set(record)
        await given.model.run(EMBED, within(30))
        async with aclosing(given.model.stream(Generate(model="m", prompts=["a b"]), within(30))) as chunks:
            await anext(chunks)
        assert [ctx.trace for ctx in runner.contexts] == ["00-1-2-01 k=v"] * 2
        assert [(each.replica, each.error) for each in record.attempts] == [("r0", ""), ("r0", "cancelled")]
        RECORD.set(None)
        await given.model.run(EMBED, within(30))
        assert runner.contexts[-1].trace == ""


async def test_requests_spread_over_all_replicas() -> None:
    """Each of several requests in flight goes to the replica that has the fewest."""
    release = asyncio.Event()
    runners = [Embedder(release=release) for _ in range(3)]
    async with opened(*runners) as given:
        running = [asyncio.create_task(given.model.run(EMBED, within(30))) for _ in range(6)]
        await until(lambda: sum(each.begun for each in runners) == 6)
        assert [each.begun for each in runners] == [2, 2, 2]
        release.set()
        await asyncio.gather(*running)


async def test_a_lost_replica_costs_no_request() -> None:
    """Requests that a replica had when it was lost are answered by another one."""
    hanging = Embedder(release=asyncio.Event())
    async with opened(hanging, *embedders(1)) as given:
        running = [asyncio.create_task(given.model.run(EMBED, within(30))) for _ in range(8)]
        await until(lambda: hanging.begun > 0)
        await given.cluster.replicas[0].kill()
        assert len(await asyncio.gather(*running)) == 8


async def test_a_stream_that_has_begun_ends_with_the_replica() -> None:
    """Its client has read a part, so that it is not begun again."""
    hanging = Embedder(("generate",), release=asyncio.Event())
    async with opened(hanging) as given:
        chunks = given.model.stream(Generate(model="m", prompts=["a b"], stream=True), within(30))
        assert (await anext(chunks)).text == "a"
        await given.cluster.replicas[0].kill()
        with pytest.raises(Crashed):
            async for _ in chunks:
                pass


async def test_a_leaving_replica_answers_and_gets_nothing_new() -> None:
    """A replica that Serve stops ends once its requests are answered; new ones go to others."""
    release = asyncio.Event()
    async with opened(Embedder(release=release)) as given:
        old = given.cluster.replicas[0]
        running = asyncio.create_task(given.model.run(EMBED, within(30)))
        await until(lambda: old.runner.begun == 1)
        old.stop.set()
        await until(lambda: not any(each.is_usable for each in given.model._usable))
        new = given.cluster.start_replica("new")
        await given.model.run(EMBED, within(30))
        assert (old.runner.begun, new.runner.begun) == (1, 1)
        release.set()
        await running
        async with asyncio.timeout(30):
            await old.done


async def test_a_request_starts_a_replica() -> None:
    """Without replicas a call of the handle waits, and the requests of this time share it."""
    async with opened(*embedders(1)) as given:
        await given.cluster.replicas[0].kill()
        await until(lambda: not given.model.replicas())
        given.model.note_state(HEALTHY)
        assert given.model.ready()
        before = given.cluster.wakes
        running = [asyncio.create_task(given.model.run(EMBED, within(30))) for _ in range(4)]
        await until(lambda: given.cluster.wakes > before)
        assert given.cluster.wakes == before + 1
        given.cluster.start_replica("new")
        await asyncio.gather(*running)


async def test_a_failed_wake_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.backends.ray.model.RETRY_S", 0.001)
    async with opened() as given:
        given.cluster.errors = 2
        given.cluster.start_replica("r0")
        await given.model.open()
        assert given.cluster.wakes == 3
        assert given.model.facts.backend == "ray"


async def test_the_deadline_ends_the_wait_for_a_replica() -> None:
    """It is not the client's fault, and the error says what Serve says."""
    async with opened(*embedders(1)) as given:
        await given.cluster.replicas[0].kill()
        await until(lambda: not given.model.replicas())
        given.model.note_state(DeploymentState("UPSCALING", "", {"STARTING": 1}))
        with pytest.raises(ModelNotReady, match="upscaling: 1 starting"):
            await given.model.run(EMBED, within(0.02))


FAILED = DeploymentState("DEPLOY_FAILED", "no such model")


async def test_a_deployment_that_cannot_run_is_an_error_at_once() -> None:
    """For requests, and for a load of a model in an application of its own."""
    async with opened(*embedders(1)) as given:
        await given.cluster.replicas[0].kill()
        await until(lambda: not given.model.replicas())
        given.model.note_state(FAILED)
        assert not given.model.ready()
        with pytest.raises(ModelFailed, match="no such model"):
            await given.model.run(EMBED, within(30))
    async with opened() as given:
        given.model.deployment = DeploymentId("shoal.m", "m")
        given.model.note_state(FAILED)
        with pytest.raises(ModelFailed, match="no such model"):
            await given.model.open()


async def test_a_configured_deployment_is_waited_for() -> None:
    """A front that starts while Serve cannot run the model serves it once that is mended."""
    async with opened() as given:
        given.model.note_state(FAILED)
        opening = asyncio.create_task(given.model.open())
        await until(lambda: given.cluster.wakes > 0)
        assert not opening.done()
        given.cluster.start_replica("r0")
        await opening


async def test_the_only_replica_may_die() -> None:
    """Serve says that the deployment is unhealthy while it starts another one: requests wait for that."""
    async with opened(*embedders(1)) as given:
        await given.cluster.replicas[0].kill()
        await until(lambda: not given.model.replicas())
        given.model.note_state(DeploymentState("UNHEALTHY", "a health check failed", {"STARTING": 1}))
        running = asyncio.create_task(given.model.run(EMBED, within(30)))
        await until(lambda: given.cluster.wakes > 1)
        given.cluster.start_replica("r1")
        await running


async def test_a_late_front_learns_that_a_replica_leaves() -> None:
    """One that connects while the replica drains does not send it work."""
    async with opened(*embedders(1)) as given:
        end = given.cluster.replicas[0]
        release = asyncio.Event()
        end.runner.release = release
        running = asyncio.create_task(given.model.run(EMBED, within(30)))
        await until(lambda: end.runner.begun == 1)
        end.stop.set()
        await until(lambda: end.gateway.draining)
        async with opened() as late:
            late.model._connect(end.address)
            await until(
                lambda: any(each.is_leaving for each in late.model._replicas.values()) or not late.model._replicas
            )
            assert not late.model._usable or not late.model._usable[0].is_usable
        release.set()
        await running


async def test_a_deleted_deployment_is_reported_once() -> None:
    """A model that was loaded into an application of its own is broken then, to be loaded again."""
    broken: list[ShoalError] = []
    async with opened(*embedders(1)) as given:
        given.model.deployment = DeploymentId("shoal.m", "m")
        given.model.when_broken(broken.append)
        for _ in range(ABSENT_LOOKS + 2):
            given.model.note_state(None)
        assert [type(each) for each in broken] == [Unavailable]


async def test_replicas_come_and_go_as_serve_says() -> None:
    """The number that runs differs from what is known: all are asked, and a lost one is gone."""
    async with opened(*embedders(1)) as given:
        given.cluster.start_replica("r1")
        given.see(2)
        await until(lambda: len(given.model._usable) == 2)
        await given.cluster.replicas[0].kill()
        await until(lambda: [each.name for each in given.model.replicas()] == ["r1"])


async def test_vectors_of_two_models_never_mix() -> None:
    """While Serve replaces one model by another, the old replicas answer until none is left."""
    old, new = embedders(2)
    new.facts = replace(new.facts, space="other")
    async with opened(old) as given:
        second = given.cluster.start_replica("new", new)
        given.see(2)
        await until(lambda: len(given.model.replicas()) == 2)
        await until(lambda: all(each.facts is not None for each in given.model._replicas.values()))
        for _ in range(4):
            await given.model.run(EMBED, within(30))
        assert (old.begun, new.begun) == (4, 0)
        await given.cluster.replicas[0].kill()
        await given.model.run(EMBED, within(30))
        assert (given.model.facts.space, second.runner.begun) == ("other", 1)


async def test_a_wrong_token_gets_no_answer() -> None:
    """A process on the network that knows the port alone reaches no model."""
    async with opened() as given:
        end = given.cluster.start_replica("r0", token=b"another")
        given.model._connect(end.address)
        await until(lambda: not given.model._replicas)
        assert end.runner.begun == 0


async def test_a_stranger_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a first message, or with a long one, a connection is closed."""
    monkeypatch.setattr("shoal.workers.models.GREETING_S", 0.02)
    async with opened(*embedders(1)) as given:
        for sent in (b"", b"\0\x01\0\0", b"\xff" * 8):
            reader, writer = await asyncio.open_connection(*given.cluster.replicas[0].address[1:3])
            writer.write(sent)
            async with asyncio.timeout(30):
                assert await reader.read() == b""
            writer.close()


async def test_deadlines_travel_as_time_that_is_left() -> None:
    """The clocks of two machines are not the same."""
    seen: list[Context] = []

    class Watching(Embedder):
        async def run(self, task: Any, ctx: Context) -> Any:
            seen.append(ctx)
            return await super().run(task, ctx)

    async with opened(Watching()) as given:
        ctx = within(20)
        await given.model.run(EMBED, ctx)
        assert seen[0].deadline == pytest.approx(ctx.deadline, abs=10)
        await given.model.run(EMBED, Context(id="r", deadline=math.inf))
        assert seen[1].deadline == math.inf
