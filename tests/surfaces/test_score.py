"""vLLM's /score and /pooling."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from shoal.backends.fake.model import compute_scores, compute_vector, tokenize_item
from shoal.core.registry import Model
from tests.surfaces.family_kit import CLASSIFIER, DIMENSION, EMBEDDER, RERANKER, SPLADE, family
from tests.surfaces.surface_kit import Server

TEXTS = ["a group of fish", "a kind of bread", "fish"]


def score(left: str, right: str, *, raw: bool = False) -> float:
    return float(compute_scores(tokenize_item((left, right)), 1, raw=raw)[0])


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with family() as server:
        yield server


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")]
)
async def test_one_against_many(server: Server, path: str, names: tuple[str, str]) -> None:
    """All field names, in order, in vLLM's envelope."""
    answer = await server.call("POST", path, {"model": RERANKER, names[0]: "what", names[1]: TEXTS})
    reply = answer.json()
    assert answer.status == 200
    assert list(reply) == ["id", "object", "created", "model", "data", "usage"]
    assert reply["id"] == f"score-{answer.headers['x-request-id']}"
    assert [(each["index"], each["object"]) for each in reply["data"]] == [(at, "score") for at in range(3)]
    assert [each["score"] for each in reply["data"]] == pytest.approx([score("what", each) for each in TEXTS])
    total = sum(len(tokenize_item(("what", each))) for each in TEXTS)
    assert reply["usage"] == {
        "prompt_tokens": total,
        "total_tokens": total,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }


async def test_pair_by_pair(server: Server) -> None:
    """Two lists of equal length; two texts; raw scores without the activation."""
    answer = await server.call("POST", "/score", {"text_1": TEXTS, "text_2": TEXTS[::-1]})
    pairs = list(zip(TEXTS, TEXTS[::-1], strict=True))
    assert [each["score"] for each in answer.json()["data"]] == pytest.approx([score(*pair) for pair in pairs])
    raw = await server.call("POST", "/score", {"text_1": "a", "text_2": "b", "use_activation": False})
    assert [each["score"] for each in raw.json()["data"]] == pytest.approx([score("a", "b", raw=True)])


@pytest.mark.parametrize("model", [CLASSIFIER, RERANKER])
async def test_pooling_without_an_embedder(model: str) -> None:
    """Without model and task, the scores of the served model. A named task is not replaced by another."""
    async with family(model) as server:
        plain = await server.call("POST", "/pooling", {"input": TEXTS})
        named = await server.call("POST", "/pooling", {"input": TEXTS, "model": model, "task": "classify"})
        refused = await server.call("POST", "/pooling", {"input": TEXTS, "task": "embed"})
    assert plain.status == 200
    assert plain.json()["data"] == named.json()["data"]
    assert refused.status == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 9}),
        ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 9}),
        ("/classify", {"input": "a", "truncate_prompt_tokens": 9}),
        ("/pooling", {"input": "a", "truncate_prompt_tokens": 9}),
        ("/v2/embed", {"texts": ["a"], "max_tokens": 9}),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 9}),
    ],
)
async def test_a_model_that_is_not_loaded(path: str, body: dict[str, Any]) -> None:
    """503 with Retry-After: its abilities are not known yet, so no field is rejected."""
    async with family(EMBEDDER) as server:
        server.gateway.registry.add(Model(name="late"))
        answer = await server.call("POST", path, {"model": "late", **body})
    assert (answer.status, answer.headers["retry-after"]) == (503, "2")


async def test_many_pairs(server: Server) -> None:
    """Two long lists, in a body that is decoded in slices."""
    left, right = ([f"{side} {at} " + "filler " * 8 for at in range(1024)] for side in "ab")
    answer = await server.call("POST", "/score", {"queries": left, "items": right})
    scores = [each["score"] for each in answer.json()["data"]]
    assert scores == pytest.approx([score(*pair) for pair in zip(left, right, strict=True)])
    wrong = await server.call("POST", "/score", {"queries": [*left, 7], "items": right})
    assert (wrong.status, wrong.json()["error"]["param"]) == (400, "queries")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"text_1": "a"}, "text_1", "Exactly two sides are required"),
        ({}, "text_1", "Exactly two sides are required"),
        ({"text_1": "a", "text_2": "b", "items": "c"}, "items", "Exactly two sides are required"),
        ({"text_1": "a", "text_2": []}, "text_2", "empty list"),
        ({"text_1": "a", "text_2": ["b"] * 2049}, "text_2", "2048"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, None, "2 texts cannot be paired with 1"),
        ({"text_1": "a", "text_2": {"content": []}}, "text_2", "'text_2' is invalid"),
        ({"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 7}, "truncate_prompt_tokens", "own length (512)"),
        ({"text_1": "a", "text_2": "b", "model": CLASSIFIER}, "model", "cannot rerank"),
    ],
)
async def test_refusals(server: Server, body: Any, param: str | None, words: str) -> None:
    """OpenAI's nested error, like vLLM's."""
    answer = await server.call("POST", "/v1/score", body)
    error = answer.json()["error"]
    assert (answer.status, set(error)) == (400, {"message", "type", "param", "code"})
    assert error["param"] == param
    assert words in error["message"]


async def test_keys() -> None:
    """Routes without /v1 require a key, too, unlike vLLM's."""
    async with family(api_key=("key",)) as server:
        for path in ("/score", "/v1/score", "/classify", "/v1/classify", "/pooling"):
            answer = await server.call("POST", path, {"input": "a"})
            assert (answer.status, answer.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_pooling_vectors(server: Server) -> None:
    """One per input, as numbers and in base64; without the activation they are not normalized."""
    reply = (await server.call("POST", "/pooling", {"model": EMBEDDER, "input": TEXTS})).json()
    packed = await server.call("POST", "/pooling", {"model": EMBEDDER, "input": TEXTS, "encoding_format": "base64"})
    assert reply["id"].startswith("pool-")
    for text, each, other in zip(TEXTS, reply["data"], packed.json()["data"], strict=True):
        expected = compute_vector(tokenize_item(text), DIMENSION)
        assert each["data"] == pytest.approx(expected / np.linalg.norm(expected), abs=1e-6)
        assert np.frombuffer(base64.b64decode(other["data"]), "<f4").tolist() == pytest.approx(each["data"])
    raw = await server.call("POST", "/pooling", {"input": "fish", "use_activation": False, "dimensions": 2})
    assert raw.json()["data"][0]["data"] == compute_vector(tokenize_item("fish"), DIMENSION)[:2].tolist()


async def test_pooling_token_vectors(server: Server) -> None:
    """One vector per token."""
    body = {"input": TEXTS, "task": "token_embed"}
    entries = (await server.call("POST", "/pooling", body)).json()["data"]
    packed = (await server.call("POST", "/pooling", {**body, "encoding_format": "base64"})).json()["data"]
    for at, text in enumerate(TEXTS):
        expected = np.stack([compute_vector([token], DIMENSION) for token in tokenize_item(text)])
        assert (entries[at]["index"], entries[at]["object"]) == (at, "pooling")
        assert entries[at]["data"] == expected.tolist()
        assert np.frombuffer(base64.b64decode(packed[at]["data"]), "<f4").tolist() == expected.ravel().tolist()
    none = await server.call("POST", "/pooling", {"model": SPLADE, **body})
    assert (none.status, "no tokens vectors" in none.json()["error"]["message"]) == (400, True)


async def test_pooling_scores(server: Server) -> None:
    """Of a classifier, also without a task; token ids cannot be classified."""
    for body in ({"model": CLASSIFIER, "input": TEXTS}, {"task": "classify", "model": CLASSIFIER, "input": TEXTS}):
        entries = (await server.call("POST", "/pooling", body)).json()["data"]
        for text, each in zip(TEXTS, entries, strict=True):
            assert each["data"] == pytest.approx(compute_scores(tokenize_item(text), 3, raw=False).tolist())
    ids = await server.call("POST", "/pooling", {"model": CLASSIFIER, "input": [1, 2]})
    assert (ids.status, ids.json()["error"]["param"]) == (400, "input")
