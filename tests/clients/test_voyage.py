"""Voyage's client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import voyageai

from shoal.backends.fake.model import compute_scores, compute_vector, tokenize_item
from tests.integration.llm_kit import running

TEXTS = ["a group of fish", "a kind of bread", "water that is not deep"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with running(tmp_path_factory.mktemp("voyage"), "embedder=fake:", "reranker=fake:labels=1") as server:
        yield voyageai.Client(api_key="any", base_url=f"{server.base_url}/v1")


def unit(text: str) -> Any:
    vector = compute_vector(tokenize_item(text), 32)
    return vector / np.linalg.norm(vector)


def test_embed(client: Any) -> None:
    """Floats in base64, its default, and the token count."""
    reply = client.embed(TEXTS, model="embedder", input_type="document")
    assert np.allclose(reply.embeddings, [unit(text) for text in TEXTS], atol=1e-6)
    assert reply.total_tokens == sum(len(tokenize_item(text)) for text in TEXTS)


@pytest.mark.parametrize(("dtype", "width"), [("int8", 8), ("uint8", 8), ("binary", 1), ("ubinary", 1)])
def test_narrow_numbers(client: Any, dtype: str, width: int) -> None:
    """It decodes base64 by the requested type."""
    reply = client.embed(TEXTS, model="embedder", output_dtype=dtype, output_dimension=8)
    cut = np.array([unit(text)[:8] for text in TEXTS])
    cut /= np.linalg.norm(cut, axis=1, keepdims=True)
    expected = {
        "int8": np.rint(cut * 127),
        "uint8": np.rint(cut * 127) + 128,
        "ubinary": np.packbits(cut > 0, axis=1),
        "binary": np.packbits(cut > 0, axis=1).astype(int) - 128,
    }[dtype]
    assert np.shape(reply.embeddings) == (3, width)
    assert np.array_equal(reply.embeddings, expected)


def test_rerank(client: Any) -> None:
    """Best first, with the caller's own documents."""
    ranking = client.rerank("a shoal", TEXTS, model="reranker", top_k=2)
    scores = [float(compute_scores(tokenize_item(("a shoal", text)), 1, raw=False)[0]) for text in TEXTS]
    order = sorted(range(3), key=lambda at: -scores[at])[:2]
    assert [(each.index, each.document) for each in ranking.results] == [(at, TEXTS[at]) for at in order]
    assert [each.relevance_score for each in ranking.results] == pytest.approx([scores[at] for at in order])
    assert len(client.rerank("a shoal", TEXTS, model="reranker").results) == 3


def test_errors(client: Any) -> None:
    """Its own exceptions, with the reason."""
    with pytest.raises(voyageai.error.InvalidRequestError, match="empty list"):
        client.rerank("a shoal", [], model="reranker")
    with pytest.raises(voyageai.error.MalformedRequestError, match="'top_k' is invalid"):
        client.rerank("a shoal", TEXTS, model="reranker", top_k=-1)
    with pytest.raises(voyageai.error.APIError, match="does not exist"):
        client.rerank("a shoal", TEXTS, model="nobody")
