"""LangChain's classes for NVIDIA NIM."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_nvidia_ai_endpoints import NVIDIAEmbeddings, NVIDIARerank

from shoal.backends.fake.model import compute_scores, compute_vector, tokenize_item
from tests.integration.llm_kit import running

TEXTS = ["a group of fish", "a kind of bread", "water that is not deep"]


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(tmp_path_factory.mktemp("nvidia"), "embedder=fake:", "reranker=fake:labels=1") as server:
        yield f"{server.base_url}/v1"


@pytest.mark.filterwarnings("ignore:Found embedder")
def test_embeddings(base_url: str) -> None:
    """Queries and passages, in the order of the texts, more than one of its requests holds."""
    model = NVIDIAEmbeddings(base_url=base_url, model="embedder", nvidia_api_key="any", truncate="END")
    texts = [f"text {at}" for at in range(120)]
    for text, vector in zip(texts, model.embed_documents(texts), strict=True):
        expected = compute_vector(tokenize_item(text), 32)
        assert np.allclose(vector, expected / np.linalg.norm(expected), atol=1e-6)
    assert len(model.embed_query("a shoal")) == 32


@pytest.mark.filterwarnings("ignore:Found reranker")
def test_rerank(base_url: str) -> None:
    """By logits, in the server's order."""
    model = NVIDIARerank(base_url=base_url, model="reranker", nvidia_api_key="any", top_n=2)
    ranking = model.compress_documents([Document(text) for text in TEXTS], "a shoal")
    logits = {text: float(compute_scores(tokenize_item(("a shoal", text)), 1, raw=True)[0]) for text in TEXTS}
    assert [each.page_content for each in ranking] == sorted(TEXTS, key=lambda text: -logits[text])[:2]
    assert [each.metadata["relevance_score"] for each in ranking] == pytest.approx(sorted(logits.values())[:0:-1])
