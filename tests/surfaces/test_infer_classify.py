"""/classify_image, and facts of a model by its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.backends.fake.model import compute_scores, tokenize_item
from shoal.core.lifecycle.lifecycle import Entry
from shoal.specs import ContrastSpec
from shoal.types import Image
from tests.surfaces.family_kit import CLASSIFIER, CLIP, DIMENSION, EMBEDDER, SPLADE, family
from tests.surfaces.image_form_kit import BLUE, RED, close, inline, wanted
from tests.surfaces.life_kit import OTHER, Scripted, living
from tests.surfaces.surface_kit import MODEL

IMAGES = {"modalities": ("text", "image")}


def logits(images: list[bytes], labels: list[str]) -> Any:
    cosine = np.array([wanted(each) for each in images]) @ np.array([wanted(each) for each in labels]).T
    return 10.0 * cosine


@pytest.mark.parametrize("key", ["model_name", "name"])
async def test_labels_of_the_request(key: str) -> None:
    """For each image a softmax of the scaled cosine over the labels."""
    labels = ["a cat", "a dog", "red"]
    async with family(CLIP) as server:
        body = {key: CLIP, "image": [inline(RED), inline(BLUE)], "labels": labels}
        answer = await server.call("POST", "/classify_image", body)
        assert answer.status == 200, answer.body
        assert list(answer.json()) == ["probabilities", "processingTimeMs"]
        powers = np.exp(logits([RED, BLUE], labels))
        close(answer.json()["probabilities"], powers / powers.sum(axis=1, keepdims=True))
        assert "x-shoal-batch-size" in answer.headers


async def test_a_sigmoid_model() -> None:
    """Sigmoid, with the model's bias."""
    scoring = ContrastSpec(scale=10.0, bias=-8.0, activation="sigmoid")
    async with family(CLIP, facts={"contrast": scoring}) as server:
        body = {"name": CLIP, "image": inline(RED), "labels": ["a cat", "a dog"]}
        answer = await server.call("POST", "/classify_image", body)
        close(answer.json()["probabilities"], 1 / (1 + np.exp(8.0 - logits([RED], ["a cat", "a dog"]))))


async def test_labels_of_the_model() -> None:
    """One probability per label of the model, in order."""
    async with family(CLASSIFIER, facts=IMAGES) as server:
        answer = await server.call(
            "POST", "/classify_image", {"name": CLASSIFIER, "image": [inline(RED), inline(BLUE)]}
        )
        assert answer.status == 200, answer.body
        rows = [compute_scores(tokenize_item(Image(each)), 3, raw=False) for each in (RED, BLUE)]
        close(answer.json()["probabilities"], rows)
        close(np.sum(answer.json()["probabilities"], axis=1), [1.0, 1.0])


REFUSED: list[tuple[str, Any, str]] = [
    (EMBEDDER, {}, "does not support image inference."),
    (CLASSIFIER, {}, "does not support image inference."),
    (EMBEDDER, {"labels": ["a"]}, "does not support image inference."),
    (CLIP, {}, "is not a classification model. Send `labels` to compare with the image."),
]


@pytest.mark.parametrize(("model", "more", "detail"), REFUSED)
async def test_models_that_cannot(model: str, more: Any, detail: str) -> None:
    """The original's message, and a next step if there is one."""
    async with family(CLIP, EMBEDDER, CLASSIFIER) as server:
        answer = await server.call("POST", "/classify_image", {"model_name": model, "image": "x", **more})
        assert (answer.status, answer.json()) == (400, {"detail": f"Model {model} with checkpoint None {detail}"})


async def test_image_models_that_cannot() -> None:
    """Labels require a model that compares images with texts; without labels, a classifier is required."""
    for model, body, detail in (
        (CLASSIFIER, {"labels": ["a"]}, "does not compare images with texts; omit `labels`"),
        (EMBEDDER, {}, "is not a classification model."),
    ):
        async with family(model, facts={**IMAGES, "contrast": None}) as server:
            answer = await server.call("POST", "/classify_image", {"name": model, "image": inline(RED), **body})
            assert (answer.status, detail in answer.json()["detail"]) == (400, True)


@pytest.mark.parametrize(
    ("more", "detail"),
    [
        ({"labels": []}, "`labels` is an empty list; send at least two, or omit it."),
        ({"image": []}, "`image` is an empty list; send at least one image."),
        (
            {"labels": ["a", "b", "c"], "image": ["x", "y"]},
            "`labels` and `image` have more than 4 inputs in total; split the request.",
        ),
        ({"image": "/etc/passwd", "labels": ["a"]}, "Invalid image. "),
        ({"model_name": "nobody"}, "Model nobody with checkpoint None is not loaded. Load the model first using"),
    ],
)
async def test_refused(more: Any, detail: str) -> None:
    """400, before anything is computed."""
    async with family(CLIP, max_inputs=4) as server:
        answer = await server.call("POST", "/classify_image", {"model_name": CLIP, "image": inline(RED), **more})
        assert (answer.status, answer.json()["detail"].startswith(detail)) == (400, True), answer.body


async def test_a_large_body_of_labels() -> None:
    """It is read in slices, and only up to the limit."""
    async with family(CLIP, max_inputs=64) as server:
        body = {"name": CLIP, "image": inline(RED), "labels": ["a" * 20] * 20_000}
        answer = await server.call("POST", "/classify_image", body)
        assert (answer.status, "more than 64 inputs" in answer.json()["detail"]) == (400, True)


async def test_labels_by_name() -> None:
    """Only classifiers have labels."""
    async with family(CLASSIFIER, EMBEDDER) as server:
        answer = await server.call("GET", f"/model_classification_labels?name={CLASSIFIER}")
        assert (answer.status, answer.json()) == (200, {"labels": ["LABEL_0", "LABEL_1", "LABEL_2"]})
        answer = await server.call("GET", f"/model_classification_labels?name={EMBEDDER}")
        assert (answer.status, answer.json()) == (400, {"detail": f"Model {EMBEDDER} is not a classification model."})


async def test_size_by_name() -> None:
    """Only embedders have a size; both spellings of the parameter work."""
    async with family(CLASSIFIER, EMBEDDER, SPLADE) as server:
        for name in ("name", "model_name"):
            answer = await server.call("GET", f"/model_embedding_size?{name}={EMBEDDER}")
            assert (answer.status, answer.json()) == (200, {"embeddingSize": DIMENSION})
        answer = await server.call("GET", f"/model_embedding_size?name={CLASSIFIER}")
        assert (answer.status, answer.json()) == (400, {"detail": f"Model {CLASSIFIER} is not an embedding model."})
    async with family(EMBEDDER, facts={"dimension": None}) as server:
        answer = await server.call("GET", f"/model_embedding_size?name={EMBEDDER}")
        assert (answer.status, "embed a text to find out." in answer.json()["detail"]) == (400, True)


@pytest.mark.parametrize("path", ["/model_classification_labels", "/model_embedding_size"])
async def test_unknown_names(path: str) -> None:
    """404 for an unknown model, 400 for one that is stored but not loaded, 422 for no name."""
    async with living(Scripted(listed=[Entry(name=OTHER, source=f"hf:{OTHER}", backend="local")])) as life:
        answer = await life.call("GET", f"{path}?name=nobody")
        detail = "Model nobody does not exist in the repository; see GET /repository_models."
        assert (answer.status, answer.json()) == (404, {"detail": detail})
        answer = await life.call("GET", f"{path}?name={OTHER}")
        assert (answer.status, "is not loaded. Load the model first" in answer.json()["detail"]) == (400, True)
        assert (await life.call("GET", f"{path}?name=..")).status == 400
        for query in ("", "?name="):
            answer = await life.call("GET", path + query)
            assert answer.status == 422
            (problem,) = answer.json()["detail"]
            assert (problem["type"], problem["loc"]) == ("missing", ["query", "name"])
        assert (await life.call("GET", f"/model_embedding_size?name={MODEL}")).json() == {"embeddingSize": 4}


async def test_errors_of_a_comparison() -> None:
    """They name the label or image at fault."""
    async with family(CLIP) as server:
        body = {"name": CLIP, "image": inline(RED), "labels": ["a", "nan-item"]}
        answer = await server.call("POST", "/classify_image", body)
        assert (answer.status, answer.json()["detail"][:8]) == (500, "text 1: ")
