"""Which server gets a request, and which servers are paused."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator

import pytest

from shoal.backends.base.http_answer import RequestNotSent
from shoal.backends.base.http_client import Client
from shoal.backends.openai import replicas as replicas_module
from shoal.backends.openai.replicas import LONGEST_PAUSE_S, Attempt, Replica, ServerPool, check_health
from shoal.backends.openai.runner import UpstreamOptions
from shoal.core.scheduling.ejection import MAX_FAILURES
from shoal.errors import DeadlineExceeded, InvalidValue, TransportFailed, Unavailable, UpstreamFailed, UpstreamRefused
from tests.fakes.openai_server import DONE, Exchange, FakeUpstream, Script, answer, stream
from tests.unit.backends.openai.kit import chunks_of, delta, make_task, passed_on, runner_of, streaming


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def busy(replica: Replica) -> Attempt:
    return Attempt(replica, since=0.0, first_s=60.0, deadline=math.inf)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def fleet(clock: Clock) -> AsyncIterator[ServerPool]:
    replicas = [Replica(Client(f"http://127.0.0.1:{port}"), "m") for port in (1, 2, 3)]
    yield ServerPool(replicas, clock)
    for replica in replicas:
        await replica.client.aclose()


class TestPicking:
    async def test_the_least_busy(self, fleet: ServerPool) -> None:
        one, two, three = fleet.replicas
        with busy(one), busy(two), busy(two):
            assert fleet.pick() is three
            assert fleet.pick([three]) is one
        assert [replica.in_flight for replica in fleet.replicas] == [0, 0, 0]

    async def test_equals_take_turns(self, fleet: ServerPool) -> None:
        one, two, three = fleet.replicas
        assert [fleet.pick() for _ in range(6)] == [one, two, three] * 2

    async def test_turns_are_kept_when_another_is_tried(self, fleet: ServerPool) -> None:
        """Two picks per request must not always select the same replica first."""
        one, two, three = fleet.replicas
        with busy(three):
            first = [fleet.pick(), fleet.pick([one])]
            assert first == [one, two]
            assert [fleet.pick(), fleet.pick([one])] == [one, two]
            assert fleet.pick([two]) is one
            assert fleet.pick() is two

    async def test_all_were_tried(self, fleet: ServerPool) -> None:
        with pytest.raises(Unavailable, match="no server of the model"):
            fleet.pick(fleet.replicas)

    async def test_an_unreachable_server_is_paused(self, fleet: ServerPool, clock: Clock) -> None:
        """An unreachable server pauses for one second, then two, up to five; after each pause one request at a time
        tries it."""
        one = fleet.replicas[0]
        for pause in (1.0, 2.0, 4.0, 5.0, 5.0):
            one.record_failure(clock.now, unreachable=True)
            assert one.doubtful
            assert not one.is_usable(clock.now + pause - 0.01)
            clock.now += pause
            assert one.is_usable(clock.now)
        with busy(one):
            assert not one.is_usable(clock.now)
            one.end_trial()
            assert one.is_usable(clock.now)
        one.record_success()
        with busy(one):
            assert one.is_usable(clock.now)
        one.record_failure(clock.now, unreachable=True)
        assert one.is_usable(clock.now + 1.0)

    async def test_requests_that_fail_together_are_one_failure(self, fleet: ServerPool, clock: Clock) -> None:
        one = fleet.replicas[0]
        for _ in range(10):
            one.record_failure(clock.now, unreachable=True)
        assert one.is_usable(clock.now + 1.0)

    async def test_failures_in_a_row(self, fleet: ServerPool, clock: Clock) -> None:
        one = fleet.replicas[0]
        for _ in range(MAX_FAILURES - 1):
            one.record_failure(clock.now, unreachable=False)
        assert one.is_usable(clock.now)
        one.record_success()
        for _ in range(MAX_FAILURES - 1):
            one.record_failure(clock.now, unreachable=False)
        assert one.is_usable(clock.now)
        one.record_failure(clock.now, unreachable=False)
        assert not one.is_usable(clock.now)

    async def test_one_that_asks_for_a_rest(self, fleet: ServerPool, clock: Clock) -> None:
        one = fleet.replicas[0]
        one.pause(clock.now, None)
        assert one.is_usable(clock.now)
        one.pause(clock.now, 3600.0)
        assert not one.is_usable(clock.now + LONGEST_PAUSE_S - 0.01)
        assert one.is_usable(clock.now + LONGEST_PAUSE_S)

    async def test_the_last_one_is_never_left_alone(self, fleet: ServerPool, clock: Clock) -> None:
        for replica in fleet.replicas:
            replica.record_failure(clock.now, unreachable=True)
        assert not fleet.has_alternative([])
        with busy(fleet.replicas[0]), busy(fleet.replicas[1]):
            assert fleet.pick() is fleet.replicas[2]


@pytest.fixture
async def replica(fleet: ServerPool) -> Replica:
    return fleet.replicas[0]


def ended(
    replica: Replica,
    error: BaseException | None,
    *,
    waited_s: float = 10.0,
    first_s: float = 60.0,
    left_s: float = 600.0,
    answered: bool = False,
) -> Replica:
    """Return the replica after one request with this outcome and this time left."""
    now = time.monotonic()
    attempt = Attempt(replica, since=now - waited_s, first_s=first_s, deadline=now + left_s)
    with contextlib.suppress(BaseException), attempt:
        if answered:
            attempt.record_first_piece()
        if error is not None:
            raise error
    assert replica.in_flight == 0
    return replica


class TestAttempts:
    """How a request ends, and what that means for the replica."""

    @pytest.mark.parametrize(
        ("error", "waited_s"),
        [(asyncio.CancelledError(), 60.0), (DeadlineExceeded("late"), 60.0), (asyncio.CancelledError(), 59.0)],
    )
    async def test_silence_needs_no_second_witness(
        self, replica: Replica, error: BaseException, waited_s: float
    ) -> None:
        ended(replica, error, waited_s=waited_s)
        assert (replica.failures, replica.doubtful) == (1, True)
        assert not replica.is_usable(time.monotonic())

    @pytest.mark.parametrize(
        ("error", "answered", "failures"),
        [
            (None, False, 0),
            (asyncio.CancelledError(), False, 0),
            (asyncio.CancelledError(), True, 0),
            (DeadlineExceeded("late"), False, 1),
            (DeadlineExceeded("late"), True, 0),
            (TransportFailed("broke"), True, 1),
            (UpstreamFailed("no answer"), True, 1),
            (UpstreamRefused("boom", status=500), True, 1),
            (UpstreamRefused("too long", status=400), True, 0),
            (InvalidValue("no such adapter"), False, 0),
        ],
    )
    async def test_others(self, replica: Replica, error: BaseException | None, answered: bool, failures: int) -> None:
        ended(replica, error, answered=answered)
        assert replica.failures == failures
        if isinstance(error, UpstreamRefused):
            assert error.server == replica.client.base  # which is hidden from clients
        assert replica.is_usable(time.monotonic())

    async def test_a_whole_answer_may_take_its_time(self, replica: Replica) -> None:
        """A cancellation comes from the client, unless the request's deadline has passed."""
        ended(replica, asyncio.CancelledError(), waited_s=500.0, first_s=math.inf)
        assert replica.failures == 0
        ended(replica, asyncio.CancelledError(), waited_s=500.0, first_s=math.inf, left_s=0.0)
        assert (replica.failures, replica.doubtful) == (1, False)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[FakeUpstream, FakeUpstream]]:
    async with FakeUpstream() as one, FakeUpstream() as two:
        yield one, two


class TestFailingOver:
    @pytest.mark.parametrize("status", [429, 502, 503])
    async def test_to_a_server_with_room(self, pair: tuple[FakeUpstream, FakeUpstream], status: int) -> None:
        runner = runner_of(*pair)
        pair[0].on("/chat/completions", answer({"error": "busy"}, status))
        pair[1].on("/chat/completions", answer({"choices": [1]}))
        for _ in range(4):
            assert passed_on(await chunks_of(runner, make_task())) == b'{"choices": [1]}'
        assert len(pair[0].requests) >= 1
        await runner.aclose()

    async def test_to_a_server_that_is_there(self, pair: tuple[FakeUpstream, FakeUpstream]) -> None:
        runner = runner_of(*pair)
        await pair[0].stop()
        pair[1].on("/chat/completions", answer({"choices": [1]}))
        for _ in range(4):
            assert passed_on(await chunks_of(runner, make_task())) == b'{"choices": [1]}'
        await runner.aclose()

    async def test_the_last_refusal_is_raised(self, pair: tuple[FakeUpstream, FakeUpstream]) -> None:
        runner = runner_of(*pair)
        for server in pair:
            server.on("/chat/completions", answer({"error": "busy"}, 503, retry_after="2"))
        with pytest.raises(UpstreamRefused) as caught:
            await chunks_of(runner, make_task())
        assert (caught.value.status, caught.value.retry_after) == (503, 2.0)
        assert [len(server.requests) for server in pair] == [1, 1]
        await runner.aclose()

    @pytest.mark.parametrize("status", [400, 404, 500])
    async def test_other_refusals_are_final(self, pair: tuple[FakeUpstream, FakeUpstream], status: int) -> None:
        runner = runner_of(*pair)
        for server in pair:
            server.on("/chat/completions", answer({"error": "no"}, status))
        with pytest.raises(UpstreamRefused) as caught:
            await chunks_of(runner, make_task())
        assert caught.value.server in [server.base for server in pair]
        assert sum(len(server.requests) for server in pair) == 1
        await runner.aclose()

    async def test_a_request_that_was_read_is_not_sent_twice(self, pair: tuple[FakeUpstream, FakeUpstream]) -> None:
        """A request that the server read is not retried, nor one whose stream broke off."""
        runner = runner_of(*pair)
        for script in (Exchange.cut, stream(delta(), after=Exchange.cut)):
            before = sum(len(server.requests) for server in pair)
            for server in pair:
                server.on("/chat/completions", script)
            with pytest.raises(TransportFailed):
                await chunks_of(runner, streaming())
            assert sum(len(server.requests) for server in pair) == before + 1
        assert sum(replica.failures for replica in runner._fleet.replicas) == 2
        await runner.aclose()

    @pytest.mark.parametrize(("first_token_timeout_s", "failures"), [(0.0, 1), (60.0, 0)])
    @pytest.mark.parametrize("script", [Exchange.left, stream(b": ping\n\n", after=Exchange.left)])
    async def test_a_silent_server_loses_its_share(
        self,
        pair: tuple[FakeUpstream, FakeUpstream],
        script: Script,
        first_token_timeout_s: float,
        failures: int,
    ) -> None:
        """A server is paused if a wait exceeds the first-token timeout; a client that left earlier is no failure."""
        runner = runner_of(*pair, options=UpstreamOptions(first_token_timeout_s=first_token_timeout_s))
        hung, well = runner._fleet.replicas
        pair[0].on("/chat/completions", script)
        pair[1].on("/chat/completions", stream(delta(finish="stop"), DONE))
        reading = asyncio.create_task(chunks_of(runner, streaming()))
        await pair[0].request()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert hung.failures == failures
        for _ in range(6):
            if failures:
                assert passed_on(await chunks_of(runner, streaming())) == delta(model="mine", finish="stop") + DONE
        assert (hung.is_usable(time.monotonic()), well.failures) == (not failures, 0)
        await runner.aclose()

    async def test_streams_are_spread(self, pair: tuple[FakeUpstream, FakeUpstream]) -> None:
        runner = runner_of(*pair)
        for server in pair:
            server.on("/chat/completions", Exchange.left)
        reading = [asyncio.create_task(chunks_of(runner, streaming())) for _ in range(6)]
        for server in pair:
            await server.request(3)
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await runner.aclose()


async def until(fleet: ServerPool, ready: bool) -> None:
    async with asyncio.timeout(30):
        while fleet.ready() is not ready:  # noqa: ASYNC110 - the watch tells nobody
            await asyncio.sleep(0.001)


class TestWatching:
    @pytest.fixture(autouse=True)
    def fast_polling(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replicas_module, "LOOK_S", 0.001)
        monkeypatch.setattr(replicas_module, "LOOK_AGAIN_S", 0.001)

    async def test_a_server_that_goes_and_comes_back(self) -> None:
        async with FakeUpstream() as server:
            runner = runner_of(server)
            fleet = runner._fleet
            fleet.start()
            assert runner.ready()
            await server.stop()
            await until(fleet, ready=False)
            fleet.replicas[0].record_failure(1e9, unreachable=True)
            await server.start()
            await until(fleet, ready=True)
            assert fleet.replicas[0].ejected_until == 0.0
            await runner.aclose()

    async def test_a_server_that_a_request_finds_unreachable_is_checked_at_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server that a request finds unreachable is checked at once, not at its next interval."""
        monkeypatch.setattr(replicas_module, "LOOK_S", 3600.0)
        async with FakeUpstream() as server:
            runner = runner_of(server)
            fleet = runner._fleet
            fleet.start()
            await server.stop()
            fleet.replicas[0].record_failure(1e9, unreachable=True)
            await until(fleet, ready=False)
            await runner.aclose()

    async def test_a_late_answer_is_forgiven_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A server that loads a model, or computes on its event loop, may answer late."""
        ready_at_checks: list[bool] = []
        is_late = True

        async def check(client: Client) -> None:
            ready_at_checks.append(pool.ready())
            if is_late:
                raise DeadlineExceeded("it did not answer in time")

        monkeypatch.setattr(replicas_module, "check_health", check)
        async with FakeUpstream() as server:
            runner = runner_of(server)
            pool = runner._fleet
            pool.start()
            await until(pool, ready=False)
            assert ready_at_checks[:3] == [True, True, True]
            is_late = False
            await until(pool, ready=True)
            await runner.aclose()

    async def test_a_health_check_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replicas_module, "LOOK_TIMEOUT_S", 0.2)
        async with FakeUpstream() as server:
            server.on("/models", Exchange.left)
            client = Client(server.base)
            with pytest.raises(DeadlineExceeded):
                await check_health(client)
            await client.aclose()

    async def test_a_bug_does_not_end_the_watch(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with FakeUpstream() as server:
            runner = runner_of(server)
            await server.stop()
            looks = 0

            async def fails(client: Client) -> None:
                nonlocal looks
                looks += 1
                if looks < 3:
                    raise ValueError("bug")
                await check_health(client)

            monkeypatch.setattr(replicas_module, "check_health", fails)
            runner._fleet.start()
            await until(runner._fleet, ready=False)
            assert looks >= 3
            assert "unexpectedly" in caplog.text
            await runner.aclose()

    async def test_a_look_costs_no_token(self) -> None:
        async with FakeUpstream() as server:
            client = Client(server.base)
            await check_health(client)
            assert [(one.method, one.path) for one in server.requests] == [("GET", "/v1/models")]
            server.on("/models", answer(b"", 503))
            with pytest.raises(UpstreamFailed, match="status 503"):
                await check_health(client)
            for status in (401, 404, 501):
                server.on("/models", answer(b"", status))
                await check_health(client)
            await server.stop()
            with pytest.raises(RequestNotSent):
                await check_health(client)
            await client.aclose()
