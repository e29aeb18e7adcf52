"""A server whose model changes under its name: no vector of the new model is returned for the old one."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from shoal.backends.tei import engine as engine_module
from shoal.backends.tei.open import TeiModel
from shoal.core.probe import PAIRS, TEXTS
from shoal.core.scheduling.ejection import MAX_FAILURES
from shoal.errors import CapacityError, EngineFailed
from shoal.types import Embed
from tests.fakes.tei import FakeTei, Refusal
from tests.fakes.tei_model import Script, dense_of
from tests.unit.backends.tei.open.kit import Open, embed, soon, until


def engine_in(runner: TeiModel, number: int = 0) -> Any:
    return runner.lane.replicas[number].engine


class TestWidth:
    @pytest.mark.parametrize("fields", [{}, {"dimensions": 12}, {"dimensions": 4, "normalize": False}])
    async def test_vectors_of_another_width_are_not_served(self, opened: Open, fields: dict[str, Any]) -> None:
        """Such vectors are not truncated either, for a server without truncation; it serves again with the original
        model."""
        async with FakeTei(Script(era="1.8")) as server:
            runner = await opened(server)
            server.change(dimension=3)
            with pytest.raises(CapacityError):  # it waits for a replica that is right, as long as its caller does
                await runner.run(Embed(model="m", inputs=["a", "b"], **fields), soon(0.2))
            assert not runner.ready()
            await until(lambda: "instead of 16" in engine_in(runner).reason)
            server.change(dimension=16)
            await until(runner.ready)
            assert np.array_equal((await embed(runner, "a")).vectors[0], dense_of("a"))

    async def test_in_the_middle_of_a_request(self, opened: Open) -> None:
        """Answers of the old model are not combined with answers of the new one."""
        async with FakeTei(Script(max_client_batch_size=1)) as server:
            runner = await opened(server)
            server.gate.clear()
            task = asyncio.create_task(runner.run(Embed(model="m", inputs=list("abcdef")), soon(1.0)))
            await until(lambda: server.in_flight == 2)
            server.change(dimension=8)
            server.gate.set()
            with pytest.raises((EngineFailed, CapacityError)):
                await task

    async def test_another_replica_answers(self, server: FakeTei, opened: Open) -> None:
        async with FakeTei() as other:
            runner = await opened(server, other)
            await until(lambda: engine_in(runner, 0).ready() and engine_in(runner, 1).ready())
            server.change(dimension=8)
            answer = await embed(runner, *(f"text {at}" for at in range(100)))
            assert np.array_equal(answer.vectors, np.stack([dense_of(f"text {at}") for at in range(100)]))
            await until(lambda: not engine_in(runner, 0).ready())
            assert runner.ready()


class TestTheSameName:
    @pytest.fixture(autouse=True)
    def asked_often(self, fast_polling: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine_module, "ASK_EVERY", 1)

    @pytest.mark.parametrize(
        ("kind", "change"),
        [
            ("embedding", {"seed": 9}),
            ("embedding", {"default_prompt": "query: "}),
            ("embedding", {"dimension": 8}),
            ("splade", {"default_prompt": "query: "}),
            ("reranker", {"seed": 9}),
            ("classifier", {"seed": 9}),
        ],
    )
    async def test_other_weights_are_noticed(self, opened: Open, kind: Any, change: dict[str, Any]) -> None:
        """The change is detected although /info is the same and no request comes in."""
        async with FakeTei(Script(kind=kind)) as server:
            runner = await opened(server)
            await until(lambda: len(server.calls) > 5)
            assert runner.ready()
            before = server.script
            server.change(**change)
            await until(lambda: not runner.ready() and "serve it under a separate name" in engine_in(runner).reason)
            server.script = before
            await until(runner.ready)

    async def test_one_input_is_probed_at_a_time(self, opened: Open) -> None:
        for kind, inputs in (("embedding", TEXTS), ("reranker", PAIRS)):
            async with FakeTei(Script(kind=kind)) as server:  # type: ignore[arg-type]
                await opened(server)
                await until(lambda server=server: len(server.calls) > 8)  # type: ignore[misc]
                assert server.calls[0].inputs == list(inputs)
                assert [call.inputs for call in server.calls[1:9]] == [[each] for each in inputs] * 2

    async def test_a_permit_that_a_batch_needs_is_not_taken(self, opened: Open) -> None:
        async with FakeTei(Script(max_concurrent_requests=4)) as server:
            runner = await opened(server)
            for _ in range(20):
                await asyncio.gather(*(embed(runner, f"text {at}", f"more {at}") for at in range(4)))
            assert server.most_permits <= 4
            assert runner.ready()

    async def test_a_busy_server_is_not_another_one(
        self, server: FakeTei, opened: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runner = await opened(server)

        def busy(call: Any, items: list[Any]) -> list[Any]:
            raise Refusal(429, "Overloaded", "Model is overloaded")

        monkeypatch.setattr(server, "_rows", busy)
        await until(lambda: [call.status for call in server.calls].count(429) > 5)
        assert runner.ready()


class TestOneThatFailsFast:
    @pytest.mark.parametrize("how", ["html", "short", "empty", "424", "500"])
    async def test_the_other_answers(self, server: FakeTei, opened: Open, how: str) -> None:
        """A server that fails fast would attract the work; it is ejected, and no request fails."""
        async with FakeTei(Script(delay_ms=3)) as other:
            runner = await opened(server, other)
            await until(lambda: engine_in(runner, 0).ready() and engine_in(runner, 1).ready())
            before = len(server.calls), len(other.calls)
            server.change(misbehaves=how)
            for wave in range(40):
                texts = [f"text {wave} {at}" for at in range(8)]
                answers = await asyncio.gather(*(embed(runner, text) for text in texts))
                assert all(np.array_equal(a.vectors[0], dense_of(t)) for a, t in zip(answers, texts, strict=True))
            broken, well = (len(each.calls) - at for each, at in zip((server, other), before, strict=True))
            assert 1 <= broken <= well / 2
            first, last = runner.replicas()
            # How the replicas share the work is the scheduler's: one that gets little is not ejected.
            assert broken < MAX_FAILURES or first.state != "in_service"
            assert last.state == "in_service"
