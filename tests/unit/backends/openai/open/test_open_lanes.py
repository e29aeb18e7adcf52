"""Embedding, scoring and classification of an OpenAI-compatible server: how they are detected and served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.protocols import TextCodec
from shoal.errors import (
    ConfigError,
    InputRejected,
    InvalidValue,
    ShoalError,
    Unsupported,
)
from shoal.types import Array
from tests.fakes.openai_server import Exchange, FakeUpstream, Script, answer, vector_of
from tests.fakes.scoring import (
    LABELS,
    NO_TASK,
    POISON,
    infinity_classify,
    logit_of,
    probability_of,
    vllm_classify,
    vllm_score,
)
from tests.fakes.scoring import rerank as reranks
from tests.unit.backends.openai.open.kit import NO_ROUTE, Open, classify, embed, rerank
from tests.unit.models import checkpoints

DOCUMENTS = ("one", "two words", "drei Wörter")


@pytest.fixture
async def scores() -> AsyncIterator[FakeUpstream]:
    """A server without routes except those that a test adds."""
    async with FakeUpstream() as made:
        made.on("/embeddings", NO_ROUTE)
        yield made


def expected(query: str, *documents: str, raw: bool = False) -> Array:
    score = logit_of if raw else probability_of
    return np.stack([score((query, document)) for document in documents])


def called(server: FakeUpstream, path: str) -> list[Any]:
    """Return the bodies posted to a path that had something to score."""
    bodies = [one.json for one in server.requests if one.path == path]
    return [body for body in bodies if body.get("text_2") or body.get("documents") or body.get("input")]


class TestRanking:
    async def test_pairs_of_everybody_share_a_call(self, scores: FakeUpstream, opened: Open) -> None:
        scores.on("/score", vllm_score())
        runner = await opened(scores)
        assert (runner.facts.tasks, runner.facts.labels, runner.facts.vectors) == (
            ("rerank", "classify"),
            ("LABEL_0",),
            (),
        )
        before = len(called(scores, "/v1/score"))
        pending = [rerank(runner, f"query {at}", *DOCUMENTS) for at in range(20)]
        for at, found in enumerate(await asyncio.gather(*pending)):
            assert np.allclose(found.scores, expected(f"query {at}", *DOCUMENTS), atol=1e-6)
        assert len(called(scores, "/v1/score")) - before < 8

    async def test_raw_scores_where_the_server_has_them(self, scores: FakeUpstream, opened: Open) -> None:
        scores.on("/score", vllm_score())
        runner = await opened(scores)
        assert runner.facts.details["raw_scores"]
        found = await rerank(runner, "q", *DOCUMENTS, raw_scores=True)
        assert np.allclose(found.scores, expected("q", *DOCUMENTS, raw=True), atol=1e-6)
        assert called(scores, "/v1/score")[-1]["use_activation"] is False

    async def test_raw_scores_that_a_server_does_not_have(self, scores: FakeUpstream, opened: Open) -> None:
        """Shoal detects that the server ignores the request for raw scores."""
        scores.on("/score", vllm_score(raw=False))
        runner = await opened(scores)
        with pytest.raises(Unsupported, match="no raw scores"):
            await rerank(runner, "q", "a", raw_scores=True)
        assert np.allclose((await rerank(runner, "q", "a")).scores, expected("q", "a"), atol=1e-6)

    @pytest.mark.parametrize(
        ("key", "fields"), [("results", ("top_n", "return_documents")), ("data", ()), ("results", ("top_n",))]
    )
    async def test_by_query_where_there_is_no_score(
        self, scores: FakeUpstream, opened: Open, key: str, fields: tuple[str, ...]
    ) -> None:
        """Rerank dialects of Jina, Voyage and another: pairs of one query share a call."""
        scores.on("/rerank", reranks(key, fields=fields))
        runner = await opened(scores)
        assert runner.facts.details["raw_scores"] is False
        before = len(called(scores, "/v1/rerank"))
        pending = [rerank(runner, f"query {at % 2}", f"document {at}", "same") for at in range(40)]
        for at, found in enumerate(await asyncio.gather(*pending)):
            assert np.allclose(found.scores, expected(f"query {at % 2}", f"document {at}", "same"), atol=1e-6)
        assert len(called(scores, "/v1/rerank")) - before < 20
        assert called(scores, "/v1/rerank")[-1].keys() == {"model", "query", "documents", *fields}

    async def test_usage_is_what_the_server_counts(self, scores: FakeUpstream, opened: Open) -> None:
        scores.on("/score", vllm_score())
        runner = await opened(scores)
        assert runner.facts.details["usage"] == "reported"
        assert sum((await rerank(runner, "one two", "three", "four five")).tokens) == 3 + 2 + 3 + 3
        scores.on("/score", NO_ROUTE)
        scores.on("/rerank", reranks(usage=False))
        guessing = await opened(scores)
        assert guessing.facts.details["usage"] == "estimated"
        assert (await rerank(guessing, "q" * 20, "d" * 20)).tokens == [10]

    async def test_texts_alone_go_another_way(self, scores: FakeUpstream, opened: Open) -> None:
        """A reranker with one label classifies pairs; single texts need a route that accepts them."""
        scores.on("/score", vllm_score())
        runner = await opened(scores)
        pair = ("a", "b")
        assert np.allclose((await classify(runner, pair)).scores, [probability_of(pair)], atol=1e-6)
        with pytest.raises(InputRejected, match="send two texts"):
            await classify(runner, "a")
        scores.on("root/classify", vllm_classify(1))
        runner = await opened(scores)
        found = await classify(runner, "a", pair)
        assert np.allclose(found.scores, [probability_of("a"), probability_of(pair)], atol=1e-6)
        assert runner.facts.labels == (LABELS[0],)

    async def test_tasks_from_the_table(self, scores: FakeUpstream, opened: Open) -> None:
        """With tasks in the table, embedding and chat are not probed."""
        scores.on("/rerank", reranks())
        runner = await opened(scores, tasks=("rerank",))
        assert "rerank" in runner.facts.tasks
        assert {one.path for one in scores.requests} >= {"/v1/models", "/v1/score", "/score", "/v1/rerank"}
        assert not {one.path for one in scores.requests} & {"/v1/embeddings", "/v1/chat/completions"}

    async def test_a_model_that_embeds_is_not_probed_for_scores(self, server: FakeUpstream, opened: Open) -> None:
        """A model that embeds ranks by its vectors."""
        server.on("/score", vllm_score())
        assert (await opened()).facts.tasks == ("embed", "generate")
        assert not [one for one in server.requests if "score" in one.path]

    async def test_two_tasks_from_the_table(self, server: FakeUpstream, opened: Open) -> None:
        server.on("/score", vllm_score())
        runner = await opened(tasks=("embed", "rerank"))
        assert runner.facts.tasks == ("embed", "rerank", "classify")
        assert runner.facts.vectors == ("dense",)
        assert np.allclose((await embed(runner, "a", normalize=False)).vectors, [vector_of("a")])
        assert np.allclose((await rerank(runner, "q", "a")).scores, expected("q", "a"), atol=1e-6)

    async def test_probes_cost_nothing(self, scores: FakeUpstream, opened: Open) -> None:
        """Probes score no text until a route is found."""
        scores.on("/rerank", NO_TASK)
        with pytest.raises(ConfigError, match="neither embeds, scores nor chats"):
            await opened(scores)
        requests = [one.json for one in scores.requests if one.path.endswith(("/score", "/rerank", "/classify"))]
        assert len(requests) == 6
        for body in requests:
            del body["model"]
            assert not any(body.values())


class TestClassifying:
    async def test_the_names_come_with_the_answers(self, scores: FakeUpstream, opened: Open) -> None:
        """vLLM names only the likeliest label."""
        scores.on("root/classify", vllm_classify())
        runner = await opened(scores)
        assert runner.facts.tasks == ("classify",)
        texts = [f"text {at}" for at in range(30)]
        found = await classify(runner, *texts)
        assert np.allclose(found.scores, [probability_of(text, 3) for text in texts], atol=1e-6)
        assert runner.facts.labels == LABELS
        raw = await classify(runner, *texts, raw_scores=True)
        assert np.allclose(raw.scores, [logit_of(text, 3) for text in texts], atol=1e-6)

    async def test_every_name_with_its_score(self, scores: FakeUpstream, opened: Open) -> None:
        """Infinity returns all labels in the order of their names; its rerank route exists without a model."""
        scores.on("/rerank", self._not_deployed())
        scores.on("/classify", infinity_classify())
        runner = await opened(scores)
        assert (runner.facts.tasks, runner.facts.labels) == (("classify",), ("calm", "fear", "joy"))
        found = await classify(runner, "a", "b")
        order = [LABELS.index(label) for label in runner.facts.labels]
        assert np.allclose(found.scores, [probability_of(text, 3)[order] for text in "ab"], atol=1e-6)
        with pytest.raises(Unsupported, match="no raw scores"):
            await classify(runner, "a", raw_scores=True)

    def _not_deployed(self) -> Script:
        async def run(exchange: Exchange) -> None:
            known = bool(exchange.request.json["documents"])
            message = "model=`up/model` does not support `rerank`" if known else "documents: at least one"
            await answer({"error": {"message": message}}, 400 if known else 422)(exchange)

        return run

    async def test_a_shoal_names_them_all(self, scores: FakeUpstream, opened: Open) -> None:
        scores.models[0] |= {"tasks": ["classify"], "labels": [*LABELS]}
        scores.on("/classify", vllm_classify())
        runner = await opened(scores)
        assert (runner.facts.tasks, runner.facts.labels) == (("classify",), LABELS)

    async def test_no_route_that_scores(self, scores: FakeUpstream, opened: Open) -> None:
        with pytest.raises(ConfigError, match="m does not classify: it has no route"):
            await opened(scores, tasks=("classify",))
        scores.on("/rerank", self._not_deployed())
        with pytest.raises(ConfigError, match=r"m does not rerank: .* does not support `rerank`"):
            await opened(scores, tasks=("rerank",))


class TestFailures:
    """As for embeddings, the failure of one text affects no other."""

    @pytest.mark.parametrize(("path", "script"), [("/score", vllm_score()), ("/rerank", reranks())])
    async def test_a_poisoned_pair_fails_alone(
        self, scores: FakeUpstream, opened: Open, path: str, script: Script
    ) -> None:
        scores.on(path, script)
        runner = await opened(scores)
        texts = [f"text {at}" for at in range(12)]
        texts[5] = POISON
        found = await asyncio.gather(*(rerank(runner, "q", text) for text in texts), return_exceptions=True)
        assert [at for at, one in enumerate(found) if isinstance(one, ShoalError)] == [5]
        assert isinstance(found[5], InputRejected)

    async def test_a_busy_server_gets_its_batch_later(self, scores: FakeUpstream, opened: Open) -> None:
        scores.on("/score", vllm_score())
        runner = await opened(scores)
        refused = 0

        async def busy(exchange: Exchange) -> None:
            nonlocal refused
            refused += 1
            await answer({"error": "busy"}, 429, retry_after_ms="1")(exchange)
            scores.on("/score", vllm_score())

        scores.on("/score", busy)
        assert np.allclose((await rerank(runner, "q", "a")).scores, expected("q", "a"), atol=1e-6)
        assert refused == 1

    async def test_a_server_that_dies_and_comes_back(self, scores: FakeUpstream, opened: Open) -> None:
        scores.on("/score", vllm_score())
        runner = await opened(scores)
        scores.on("/score", Exchange.cut)
        asking = asyncio.create_task(rerank(runner, "q", "a"))
        async with asyncio.timeout(30):
            while runner.ready():  # noqa: ASYNC110 - the watch tells nobody
                await asyncio.sleep(0.001)
        scores.on("/score", vllm_score())
        assert np.allclose((await asking).scores, expected("q", "a"), atol=1e-6)
        assert runner.ready()

    async def test_replicas_agree_before_they_serve(self, scores: FakeUpstream, opened: Open) -> None:
        async with FakeUpstream() as same, FakeUpstream() as other:
            for server, seed in ((scores, 0), (same, 0), (other, 7)):
                server.on("/embeddings", NO_ROUTE)
                server.on("/score", vllm_score(seed=seed))
            runner = await opened(scores, same, other)
            replicas = runner._runners[0].lane.replicas  # type: ignore[attr-defined]
            async with asyncio.timeout(30):
                while not (replicas[1].engine.ready() and "than the other replicas" in replicas[2].engine.reason):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            assert not replicas[2].engine.ready()
            await runner.aclose()

    @pytest.mark.parametrize("status", [429, 503])
    async def test_a_server_that_cannot_say_yet(self, scores: FakeUpstream, opened: Open, status: int) -> None:
        scores.on("/rerank", answer({"error": "warming up"}, status))
        notes: list[str] = []
        opening = asyncio.create_task(opened(scores, notes=notes))
        async with asyncio.timeout(30):
            while not any("whether it can score" in note for note in notes):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        scores.on("/rerank", reranks())
        assert "rerank" in (await opening).facts.tasks

    async def test_busy_over_its_first_pairs(self, scores: FakeUpstream, opened: Open) -> None:
        """Opening waits for the first scores, as for a first vector."""
        real = reranks()

        async def first_busy(exchange: Exchange) -> None:
            if exchange.request.json["documents"]:
                scores.on("/rerank", real)
                await answer({}, 429)(exchange)
            else:
                await real(exchange)

        scores.on("/rerank", first_busy)
        notes: list[str] = []
        assert "rerank" in (await opened(scores, notes=notes)).facts.tasks
        assert "too busy" in notes[0]


class TestAnotherModel:
    """Another model under the name of the one that was opened."""

    async def test_of_another_width_is_not_served(self, server: FakeUpstream, opened: Open) -> None:
        """A model of another width is not served, and not probed while all is well, which may cost; it serves again
        with the original model."""
        runner = await opened(tasks=("embed",))
        before = len(server.requests)
        async with asyncio.timeout(30):
            while len(server.requests) < before + 5:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert {one.path for one in server.requests[before:]} == {"/v1/models"}
        server.on("/embeddings", answer({"data": [{"index": 0, "embedding": [1.0, 2.0]}]}))
        asking = asyncio.create_task(embed(runner, "a", normalize=False))
        async with asyncio.timeout(30):
            while runner.ready():  # noqa: ASYNC110 - the watch tells nobody
                await asyncio.sleep(0.001)
        assert not asking.done()
        server.on("/embeddings", self._right(server))
        assert np.allclose((await asking).vectors, [vector_of("a")])
        assert runner.ready()

    def _right(self, server: FakeUpstream) -> Script:
        async def run(exchange: Exchange) -> None:
            await answer(server.embeddings_reply(exchange.request.json))(exchange)

        return run

    async def test_answers_tell_one_model_from_another(self, server: FakeUpstream, opened: Open) -> None:
        """Cached rows belong to the weights that the server has now."""
        async with FakeUpstream(seed=9) as other:
            all_facts = [(await opened(each, tasks=("embed",))).facts for each in (server, server, other)]
        first, again, changed = (facts.answers for facts in all_facts)
        assert len(first) == 16
        assert first == again != changed


class TestIds:
    async def test_are_passed_on(self, server: FakeUpstream, opened: Open) -> None:
        """Token ids are sent in calls without texts."""
        runner = await opened(tasks=("embed",))
        ids: Any = [3, 1, 4]
        before = len(server.requests)
        found = await embed(runner, ids, "text", ids, normalize=False)
        assert np.allclose(found.vectors, [vector_of(ids), vector_of("text"), vector_of(ids)])
        inputs = [one.json["input"] for one in server.requests[before:] if one.path == "/v1/embeddings"]
        assert sorted(map(str, inputs)) == ["['text']", "[[3, 1, 4]]"]

    async def test_are_refused_where_the_server_does(self, server: FakeUpstream, opened: Open) -> None:
        server.ids = False
        runner = await opened(tasks=("embed",))
        before = len(server.requests)
        with pytest.raises(InvalidValue, match="accepts text, not token ids"):
            await embed(runner, [1, 2])  # type: ignore[arg-type]
        assert not [one for one in server.requests[before:] if one.path == "/v1/embeddings"]
        assert runner.facts.details["token_ids"] is False

    async def test_of_another_tokenizer(self, server: FakeUpstream, opened: Open, tmp_path: Path) -> None:
        """Token ids mean other texts for the server's tokenizer, so they are refused."""
        folder = checkpoints.checkpoint(tmp_path / "tiny")
        runner = await opened(tasks=("embed",), tokenizer=str(folder))
        with pytest.raises(InvalidValue, match="accepts text, not token ids"):
            await embed(runner, [1, 2])  # type: ignore[arg-type]

    async def test_a_server_that_goes_then(self, server: FakeUpstream, opened: Open) -> None:
        failures = 0

        async def dies(exchange: Exchange) -> None:
            nonlocal failures
            if not failures and isinstance(exchange.request.json["input"][0], list):
                failures += 1
                return await answer(b"", 502)(exchange)
            return await answer(server.embeddings_reply(exchange.request.json))(exchange)

        server.on("/embeddings", dies)
        notes: list[str] = []
        assert (await opened(tasks=("embed",), notes=notes)).facts.details["token_ids"] is True
        assert "cannot serve the model now" in notes[0]


class TestOptions:
    async def test_are_seen_to_here(self, server: FakeUpstream, opened: Open) -> None:
        """Options are applied here unless the configuration says that the server honors them."""
        runner = await opened(tasks=("embed",))
        await embed(runner, "a", dimensions=3)
        assert "dimensions" not in server.requests[-1].json
        with pytest.raises(Unsupported, match="truncate"):
            await embed(runner, "a", truncate=False)

    async def test_are_passed_to_who_honours_them(self, server: FakeUpstream, opened: Open) -> None:
        runner = await opened(tasks=("embed",), passes=("dimensions", "input_type", "prompt_name", "truncate"))
        before = len(server.requests)
        fields: list[dict[str, Any]] = [
            {},
            {"dimensions": 4},
            {"input_type": "query"},
            {"prompt_name": "q", "truncate": False},
        ]
        await asyncio.gather(*(embed(runner, f"text {at}", **fields[at % 4]) for at in range(16)))
        calls = [one.json for one in server.requests[before:] if one.path == "/v1/embeddings"]
        options = [{name: call[name] for name in call.keys() - {"model", "input", "encoding_format"}} for call in calls]
        for one in options:
            assert one in [{"truncate": True} | each for each in fields]
        assert len({str(sorted(one.items())) for one in options}) == 4

    async def test_prompts_of_two_places(self, opened: Open) -> None:
        with pytest.raises(ConfigError, match="has `prompts`, and also passes prompt_name"):
            await opened(tasks=("embed",), passes=("prompt_name",), prompts={"q": "query: "})

    async def test_of_rerankers(self, scores: FakeUpstream, opened: Open) -> None:
        scores.on("/rerank", reranks(fields=("top_n", "return_documents", "truncation", "max_tokens_per_doc")))
        runner = await opened(scores, passes=("truncate", "max_document_tokens"))
        await rerank(runner, "q", "a", max_document_tokens=7, truncate=False)
        body = called(scores, "/v1/rerank")[-1]
        assert (body["truncation"], body["max_tokens_per_doc"]) == (False, 7)


class TestTokenizer:
    async def test_is_shown(self, server: FakeUpstream, opened: Open, tmp_path: Path) -> None:
        folder = checkpoints.checkpoint(tmp_path / "tiny")
        runner = await opened(tokenizer=str(folder), prompts={"q": "fish "}, default_prompt_name="q")
        assert isinstance(runner, TextCodec)
        tokens = (await runner.tokenize(["to"], add_special_tokens=True, prompt_name=None))[0]
        assert [token.text for token in tokens if not token.special] == ["fish", "to"]
        assert await runner.decode([[token.id for token in tokens]], skip_special_tokens=True) == ["fish to"]

    async def test_of_a_reranker(self, scores: FakeUpstream, opened: Open, tmp_path: Path) -> None:
        scores.on("/score", vllm_score())
        runner = await opened(scores, tokenizer=str(checkpoints.checkpoint(tmp_path / "tiny")))
        assert runner.facts.details["usage"] == "counted"
        assert isinstance(runner, TextCodec)
        assert len((await runner.tokenize(["fish to"], add_special_tokens=False, prompt_name=None))[0]) == 2
        assert (await rerank(runner, "fish", "to")).tokens == [5]

    async def test_without_one(self, opened: Open) -> None:
        runner = await opened()
        assert isinstance(runner, TextCodec)
        with pytest.raises(Unsupported, match="does not expose its tokenizer"):
            await runner.tokenize(["a"], add_special_tokens=True, prompt_name=None)
