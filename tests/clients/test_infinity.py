"""Infinity's generated client, every function of it, against its preset: /health, /models, /embeddings,
/embeddings_image, /rerank, /classify, / and /metrics."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from infinity_client import Client
from infinity_client.api.default import (
    classify,
    embeddings,
    embeddings_audio,
    embeddings_image,
    health,
    metrics_metrics_get,
    models,
    redirect_get,
    rerank,
)
from infinity_client.models import (
    AudioEmbeddingInput,
    ClassifyInput,
    ImageEmbeddingInput,
    OpenAIEmbeddingInputImage,
    OpenAIEmbeddingInputText,
    RerankInput,
)

from shoal.backends.fake.model import compute_scores, compute_vector, tokenize_item
from shoal.types import Image
from tests.integration.llm_kit import running

TEXTS = ["a group of fish", "a kind of bread"]
IMAGE = Image(b"a file that nobody looks into")
IMAGE_URI = f"data:image/png;base64,{base64.b64encode(IMAGE.data).decode()}"
MODELS = ("embedder=fake:", "clip=fake:images=1", "reranker=fake:labels=1", "classifier=fake:labels=3")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with (
        running(tmp_path_factory.mktemp("infinity"), *MODELS, flags=("--as", "infinity")) as server,
        Client(base_url=server.base_url, raise_on_unexpected_status=True) as client,
    ):
        yield client


def unit(item: str | Image) -> Any:
    vector = compute_vector(tokenize_item(item), 32)
    return vector / np.linalg.norm(vector)


def test_health(client: Any) -> None:
    """The server's clock."""
    assert health.sync(client=client)["unix"] > 0


def test_models(client: Any) -> None:
    """Each model's capabilities and load."""
    entries = {each.id: each for each in models.sync(client=client).data}
    assert {"embedder", "clip", "reranker", "classifier"} <= entries.keys()
    assert entries["clip"].capabilities == ["embed", "image_embed"]
    assert entries["embedder"].stats["queue_fraction"] == 0
    assert entries["embedder"].stats["batch_size"] == 32


def test_embeddings(client: Any) -> None:
    """Texts and images."""
    reply = embeddings.sync(client=client, body=OpenAIEmbeddingInputText(input_=TEXTS))
    assert np.allclose([each.embedding for each in reply.data], [unit(text) for text in TEXTS], atol=1e-6)
    reply = embeddings.sync(client=client, body=OpenAIEmbeddingInputImage(input_=[IMAGE_URI], model="clip"))
    assert np.allclose([each.embedding for each in reply.data], [unit(IMAGE)], atol=1e-6)


def test_embeddings_image(client: Any) -> None:
    """The path of its older versions."""
    reply = embeddings_image.sync(client=client, body=ImageEmbeddingInput(input_=[IMAGE_URI, IMAGE_URI], model="clip"))
    assert np.allclose([each.embedding for each in reply.data], [unit(IMAGE)] * 2, atol=1e-6)


def test_no_sound(client: Any) -> None:
    """No model takes audio: the route does not exist."""
    with pytest.raises(Exception, match="404"):
        embeddings_audio.sync(client=client, body=AudioEmbeddingInput(input_=[IMAGE_URI], model="clip"))


def test_rerank(client: Any) -> None:
    """With the documents, best first."""
    ranking = rerank.sync(client=client, body=RerankInput(query="q", documents=TEXTS, return_documents=True))
    scores = [float(compute_scores(tokenize_item(("q", text)), 1, raw=False)[0]) for text in TEXTS]
    assert [each.relevance_score for each in ranking.results] == pytest.approx(sorted(scores, reverse=True))
    assert [each.document for each in ranking.results] == [TEXTS[each.index] for each in ranking.results]


def test_classify(client: Any) -> None:
    """Every label with its score."""
    reply = classify.sync(client=client, body=ClassifyInput(input_=TEXTS))
    assert [len(each) for each in reply.data] == [3, 3]
    assert sum(each.score for each in reply.data[0]) == pytest.approx(1.0, abs=1e-5)


def test_pages(client: Any) -> None:
    """The start page and the metrics answer."""
    assert redirect_get.sync_detailed(client=client).status_code == 200
    assert b"shoal_requests" in metrics_metrics_get.sync_detailed(client=client).content
