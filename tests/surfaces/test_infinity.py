"""Infinity's routes: images on their own path, and its formats of /health and /models under its preset."""

from __future__ import annotations

import base64
import time
from typing import Any

import numpy as np
import pytest

from shoal.backends.fake.model import compute_vector, tokenize_item
from shoal.types import Image
from tests.surfaces.family_kit import CLASSIFIER, CLIP, DIMENSION, EMBEDDER, RERANKER, family
from tests.surfaces.image_fetch_kit import ONE, Album

SEEN = Image(b"the bytes of a picture, or nearly")
DATA = f"data:image/png;base64,{base64.b64encode(SEEN.data).decode()}"
INFINITY: dict[str, Any] = {"status_dialect": "infinity", "max_batch_size": 32, "max_queue_items": 100}


def unit(image: Image) -> Any:
    vector = compute_vector(tokenize_item(image), DIMENSION)
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("path", ["/embeddings_image", "/v1/embeddings_image"])
async def test_image_path(path: str) -> None:
    """Each input is an image, by URL or data URI; the default model is the first embedder."""
    async with family(CLIP, EMBEDDER, image_reader=Album().image_reader()) as server:
        for body, images in (
            ({"input": [DATA, ONE], "model": CLIP}, [SEEN, Image(ONE.encode())]),
            ({"input": DATA, "model": "default/not-specified", "encoding_format": "float", "user": "u"}, [SEEN]),
            ({"input": DATA}, [SEEN]),
        ):
            reply = (await server.call("POST", path, body)).json()
            assert reply["model"] == CLIP
            assert np.allclose(
                [each["embedding"] for each in reply["data"]], [unit(each) for each in images], atol=1e-6
            )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"input": [DATA], "model": EMBEDDER}, "accepts only text"),
        ({"input": ["no picture"], "model": CLIP}, "input"),
        ({"input": [DATA], "model": CLIP, "modality": "text"}, "'modality' is invalid"),
    ],
)
async def test_invalid_images(body: Any, reason: str) -> None:
    """Like /embeddings, in OpenAI's format."""
    async with family(EMBEDDER, CLIP, image_reader=Album().image_reader()) as server:
        answer = await server.call("POST", "/embeddings_image", body)
    assert answer.status == 400
    assert reason in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/models", "/v1/models"])
async def test_lists_have_stats_and_capabilities(path: str) -> None:
    """They are added to Shoal's own fields, with the owner that Infinity's client requires."""
    async with family(EMBEDDER, RERANKER, CLASSIFIER, CLIP, **INFINITY) as server:
        server.gateway.registry.find(EMBEDDER).inflight = 25
        reply = (await server.call("GET", path)).json()
    assert reply["object"] == "list"
    assert {each["id"]: each["capabilities"] for each in reply["data"]} == {
        EMBEDDER: ["embed"],
        RERANKER: ["rerank", "classify"],
        CLASSIFIER: ["classify"],
        CLIP: ["embed", "image_embed"],
    }
    assert {each["owned_by"] for each in reply["data"]} == {"infinity"}
    first = reply["data"][0]
    assert first["stats"] == {
        "queue_fraction": 0.25,
        "queue_absolute": 25,
        "results_pending": 25,
        "batch_size": 32,
    }
    assert (first["object"], first["status"], first["dimension"]) == ("model", {"value": "loaded"}, DIMENSION)


async def test_a_model_without_requests_is_idle() -> None:
    """Its queue fraction is 0; that of an overfull queue is 1."""
    async with family(EMBEDDER, **INFINITY) as server:
        (idle,) = (await server.call("GET", "/models")).json()["data"]
        server.gateway.registry.find(EMBEDDER).inflight = 1000
        (busy,) = (await server.call("GET", "/models")).json()["data"]
    assert (idle["stats"]["queue_fraction"], busy["stats"]["queue_fraction"]) == (0.0, 1.0)


async def test_health_returns_the_time() -> None:
    """The time while healthy; with `Accept: application/json` Shoal's own format, else 503."""
    async with family(EMBEDDER, **INFINITY) as server:
        for path in ("/health", "/v1/health"):
            answer = await server.call("GET", path, headers={"accept": "*/*"})
            assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
            assert list(answer.json()) == ["unix"]
            assert abs(answer.json()["unix"] - time.time()) < 60
        own = await server.call("GET", "/health", headers={"accept": "application/json"})
        assert own.json()["status"] == "ok"
        for model in server.gateway.registry:
            model.state = "failed"
        assert (await server.call("GET", "/health")).status == 503


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_requests_without_raw_scores(prefix: str) -> None:
    """Under the preset, the original's published requests get its replies: documents are texts, only on request."""
    ranked = {"model": RERANKER, "query": "q", "documents": ["a", "b"]}
    async with family(RERANKER, CLASSIFIER, **INFINITY) as server:
        plain = (await server.call("POST", f"{prefix}/rerank", ranked)).json()
        shown = (await server.call("POST", f"{prefix}/rerank", {**ranked, "return_documents": True})).json()
        classes = (await server.call("POST", f"{prefix}/classify", {"model": CLASSIFIER, "input": ["a"]})).json()
    assert plain["object"] == shown["object"] == "rerank"
    assert all("document" not in each for each in plain["results"])
    assert {each["document"] for each in shown["results"]} == {"a", "b"}
    assert classes["object"] == "classify"
    assert [set(each) for each in classes["data"][0]] == [{"score", "label"}] * len(classes["data"][0])


async def test_without_the_preset() -> None:
    """Lists have OpenAI's owner, and /health is two bytes of text."""
    async with family(EMBEDDER) as server:
        for path in ("/models", "/v1/models"):
            (entry,) = (await server.call("GET", path)).json()["data"]
            assert entry["owned_by"] == "shoal"
            assert not {"stats", "capabilities"} & entry.keys()
        assert (await server.call("GET", "/health")).body == b"ok"
