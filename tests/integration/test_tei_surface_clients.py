"""Clients of text-embeddings-inference against `shoal serve --as tei`, with a model of each kind.

huggingface_hub's client is the real one. LangChain, LlamaIndex, Haystack and Continue are represented by the requests
that they send, as seen on the wire (llama-index 0.6.0, haystack 2.31, Continue 26952c45), and the parts of the answer
that they read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from shoal.backends.fake.model import compute_scores, compute_vector, tokenize_item
from tests.integration.server_kit import Server, ShoalServer, wait_until

MODELS = ["embedder=fake:vectors=dense+tokens:dimension=8", "splade=fake:vectors=sparse", "ranker=fake:labels=1"]
FLAGS = ["--as", "tei", "--max-client-batch-size", "64", "--auto-truncate", "--json-output"]
TEXT = "Today is a sunny day and I will get some ice cream."


@pytest.fixture(scope="module")
def server(shared_server: ShoalServer) -> Iterator[Server]:
    """One model of every kind, each route with its own default."""
    yield shared_server([*MODELS, "classifier=fake:labels=3"], *FLAGS)


def unit(text: str) -> Any:
    vector = compute_vector(tokenize_item(text), 8)
    return vector / np.linalg.norm(vector)


class TestHub:
    """huggingface_hub.InferenceClient, which posts to its address unchanged."""

    def test_feature_extraction(self, server: Server) -> None:
        """By the route and by the bare address; two-dimensional for one text, with every option."""
        for address in (f"{server.base_url}/embed", server.base_url):
            client = InferenceClient(address)
            assert np.allclose(client.feature_extraction(TEXT), [unit(TEXT)])
            vectors = client.feature_extraction([TEXT, "a"], normalize=True, truncate=True, truncation_direction="Left")  # type: ignore[arg-type]  # sent as it is
            assert np.allclose(vectors, [unit(TEXT), unit("a")])
            raw = client.feature_extraction(TEXT, normalize=False)
            assert np.allclose(raw, [compute_vector(tokenize_item(TEXT), 8)])

    def test_sentence_similarity(self, server: Server) -> None:
        """The client sends empty `parameters` as well."""
        for address in (f"{server.base_url}/similarity", server.base_url):
            scores = InferenceClient(address).sentence_similarity(TEXT, other_sentences=[TEXT, "a"])
            assert scores == pytest.approx([1.0, float(unit(TEXT) @ unit("a"))], abs=1e-5)

    def test_text_classification(self, server: Server) -> None:
        """By the route and by the bare address, beside an embedder. The client reads only the first label of the flat
        answer, here as with the original."""
        scores = compute_scores(tokenize_item(TEXT), 3, raw=False)
        for address in (f"{server.base_url}/predict", server.base_url):
            client = InferenceClient(address)
            for best in (client.text_classification(TEXT), client.text_classification(TEXT, top_k=1)):
                first: Any = best
                assert first["label"] == f"LABEL_{int(scores.argmax())}"
                assert first["score"] == pytest.approx(float(scores.max()), rel=1e-5)

    def test_the_endpoint_s_card(self, server: Server) -> None:
        """GET /info and GET /health, which it calls on an endpoint of its own provider."""
        client = InferenceClient(server.base_url, provider="hf-inference")
        assert client.health_check()
        info = client.get_endpoint_info()
        assert info["model_type"] == {"embedding": {"pooling": ""}}
        assert (info["max_client_batch_size"], info["auto_truncate"]) == (64, True)

    def test_errors_carry_the_reason(self, server: Server) -> None:
        """The exception's message has the body's `error`."""
        client = InferenceClient(f"{server.base_url}/embed")
        with pytest.raises(HfHubHTTPError, match="`inputs` cannot be empty"):
            client.feature_extraction("")
        with pytest.raises(HfHubHTTPError, match="batch size 65 > maximum allowed batch size 64"):
            client.feature_extraction(["a"] * 65)


def post(server: Server, path: str, body: Any, **headers: str) -> Any:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        all_headers = {
            "content-type": "application/json",
            **{name.replace("_", "-"): text for name, text in headers.items()},
        }
        connection.request("POST", path, json.dumps(body), all_headers)
        reply = connection.getresponse()
        content = reply.read()
        assert reply.status == 200, content
        return json.loads(content)
    finally:
        connection.close()


class TestRecorded:
    """Requests that other clients send."""

    def test_llama_index_embeds(self, server: Server) -> None:
        """POST /embed with ten texts each, with a key although none is required."""
        vectors = post(server, "/embed", {"inputs": [TEXT, "a"], "truncate": True}, authorization="Bearer k")
        assert np.allclose(vectors, [unit(TEXT), unit("a")])

    def test_llama_index_reranks(self, server: Server) -> None:
        """As many rows as texts, by index and score."""
        rows = post(server, "/rerank", {"query": "q", "texts": ["a", "b", "c"]}, authorization="k")
        assert sorted(row["index"] for row in rows) == [0, 1, 2]
        assert [row["score"] for row in rows] == sorted((row["score"] for row in rows), reverse=True)

    def test_haystack(self, server: Server) -> None:
        """Its ranker relies on the order; its embedders post to the bare address, unnormalized."""
        body = {
            "query": "q",
            "texts": ["a", "b"],
            "raw_scores": False,
            "truncate": True,
            "truncation_direction": "Left",
        }
        assert len(post(server, "/rerank", body)) == 2
        vectors = post(server, "/", {"inputs": ["a"], "normalize": False, "truncate": True})
        assert vectors == [compute_vector(tokenize_item("a"), 8).tolist()]

    def test_langchain(self, server: Server) -> None:
        """Old versions send `parameters` with everything."""
        assert len(post(server, "/", {"inputs": ["a", "b"], "parameters": {}})) == 2

    def test_continue(self, server: Server) -> None:
        """It reads from /info how many texts it may send, then embeds and reranks."""
        status, _, content = server.request("GET", "/info")
        info = json.loads(content)
        assert status == 200
        assert info["model_id"] == "embedder"
        assert len(post(server, "/embed", {"inputs": ["a"] * info["max_client_batch_size"]})) == 64
        body = {"query": "q", "return_text": False, "raw_scores": False, "texts": ["a"], "truncate": True}
        assert list(post(server, "/rerank", {**body, "truncation_direction": "Right"})[0]) == ["index", "score"]


def test_the_original_s_curl_lines(server: Server) -> None:
    """Those of its README and its documentation: each is answered in the original's form."""
    deep = "What is Deep Learning?"
    assert len(post(server, "/embed", {"inputs": deep})[0]) == 8
    rows = post(server, "/rerank", {"query": deep, "texts": ["Deep Learning is not...", "Deep learning is..."]})
    assert {frozenset(row) for row in rows} == {frozenset(("index", "score"))}
    assert [set(row) for row in post(server, "/predict", {"inputs": "I like you."})] == [{"score", "label"}] * 3
    batch = post(server, "/predict", {"inputs": [["I like you."], ["I hate pineapples"]]})
    assert [len(rows) for rows in batch] == [3, 3]
    sparse = post(server, "/embed_sparse", {"inputs": "I like you."})
    assert set(sparse[0][0]) == {"index", "value"}


def test_its_metrics(shoal_server: ShoalServer) -> None:
    """The original's metrics stand beside Shoal's own, for existing dashboards."""
    server = shoal_server([*MODELS, "classifier=fake:labels=3"], *FLAGS)
    post(server, "/embed", {"inputs": ["a", "b"]})
    post(server, "/predict", {"inputs": "a"})
    _, _, content = server.request("GET", "/metrics")
    lines = content.decode().splitlines()
    assert 'te_request_count{method="batch"} 1' in lines
    assert 'te_request_success{method="single"} 1' in lines
    assert "te_embed_success 2" in lines
    assert "te_predict_success 1" in lines
    assert any(line.startswith("shoal_requests_total") for line in lines)


def test_started_by_its_environment(shoal_server: ShoalServer) -> None:
    """As in its container: one model, which / uses, and a key required for everything but probes."""
    environ = {"MODEL_ID": "fake:labels=1", "API_KEY": "k", "MAX_CLIENT_BATCH_SIZE": "4", "HOSTNAME": "4f1d2c3b4a5e"}
    server = shoal_server([], "--as", "tei", env=environ)
    wait_until(lambda: server.request("GET", "/ping")[0] == 200, server.process, server.log)
    status, _, body = server.request("POST", "/predict", {"inputs": "a"})
    assert (status, body) == (401, b"")
    keyed = {"authorization": "Bearer k"}
    assert len(post(server, "/rerank", {"query": "q", "texts": ["a"] * 4}, **keyed)) == 4
    assert len(post(server, "/", {"query": "q", "texts": ["a", "b"]}, **keyed)) == 2
    with pytest.raises(HfHubHTTPError, match="Model is not an embedding model"):
        InferenceClient(f"{server.base_url}/embed", token="k").feature_extraction("a")
