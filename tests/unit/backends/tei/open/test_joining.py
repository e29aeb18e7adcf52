"""Users who share calls of a server: batches, permits, failures, and replicas."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from shoal.errors import (
    DeadlineExceeded,
    EngineFailed,
    InputRejected,
    NotFinite,
    Overloaded,
    ShoalError,
)
from shoal.types import Embed, Embedded
from tests.fakes.tei import FakeTei
from tests.fakes.tei_model import Script, dense_of
from tests.unit.backends.tei.open.kit import Open, calls_after_probe, embed, soon, until


class TestJoining:
    async def test_users_share_calls(self, server: FakeTei, opened: Open) -> None:
        runner = await opened(server)
        server.gate.clear()
        first = [asyncio.create_task(embed(runner, f"first {at}", client=str(at))) for at in range(2)]
        await server.call(2)
        rest = [asyncio.create_task(embed(runner, f"text {at}", client=str(at))) for at in range(80)]
        await asyncio.sleep(0)
        server.gate.set()
        answers = await asyncio.gather(*first, *rest)
        for at, answer in enumerate(answers[2:]):
            assert np.array_equal(answer.vectors[0], dense_of(f"text {at}"))
        sizes = [len(call.inputs) for call in calls_after_probe(server)]
        assert sum(sizes) == 82
        assert max(sizes) == 32
        assert len(sizes) <= 6

    async def test_only_equal_options_share_a_call(self, server: FakeTei, opened: Open) -> None:
        runner = await opened(server)
        options: list[dict[str, Any]] = [
            {},
            {"normalize": False},
            {"dimensions": 4},
            {"truncate": False},
            {"truncation_direction": "left"},
        ]
        answers = await asyncio.gather(*(embed(runner, f"text {at}", **each) for each in options * 3 for at in (0, 1)))
        for each, answer in zip([each for each in options * 3 for _ in (0, 1)], answers, strict=True):
            assert answer.vectors.shape[1] == each.get("dimensions", 16)
        sent = [tuple(sorted(call.options.items())) for call in calls_after_probe(server)]
        assert len(set(sent)) == len(options)

    async def test_a_large_request_is_split(self, opened: Open) -> None:
        """No request is refused for its size, and the order is kept."""
        async with FakeTei(Script(max_client_batch_size=8)) as server:
            runner = await opened(server)
            texts = [f"text {at}" for at in range(100)]
            answer = await embed(runner, *texts)
            assert np.array_equal(answer.vectors, np.stack([dense_of(text) for text in texts]))
            assert max(len(call.inputs) for call in server.calls) == 8

    async def test_permits_are_never_exceeded(self, opened: Open) -> None:
        """A server with 10 permits refuses no call, although it accepts 32 inputs per call."""
        async with FakeTei(Script(max_concurrent_requests=10)) as server:
            runner = await opened(server)
            server.gate.clear()
            tasks = [asyncio.create_task(embed(runner, *(f"text {at} {n}" for n in range(20)))) for at in range(5)]
            await until(lambda: server.in_flight == 2)
            server.gate.set()
            await asyncio.gather(*tasks)
            assert {call.status for call in server.calls} == {200}
            assert (server.most_in_flight, server.most_permits) == (2, 10)

    async def test_calls_in_flight_are_a_setting(self, opened: Open) -> None:
        async with FakeTei() as server:
            runner = await opened(server, settings={"streams": 4})
            server.gate.clear()
            tasks = [asyncio.create_task(embed(runner, f"t{at}")) for at in range(6)]
            await server.call(2)
            for at in range(40):
                tasks.append(asyncio.create_task(embed(runner, f"u{at}")))
                await asyncio.sleep(0)
            await until(lambda: server.in_flight == 4)
            server.gate.set()
            await asyncio.gather(*tasks)
            assert server.most_in_flight == 4

    async def test_somebody_elses_permits_are_waited_for(self, server: FakeTei, opened: Open) -> None:
        """The batch is queued again and resent; no client gets a 429."""
        runner = await opened(server)
        server.change(max_concurrent_requests=0)
        task = asyncio.create_task(embed(runner, "a"))
        await server.call(2)
        server.change(max_concurrent_requests=512)
        assert np.array_equal((await task).vectors[0], dense_of("a"))

    async def test_a_queue_that_is_full_refuses(self, server: FakeTei, opened: Open) -> None:
        """The queue before a slow server is bounded."""
        runner = await opened(server)
        server.gate.clear()
        tasks = [asyncio.create_task(embed(runner, f"text {at}")) for at in range(5000)]
        await asyncio.sleep(0)
        await until(lambda: any(task.done() for task in tasks))
        server.gate.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [one for one in found if isinstance(one, BaseException)]
        assert refused
        assert all(isinstance(one, Overloaded) for one in refused)


class TestFailures:
    @pytest.mark.parametrize("era", ["1.8", "1.9"])
    @pytest.mark.parametrize(
        ("bad", "kind"),
        [("poison-item", EngineFailed), ("", InputRejected), ("w " * 600, InputRejected), ("nan-item", NotFinite)],
    )
    async def test_one_bad_text_fails_alone(self, opened: Open, era: str, bad: str, kind: type[ShoalError]) -> None:
        async with FakeTei(Script(era=era)) as server:
            runner = await opened(server)
            texts = [*(f"text {at}" for at in range(15)), bad, *(f"more {at}" for at in range(16))]
            found = await asyncio.gather(
                *(embed(runner, text, truncate=False) for text in texts), return_exceptions=True
            )
            for text, one in zip(texts, found, strict=True):
                if text == bad:
                    assert isinstance(one, kind)
                else:
                    assert isinstance(one, Embedded)
                    assert np.array_equal(one.vectors[0], dense_of(text))
            assert len(calls_after_probe(server)) <= 2 + 2 * 5 + 2

    @pytest.mark.parametrize("misbehaves", ["short", "empty", "html"])
    async def test_an_answer_of_the_wrong_length_is_never_an_empty_row(
        self, server: FakeTei, opened: Open, misbehaves: str
    ) -> None:
        runner = await opened(server)
        server.change(misbehaves=misbehaves)
        with pytest.raises(EngineFailed):
            await embed(runner, "a", "b")

    async def test_a_caller_who_leaves_costs_nothing_more(self, server: FakeTei, opened: Open) -> None:
        runner = await opened(server)
        server.gate.clear()
        tasks = [asyncio.create_task(embed(runner, f"text {at}")) for at in range(2)]
        await server.call(2)
        queued = asyncio.create_task(embed(runner, "never sent"))
        for task in (*tasks, queued):
            task.cancel()
        await asyncio.gather(*tasks, queued, return_exceptions=True)
        await until(lambda: not server.in_flight)
        assert all(call.aborted for call in calls_after_probe(server))
        server.gate.set()
        await embed(runner, "after")
        assert not any("never sent" in call.inputs for call in server.calls)

    async def test_the_callers_deadline_is_the_calls(self, server: FakeTei, opened: Open) -> None:
        runner = await opened(server)
        server.gate.clear()
        with pytest.raises(DeadlineExceeded):
            await runner.run(Embed(model="m", inputs=["a"]), soon(0.5))  # on a busy machine the call leaves late
        await until(lambda: calls_after_probe(server)[0].aborted)


class TestReplicas:
    async def test_work_is_shared(self, server: FakeTei, opened: Open) -> None:
        async with FakeTei() as other:
            runner = await opened(server, other)
            await until(lambda: all(replica.engine.ready() for replica in runner.lane.replicas))
            answer = await embed(runner, *(f"text {at}" for at in range(200)))
            assert np.array_equal(answer.vectors[7], dense_of("text 7"))
            assert len(server.calls) > 1
            assert len(other.calls) > 1

    async def test_one_that_dies_is_done_without(self, server: FakeTei, opened: Open) -> None:
        """Its batches are retried on the other server; when it returns it serves again, with its new limits."""
        async with FakeTei() as other:
            runner = await opened(server, other)
            first, second = (replica.engine for replica in runner.lane.replicas)
            await until(lambda: first.ready() and second.ready())
            await server.stop()
            answer = await embed(runner, *(f"text {at}" for at in range(100)))
            assert np.array_equal(answer.vectors[7], dense_of("text 7"))
            await until(lambda: not first.ready())
            assert runner.ready()
            server.change(max_client_batch_size=4)
            await server.start()
            await until(lambda: first.ready() and first.facts.max_batch_size == 4)

    @pytest.mark.parametrize("kind", ["embedding", "splade", "reranker", "classifier"])
    async def test_another_model_does_not_join(self, opened: Open, kind: Any) -> None:
        async with FakeTei(Script(kind=kind)) as server, FakeTei(Script(kind=kind, seed=1)) as other:
            runner = await opened(server, other)
            engine: Any = runner.lane.replicas[1].engine
            if kind == "splade":  # that of the fake counts words, whatever its seed
                await until(engine.ready)
                other.change(max_input_length=3, model_sha="new")
                await until(lambda: not engine.ready())
            noun = "scores" if kind in ("reranker", "classifier") else "vectors"
            await until(lambda: f"{noun} than the other replicas" in engine.reason)
            assert not engine.ready()
            assert runner.ready()

    @pytest.mark.parametrize("change", [{"kind": "reranker"}, {"kind": "classifier", "labels": 5}, {"dimension": 8}])
    async def test_another_kind_does_not_join(self, opened: Open, change: dict[str, Any]) -> None:
        kind: Any = "classifier" if "labels" in change else "embedding"
        async with FakeTei(Script(kind=kind)) as server, FakeTei(Script(**{"kind": kind, **change})) as other:
            runner = await opened(server, other)
            engine: Any = runner.lane.replicas[1].engine
            await until(lambda: "serve it under a separate name" in engine.reason)
            assert not engine.ready()

    async def test_a_server_that_came_back_with_another_model(self, server: FakeTei, opened: Open) -> None:
        """An index must not mix both models; a new load accepts the new one."""
        runner = await opened(server)
        server.change(seed=1, model_sha="other")
        await until(lambda: not runner.ready())
        engine: Any = runner.lane.replicas[0].engine
        await until(lambda: "returns different vectors than the other replicas" in engine.reason)
        server.change(seed=0)
        await until(runner.ready)
