"""Shoal in front of another Shoal, over OpenAI's API and vLLM's: vectors, token ids, rankings, classes and failures.
Both run in their own processes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.llm_kit import UNBOUNDED_QUEUE, metric, running, until, upstream_of
from tests.integration.server_kit import Server
from tests.unit.models import checkpoints

Reply = tuple[int, dict[str, str], bytes]
FAR = "far"
DOCUMENTS = ["one", "two words", "drei Wörter"]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as executor:
        yield executor


IDS = ("--token-ids", "accept")


@pytest.fixture(scope="class")
def pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[tuple[Server, Server]]:
    """(front server for clients, server with the model), shared by the tests of a class."""
    folder = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack:
        flags = (*UNBOUNDED_QUEUE, *IDS)
        behind = stack.enter_context(running(folder / "behind", f"{FAR}={request.param}", flags=flags))
        address = f"near={upstream_of(behind, FAR)}"
        yield stack.enter_context(running(folder / "front", address, flags=UNBOUNDED_QUEUE)), behind


def rerank(server: Server, query: str, documents: list[str], **fields: Any) -> Reply:
    return server.request("POST", "/v1/rerank", {"query": query, "documents": documents, **fields})


def scores_of(reply: Reply) -> list[float]:
    """Scores in document order."""
    assert reply[0] == 200, reply[2]
    results = json.loads(reply[2])["results"]
    return [each["relevance_score"] for each in sorted(results, key=lambda each: int(each["index"]))]


def json_of(reply: Reply) -> Any:
    assert reply[0] == 200, reply[2]
    return json.loads(reply[2])


def card_of(server: Server, name: str = "near") -> Any:
    return json_of(server.request("GET", f"/v1/models/{name}"))


@pytest.mark.parametrize("pair", ["fake:labels=1:delay_ms=2"], indirect=True)
class TestRanking:
    def test_scores_are_the_same(self, pair: tuple[Server, Server], pool: ThreadPoolExecutor) -> None:
        """Scores of many users share few calls; includes raw scores, on each ranking route."""
        front, behind = pair
        for raw in (False, True):
            own = scores_of(rerank(behind, "q", DOCUMENTS, raw_scores=raw))
            assert np.allclose(scores_of(rerank(front, "q", DOCUMENTS, raw_scores=raw)), own, atol=1e-5)
        before = metric(behind, "shoal_batch_size_count")
        pending: list[Future[Reply]] = [pool.submit(rerank, front, f"query {at}", DOCUMENTS) for at in range(40)]
        for at, one in enumerate(pending):
            scores = scores_of(one.result())
            if at % 10 == 0:
                assert np.allclose(scores, scores_of(rerank(behind, f"query {at}", DOCUMENTS)), atol=1e-5)
        assert metric(behind, "shoal_batch_size_count") - before < 40
        body = {"query": "q", "texts": DOCUMENTS}
        ranking, own = (json_of(server.request("POST", "/rerank", body)) for server in pair)
        assert [each["index"] for each in ranking] == [each["index"] for each in own]

    def test_card_and_labels(self, pair: tuple[Server, Server]) -> None:
        card = card_of(pair[0])
        assert (card["tasks"], card["labels"]) == (["rerank", "classify"], ["LABEL_0"])
        assert card["details"]["routes"] == ["/score", "/classify"]
        found = json_of(pair[0].request("POST", "/classify", {"input": ["a text alone", ["a", "pair"]]}))
        own = json_of(pair[1].request("POST", "/classify", {"input": ["a text alone", ["a", "pair"]]}))
        scores, expected = ([each["probs"] for each in reply["data"]] for reply in (found, own))
        assert np.allclose(scores, expected, atol=1e-5)
        assert found["usage"]["prompt_tokens"] == own["usage"]["prompt_tokens"]

    def test_a_poisoned_pair_fails_alone(self, pair: tuple[Server, Server], pool: ThreadPoolExecutor) -> None:
        front, _ = pair
        texts = [f"text {at}" for at in range(40)]
        bad = {7: "poison-item", 23: "reject-item"}
        pending = [pool.submit(rerank, front, "q", [bad.get(at, text)]) for at, text in enumerate(texts)]
        statuses = [one.result()[0] for one in pending]
        assert [at for at, status in enumerate(statuses) if status != 200] == [*bad]

    def test_a_server_that_dies_and_comes_back(self, pair: tuple[Server, Server], tmp_path: Path) -> None:
        """It comes back as another process on the same port. Last, as it ends a server of the class."""
        front, behind = pair
        behind.process.send_signal(signal.SIGKILL)
        behind.process.wait()
        until(lambda: front.request("GET", "/health/ready")[0] == 503)
        assert rerank(front, "q", DOCUMENTS)[0] == 503
        with running(tmp_path / "again", f"{FAR}=fake:labels=1", port=behind.port) as again:
            until(lambda: front.request("GET", "/health/ready")[0] == 200)
            assert np.allclose(
                scores_of(rerank(front, "q", DOCUMENTS)), scores_of(rerank(again, "q", DOCUMENTS)), atol=1e-5
            )


def test_a_server_that_is_full_is_waited_for(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """The server answers whole calls with 429, and every pair is still scored."""
    flags = ("--max-queue-items", "8")
    with (
        running(tmp_path / "behind", f"{FAR}=fake:labels=1:delay_ms=20", flags=flags) as behind,
        running(tmp_path / "front", f"near={upstream_of(behind, FAR)}", flags=("--max-batch-size", "4")) as front,
    ):
        own = [pool.submit(rerank, behind, "own", [f"own {at}"]) for at in range(30)]
        pending = [pool.submit(rerank, front, "q", [f"text {at}"]) for at in range(8)]
        assert {one.result()[0] for one in pending} == {200}
        assert 429 in {one.result()[0] for one in own}


@pytest.mark.parametrize("pair", ["fake:labels=3"], indirect=True)
def test_classes_are_the_same(pair: tuple[Server, Server], pool: ThreadPoolExecutor) -> None:
    """Scores follow the order of labels that the upstream lists; includes raw scores."""
    front, _ = pair
    card = card_of(front)
    assert (card["tasks"], card["labels"]) == (["classify"], ["LABEL_0", "LABEL_1", "LABEL_2"])
    for fields in ({}, {"use_activation": False}):
        body = {"input": [f"text {at}" for at in range(20)] + [["a", "pair"]], **fields}
        labels, own = (json_of(server.request("POST", "/classify", body))["data"] for server in pair)
        assert [each["label"] for each in labels] == [each["label"] for each in own]
        assert np.allclose([each["probs"] for each in labels], [each["probs"] for each in own], atol=1e-5)
    assert rerank(front, "q", ["a"], model="near")[0] == 400


@pytest.mark.parametrize("pair", ["fake:delay_ms=2"], indirect=True)
class TestVectors:
    def embed(self, server: Server, inputs: Any, **fields: Any) -> Any:
        body = {"model": FAR if server.port == self.port else "near", "input": inputs, **fields}
        reply = json_of(server.request("POST", "/v1/embeddings", body))
        return np.array([each["embedding"] for each in reply["data"]], dtype=np.float32)

    port = 0

    def test_texts_ids_and_options(self, pair: tuple[Server, Server], pool: ThreadPoolExecutor) -> None:
        front, behind = pair
        self.port = behind.port
        cases: list[tuple[Any, dict[str, Any]]] = [
            (["a", "b c"], {}),
            ([[1, 2, 3], [4]], {}),
            ("text", {"dimensions": 8}),
        ]
        pending = [(each, pool.submit(self.embed, front, each[0], **each[1])) for each in cases for _ in range(10)]
        for (inputs, fields), one in pending:
            assert np.allclose(one.result(), self.embed(behind, inputs, **fields), atol=1e-5)
        refused = front.request("POST", "/v1/embeddings", {"model": "near", "input": "text", "normalize": False})
        assert (refused[0], b"only returns normalized vectors" in refused[2]) == (400, True)

    def test_ranking_by_vectors(self, pair: tuple[Server, Server]) -> None:
        """A model that embeds but does not rank gets no rerank request."""
        front, behind = pair
        assert card_of(front)["tasks"] == ["embed", "generate"]
        assert np.allclose(
            scores_of(rerank(front, "q", DOCUMENTS)), scores_of(rerank(behind, "q", DOCUMENTS)), atol=1e-5
        )


def test_a_tokenizer_is_shown(tmp_path: Path) -> None:
    folder = checkpoints.checkpoint(tmp_path / "tiny")
    config = tmp_path / "shoal.toml"
    with running(tmp_path / "behind", f"{FAR}=fake:") as behind:
        config.write_text(f'[models."near"]\nbackends = ["{upstream_of(behind, FAR)}"]\ntokenizer = "{folder}"\n')
        with running(tmp_path / "front", flags=("--config", str(config))) as front:
            tokens = json_of(front.request("POST", "/tokenize", {"inputs": "fish to"}))[0]
            assert [each["text"] for each in tokens if not each["special"]] == ["fish", "to"]
            ids = [each["id"] for each in tokens]
            assert json_of(front.request("POST", "/decode", {"ids": ids})) == ["fish to"]
