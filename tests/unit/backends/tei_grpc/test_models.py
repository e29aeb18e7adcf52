"""Models of gRPC servers in this process, opened as those of HTTP servers, and users who share their streams."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from shoal.backends import parse_address
from shoal.backends.tei.open import list_offers, make_link
from shoal.config.settings import Settings
from shoal.errors import ConfigError, EngineFailed, InputRejected, TransportFailed
from shoal.models.address import ServedModel
from shoal.types import Classify, Rerank
from tests.fakes.tei_grpc import FakeTeiGrpc
from tests.fakes.tei_model import Script, dense_of, logits_of, sparse_of, tokens_of
from tests.unit.backends.tei.open.kit import Open, embed, score, until

FIRST = 2
"""Calls before the model is open: one for the values that its info lacks, and the probe."""


class TestOpening:
    async def test_facts(self, opened: Open) -> None:
        async with FakeTeiGrpc(Script(model_id="BAAI/bge", model_sha="abc", max_input_length=128)) as server:
            runner = await opened(server)
            facts = runner.facts
            assert (facts.id, facts.backend, facts.tasks) == ("BAAI/bge", "tei", ("embed",))
            assert (facts.vectors, facts.dimension, facts.max_input_tokens) == (("dense", "tokens"), 16, 128)
            assert (facts.precision, facts.revision, facts.pooling) == ("f32", "abc", "")
            assert facts.details["servers"] == [f"tei+grpc://{server.target}"]
            assert len(server.calls) == FIRST

    async def test_every_kind_of_vectors(self, server: FakeTeiGrpc, opened: Open) -> None:
        runner = await opened(server)
        answer = await embed(runner, "one", "two words", outputs=("dense", "tokens"))
        assert np.array_equal(answer.token_vectors[1], tokens_of("two words"))
        assert np.array_equal(answer.vectors[0], dense_of("one"))
        assert answer.tokens == [3, 4]
        cut = await embed(runner, "one", normalize=False, dimensions=8)
        assert np.array_equal(cut.vectors[0], dense_of("one", normalize=False, dimensions=8))
        async with FakeTeiGrpc(Script(kind="splade")) as other:
            (row,) = (await embed(await opened(other), "a b a", outputs=("sparse",))).sparse
            assert dict(zip(row.indices.tolist(), row.values.tolist(), strict=True)) == sparse_of("a b a")

    async def test_scores(self, opened: Open) -> None:
        async with FakeTeiGrpc(Script(kind="reranker")) as server:
            runner = await opened(server)
            answer = await score(runner, Rerank(model="m", queries=["q", "r"], documents=["a", "b"], raw_scores=True))
            pairs = [("q", "a"), ("r", "b")]
            assert np.array_equal(answer.scores, np.stack([logits_of(pair, server.script) for pair in pairs]))
        async with FakeTeiGrpc(Script(kind="classifier")) as server:
            runner = await opened(server)
            assert runner.facts.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
            answer = await score(runner, Classify(model="m", inputs=["a", ("b", "c")], raw_scores=True))
            assert np.array_equal(answer.scores[1], logits_of(("b", "c"), server.script))

    @pytest.mark.parametrize("truncate", [True, False])
    async def test_texts_that_are_too_long(self, server: FakeTeiGrpc, opened: Open, truncate: bool) -> None:
        """Shoal's setting is the default; the request's own setting wins."""
        runner = await opened(server, settings={"truncate": truncate})
        long = "w " * 600
        if truncate:
            assert np.array_equal((await embed(runner, long)).vectors[0], dense_of(long))
        else:
            with pytest.raises(InputRejected, match="must have less than 512 tokens"):
                await embed(runner, long)
        assert np.array_equal((await embed(runner, long, truncate=True)).vectors[0], dense_of(long))

    async def test_one_that_is_not_there_is_waited_for(self, server: FakeTeiGrpc, opened: Open) -> None:
        await server.stop()
        notes: list[str] = []
        opening = asyncio.create_task(opened(server, notes=notes))
        await until(lambda: len(notes) > 2)
        assert "not reachable" in notes[0]
        await server.start()
        assert (await opening).ready()

    async def test_keys(self, opened: Open) -> None:
        async with FakeTeiGrpc(Script(api_key="sesame")) as server:
            assert (await opened(server, key="sesame")).ready()
            with pytest.raises(ConfigError, match="upstream_api_key"):
                await opened(server)

    async def test_what_it_offers(self, server: FakeTeiGrpc) -> None:
        server.change(model_id="BAAI/bge")
        address = parse_address(f"tei+grpc://{server.target}")
        assert await list_offers(address, Settings()) == {
            "BAAI/bge": ServedModel(name="BAAI/bge", addresses=(address,))
        }
        await server.stop()
        with pytest.raises(TransportFailed):
            await list_offers(address, Settings())

    @pytest.mark.parametrize(
        ("address", "base", "target"),
        [
            ("tei+grpc://host", "grpc://host", "host:80"),
            ("tei+grpc://host:8080", "grpc://host:8080", "host:8080"),
            ("tei+grpcs://host", "grpcs://host", "host:443"),
            ("tei+grpcs://[::1]", "grpcs://[::1]", "[::1]:443"),
            ("tei+grpc://[::1]:9", "grpc://[::1]:9", "[::1]:9"),
        ],
    )
    async def test_connections(self, address: str, base: str, target: str) -> None:
        link: Any = make_link(parse_address(address), Settings())
        assert (link.base, link._target) == (base, target)
        await link.aclose()


class TestJoining:
    async def test_users_share_streams(self, server: FakeTeiGrpc, opened: Open) -> None:
        runner = await opened(server)
        server.gate.clear()
        first = [asyncio.create_task(embed(runner, f"first {at}", client=str(at))) for at in range(2)]
        await server.call(FIRST + 1)
        rest = [asyncio.create_task(embed(runner, f"text {at}", client=str(at))) for at in range(80)]
        await asyncio.sleep(0)
        server.gate.set()
        answers = await asyncio.gather(*first, *rest)
        for at, answer in enumerate(answers[2:]):
            assert np.array_equal(answer.vectors[0], dense_of(f"text {at}"))
        sizes = [len(call.inputs) for call in server.calls[FIRST:]]
        assert (sum(sizes), max(sizes)) == (82, 32)
        assert len(sizes) <= 6
        assert server.most_in_flight == 2

    async def test_only_equal_options_share_a_stream(self, server: FakeTeiGrpc, opened: Open) -> None:
        runner = await opened(server)
        options: list[dict[str, Any]] = [{}, {"normalize": False}, {"dimensions": 4}, {"truncate": False}]
        tasks = [embed(runner, f"text {at}", **each) for each in options * 3 for at in (0, 1)]
        answers = await asyncio.gather(*tasks)
        for each, answer in zip([each for each in options * 3 for _ in (0, 1)], answers, strict=True):
            assert answer.vectors.shape[1] == each.get("dimensions", 16)
        sent = {tuple(sorted(call.options.items())) for call in server.calls[FIRST:]}
        assert len(sent) == len(options)

    async def test_one_poisoned_text_fails_alone(self, server: FakeTeiGrpc, opened: Open) -> None:
        runner = await opened(server)
        texts = [f"text {at}" for at in range(40)]
        texts[13] = "poison-item"
        found = await asyncio.gather(*(embed(runner, text) for text in texts), return_exceptions=True)
        assert [at for at, one in enumerate(found) if isinstance(one, BaseException)] == [13]
        assert isinstance(found[13], EngineFailed)

    async def test_callers_who_leave(self, server: FakeTeiGrpc, opened: Open) -> None:
        runner = await opened(server)
        server.gate.clear()
        pending = asyncio.create_task(embed(runner, "a"))
        await server.call(FIRST + 1)
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        await until(lambda: server.calls[-1].aborted and not server.in_flight)
        server.gate.set()
        assert np.array_equal((await embed(runner, "b")).vectors[0], dense_of("b"))


class TestReplicas:
    async def test_one_that_dies_is_done_without(self, server: FakeTeiGrpc, opened: Open) -> None:
        async with FakeTeiGrpc() as other:
            runner = await opened(server, other)
            first, second = (replica.engine for replica in runner.lane.replicas)
            await until(lambda: first.ready() and second.ready())
            await server.stop()
            answer = await embed(runner, *(f"text {at}" for at in range(100)))
            assert np.array_equal(answer.vectors[7], dense_of("text 7"))
            await until(lambda: not first.ready())
            await server.start()
            await until(first.ready)

    async def test_another_model_does_not_join(self, server: FakeTeiGrpc, opened: Open) -> None:
        async with FakeTeiGrpc(Script(seed=1)) as other:
            runner = await opened(server, other)
            engine: Any = runner.lane.replicas[1].engine
            await until(lambda: "vectors than the other replicas" in engine.reason)
            assert not engine.ready()
