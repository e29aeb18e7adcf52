"""Models of servers in this process: they are detected and opened, and their answers are correct."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.backends import parse_address, parse_served
from shoal.backends.tei.open import list_offers, make_link
from shoal.config.settings import Settings
from shoal.core.protocols import TextCodec
from shoal.errors import (
    ConfigError,
    EngineFailed,
    InputRejected,
    InvalidValue,
    TransportFailed,
)
from shoal.models.address import ServedModel
from shoal.types import Classify, Rerank
from tests.fakes.tei import FakeTei, Refusal
from tests.fakes.tei_model import Script, dense_of, logits_of, sparse_of, tokens_of
from tests.unit.backends.tei.open.kit import Open, calls_after_probe, embed, score, until
from tests.unit.models import checkpoints


class TestEmbedders:
    async def test_facts(self, opened: Open) -> None:
        script = Script(model_id="BAAI/bge", model_sha="abc", pooling="cls", max_input_length=128)
        async with FakeTei(script) as server:
            runner = await opened(server)
            facts = runner.facts
            assert (facts.id, facts.backend, facts.tasks, facts.vectors) == (
                "BAAI/bge",
                "tei",
                ("embed",),
                ("dense", "tokens"),
            )
            assert (facts.dimension, facts.max_input_tokens, facts.precision) == (16, 128, "f32")
            assert (facts.pooling, facts.revision, len(facts.space)) == ("cls", "abc", 16)
            assert facts.details["usage"] == "reported"
            assert facts.details["servers"] == [f"tei+http://{server.target}"]
            assert runner.ready()

    async def test_vectors_are_the_servers_own(self, server: FakeTei, opened: Open) -> None:
        """The vectors are bit-identical; truncation and normalization happen there."""
        runner = await opened(server)
        answer = await embed(runner, "one", "two words", dimensions=8)
        assert np.array_equal(answer.vectors, np.stack([dense_of(text, dimensions=8) for text in ("one", "two words")]))
        assert sum(answer.tokens) == 3 + 4
        raw = await embed(runner, "one", normalize=False)
        assert np.array_equal(raw.vectors[0], dense_of("one", normalize=False))

    async def test_every_kind_at_once(self, server: FakeTei, opened: Open) -> None:
        runner = await opened(server)
        answer = await embed(runner, "one", "two words", outputs=("dense", "tokens"))
        assert np.array_equal(answer.token_vectors[1], tokens_of("two words"))
        assert np.array_equal(answer.vectors[0], dense_of("one"))

    async def test_sparse(self, opened: Open) -> None:
        async with FakeTei(Script(kind="splade")) as server:
            runner = await opened(server)
            assert (runner.facts.vectors, runner.facts.dimension) == (("sparse",), None)
            answer = await embed(runner, "a b a", outputs=("sparse",))
            (row,) = answer.sparse
            assert dict(zip(row.indices.tolist(), row.values.tolist(), strict=True)) == sparse_of("a b a")

    async def test_ids_and_prompts(self, opened: Open) -> None:
        """A server's own prompts are selected by name."""
        async with FakeTei(Script(prompts='{"query": "ask "}')) as server:
            runner = await opened(server)
            answer = await embed(runner, [7, 8, 9])
            assert np.array_equal(answer.vectors[0], dense_of([7, 8, 9]))
            answer = await embed(runner, "a", prompt_name="query")
            assert np.array_equal(answer.vectors[0], dense_of("ask a"))
            with pytest.raises(InputRejected, match="`nobody` but it was not found"):
                await embed(runner, "a", prompt_name="nobody")

    async def test_prompts_of_the_configuration(self, server: FakeTei, opened: Open) -> None:
        """Configured prompts are added to the text here."""
        runner = await opened(server, prompts={"query": "find "}, default_prompt_name="query")
        assert np.array_equal((await embed(runner, "a")).vectors[0], dense_of("find a"))
        assert "prompt_name" not in server.calls[-1].options
        assert runner.facts.prompts == {"query": "find "}
        with pytest.raises(InvalidValue, match="no prompt named 'other'"):
            await embed(runner, "a", prompt_name="other")

    async def test_a_dimension_that_the_configuration_promised(self, server: FakeTei, opened: Open) -> None:
        assert (await opened(server, dimension=16)).ready()
        with pytest.raises(ConfigError, match="16 dimensions, but the configuration says 8"):
            await opened(server, dimension=8)

    async def test_a_tokenizer_counts_exactly(self, server: FakeTei, opened: Open, tmp_path: Path) -> None:
        runner = await opened(server, tokenizer=str(checkpoints.checkpoint(tmp_path / "tiny")))
        answer = await embed(runner, "the quick brown fox", "a")
        assert runner.facts.details["usage"] == "counted"
        assert answer.tokens[0] > answer.tokens[1]

    @pytest.mark.parametrize(
        ("era", "setting", "cut"), [("1.9", True, True), ("1.9", False, False), ("1.8", True, False)]
    )
    async def test_texts_that_are_too_long(self, opened: Open, era: str, setting: bool, cut: bool) -> None:
        """Texts are truncated by default if both sides allow it; the request's own setting wins."""
        async with FakeTei(Script(era=era)) as server:
            runner = await opened(server, settings={"truncate": setting})
            long = "w " * 600
            if cut:
                assert np.array_equal((await embed(runner, long)).vectors[0], dense_of(long))
            else:
                with pytest.raises(InputRejected, match="must have less than 512 tokens"):
                    await embed(runner, long)
            assert np.array_equal((await embed(runner, long, truncate=True)).vectors[0], dense_of(long))

    async def test_tokens_are_shown(self, server: FakeTei, opened: Open) -> None:
        runner = await opened(server)
        assert isinstance(runner, TextCodec)
        (row,) = await runner.tokenize(["two words"], add_special_tokens=False, prompt_name=None)
        assert [token.text for token in row] == ["two", "words"]
        assert await runner.decode([[7]], skip_special_tokens=True) == ["w7"]


class TestScores:
    async def test_a_reranker(self, opened: Open) -> None:
        """Queries of many requests share a call, with those that want raw scores."""
        async with FakeTei(Script(kind="reranker")) as server:
            runner = await opened(server)
            assert (runner.facts.tasks, runner.facts.labels) == (("rerank", "classify"), ("LABEL_0",))
            first = Rerank(model="m", queries=["q"], documents=["a", "b"])
            second = Rerank(model="m", queries=["other"], documents=["c"], raw_scores=True)
            one, two = await asyncio.gather(score(runner, first), score(runner, second))
            logits = np.stack([logits_of(("q", text), server.script) for text in "ab"])
            assert np.allclose(one.scores, 1 / (1 + np.exp(-logits)), atol=1e-6)
            assert np.array_equal(two.scores[0], logits_of(("other", "c"), server.script))
            assert [sorted(call.inputs) for call in calls_after_probe(server)] == [
                [("other", "c"), ("q", "a"), ("q", "b")]
            ]

    async def test_a_classifier(self, opened: Open) -> None:
        async with FakeTei(Script(kind="classifier")) as server:
            runner = await opened(server)
            assert runner.facts.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
            answer = await score(runner, Classify(model="m", inputs=["a", ("b", "c")]))
            logits = np.stack([logits_of(item, server.script) for item in ("a", ("b", "c"))])
            powers = np.exp(logits - logits.max(axis=1, keepdims=True))
            assert np.allclose(answer.scores, powers / powers.sum(axis=1, keepdims=True), atol=1e-6)

    async def test_one_poisoned_pair_fails_alone(self, opened: Open) -> None:
        async with FakeTei(Script(kind="reranker")) as server:
            runner = await opened(server)
            texts = ["a", "b", "poison-item", "c", "nan-item"]
            tasks = [score(runner, Rerank(model="m", queries=["q"], documents=[text])) for text in texts]
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert [isinstance(one, EngineFailed) for one in found] == [False, False, True, False, True]


class TestStarting:
    async def test_a_server_that_is_not_there_is_waited_for(self, server: FakeTei, opened: Open) -> None:
        await server.stop()
        notes: list[str] = []
        opening = asyncio.create_task(opened(server, notes=notes))
        await until(lambda: len(notes) > 2)
        assert "not reachable" in notes[0]
        await server.start()
        assert (await opening).ready()

    async def test_one_that_goes_before_its_first_answer(
        self, server: FakeTei, opened: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.change(max_concurrent_requests=1)
        notes: list[str] = []
        opening = asyncio.create_task(opened(server, notes=notes))
        server.gate.clear()
        await server.call()
        await server.stop()
        await until(lambda: bool(notes))
        server.gate.set()
        await server.start()
        assert (await opening).ready()

    async def test_the_first_that_answers_is_enough(self, server: FakeTei, opened: Open) -> None:
        async with FakeTei() as other:
            await other.stop()
            runner = await opened(other, server)
            assert runner.ready()
            assert np.array_equal((await embed(runner, "a")).vectors[0], dense_of("a"))

    async def test_keys(self, opened: Open) -> None:
        async with FakeTei(Script(api_key="sesame")) as server:
            assert (await opened(server, key="sesame")).ready()
            with pytest.raises(ConfigError, match="upstream_api_key"):
                await opened(server)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"misbehaves": "short"}, "3 rows for 4 inputs"),
            ({"misbehaves": "html"}, "web page"),
            ({"max_input_length": 2}, "status 500"),
        ],
    )
    async def test_a_server_that_cannot_answer_yet(
        self, server: FakeTei, opened: Open, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str
    ) -> None:
        """Opening waits while the server, or its proxy, starts, and logs why."""
        rows = server._rows

        def failing(call: Any, items: list[Any]) -> list[Any]:
            if server.script.max_input_length == 2:
                raise Refusal(500, "Backend", "not yet")
            return rows(call, items)

        monkeypatch.setattr(server, "_rows", failing)
        server.change(**change)
        notes: list[str] = []
        opening = asyncio.create_task(opened(server, notes=notes))
        await until(lambda: any(words in note for note in notes))
        assert not opening.done()
        server.change(misbehaves="", max_input_length=512)
        assert (await opening).ready()

    async def test_a_server_that_refuses_the_first_texts(
        self, server: FakeTei, opened: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Opening fails at once, since a retry cannot help."""

        def refusing(call: Any, items: list[Any]) -> list[Any]:
            raise Refusal(422, "Validation", "no such prompt")

        monkeypatch.setattr(server, "_rows", refusing)
        with pytest.raises(ConfigError, match=r"m rejects the probe inputs: .* \(no such prompt\)"):
            await opened(server)

    async def test_answers_tell_one_model_from_another(self, opened: Open) -> None:
        """Without a revision, cached rows belong to the weights and prompt that the server has now."""
        for kind in ("embedding", "splade"):
            reports: list[tuple[str, str]] = []
            for change in ({}, {}, {"seed": 9}, {"default_prompt": "query: "}):
                async with FakeTei(Script(kind=kind, **change)) as server:
                    facts = (await opened(server)).facts
                    reports.append((facts.space, facts.answers))
            assert reports[0] == reports[1]
            assert all(len(answers) == 16 for _, answers in reports)
            assert len({space for space, _ in reports}) == 1
            # The sparse vectors of the fake count words, whatever its seed.
            assert len({answers for _, answers in reports}) == (3 if kind == "embedding" else 2)

    async def test_scores_have_no_digest(self, opened: Open) -> None:
        async with FakeTei(Script(kind="reranker")) as server:
            assert (await opened(server)).facts.answers == ""

    async def test_a_model_that_the_address_names(self, server: FakeTei, opened: Open) -> None:
        assert (await opened(server, model="org/model")).ready()
        with pytest.raises(ConfigError, match="the server has org/model, not org/other"):
            await opened(server, model="org/other")


class TestOffers:
    @pytest.mark.parametrize(
        ("model_id", "name"),
        [
            ("BAAI/bge-m3", "BAAI/bge-m3"),
            ("/data/models/mine", "mine"),
            ("sentence-transformers/a b", "sentence-transformers/a-b"),
        ],
    )
    async def test_its_model_under_its_name(self, model_id: str, name: str) -> None:
        async with FakeTei(Script(model_id=model_id)) as server:
            address = parse_address(f"tei+http://{server.target}")
            assert await list_offers(address, Settings()) == {name: ServedModel(name=name, addresses=(address,))}

    async def test_a_name_that_cannot_be(self) -> None:
        async with FakeTei(Script(model_id="load")) as server:
            address = parse_address(f"tei+http://{server.target}")
            found = await list_offers(address, Settings())
            assert isinstance(found["load"], str)
            assert f"NAME={address}" in found["load"]

    async def test_one_that_is_not_there(self, server: FakeTei) -> None:
        await server.stop()
        with pytest.raises(TransportFailed):
            await list_offers(parse_address(f"tei+http://{server.target}"), Settings())

    async def test_connections(self) -> None:
        client = make_link(parse_address("tei+https://host:8443/behind/a/proxy"), Settings())
        assert client.base == "https://host:8443/behind/a/proxy"
        await client.aclose()

    def test_a_name_alone_is_enough(self) -> None:
        served = parse_served("mine=tei+http://a:80,tei+http://b:80")
        assert (served.name, len(served.addresses)) == ("mine", 2)
