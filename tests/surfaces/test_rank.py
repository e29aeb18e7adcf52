"""POST /rank: texts ranked by how well they describe an image."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shoal.backends.fake.model import compute_vector, tokenize_item
from shoal.core.image_text_scoring import compute_scores
from shoal.errors import Overloaded
from shoal.specs import ContrastSpec
from shoal.types import Image
from tests.surfaces.family_kit import CLASSIFIER, CLIP, CONTRAST, DIMENSION, EMBEDDER, family
from tests.surfaces.image_fetch_kit import ONE, TWO, Album
from tests.surfaces.surface_kit import RecordingRunner, Server, serve

TEXTS = ["a cat", "a dog", "a red square", "a shoal of fish at noon"]
RANK = {"model": CLIP, "image": ONE, "texts": TEXTS}
LINKED, OTHER = Image(ONE.encode()), Image(TWO.encode())
TOKENS = sum(len(tokenize_item(each)) for each in TEXTS)


def vectors(*items: str | Image) -> Any:
    return np.stack([compute_vector(tokenize_item(each), DIMENSION) for each in items])


def expected(image: Image, scoring: ContrastSpec = CONTRAST) -> list[dict[str, Any]]:
    """Return the results in descending order."""
    cosine, scores = compute_scores(vectors(image), vectors(*TEXTS), scoring)
    rows = zip(range(len(TEXTS)), TEXTS, cosine[0].tolist(), scores[0].tolist(), strict=True)
    entries = [dict(zip(("index", "text", "cosine", "score"), row, strict=True)) for row in rows]
    return sorted(entries, key=lambda entry: -entry["score"])


def same(results: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    assert [(each["index"], each["text"]) for each in results] == [(each["index"], each["text"]) for each in expected]
    numbers = [[each[name] for name in ("cosine", "score")] for each in (*results, *expected)]
    return np.allclose(numbers[: len(results)], numbers[len(results) :], atol=1e-5)


@pytest.fixture
def album() -> Album:
    return Album()


@pytest.fixture
async def server(album: Album) -> AsyncIterator[Server]:
    async with family(EMBEDDER, CLASSIFIER, CLIP, image_reader=album.image_reader()) as server:
        yield server


async def test_rank(server: Server, album: Album) -> None:
    """The best text first, with index, cosine and score; the fetch uses the given headers."""
    headers = {"authorization": "Bearer x"}
    answer = await server.call("POST", "/rank", {**RANK, "image_download_headers": headers})
    reply = answer.json()
    assert answer.status == 200, reply
    assert list(reply) == ["model", "activation", "results", "usage"]
    assert (reply["model"], reply["activation"]) == (CLIP, "softmax")
    assert same(reply["results"], expected(LINKED))
    assert sum(each["score"] for each in reply["results"]) == pytest.approx(1)
    assert reply["usage"] == {"prompt_tokens": TOKENS, "total_tokens": TOKENS}
    assert album.fetched == [(ONE, headers)]
    assert int(answer.headers["x-shoal-batch-size"]) >= 1


async def test_several_images(server: Server) -> None:
    """One ranking per image, in order; a URL may be a string or an object."""
    body = {"model": CLIP, "images": [{"url": TWO}, ONE], "texts": TEXTS, "top_n": 2}
    reply = (await server.call("POST", "/rank", body)).json()
    assert list(reply) == ["model", "activation", "images", "usage"]
    assert [each["index"] for each in reply["images"]] == [0, 1]
    for each, image in zip(reply["images"], (OTHER, LINKED), strict=True):
        assert same(each["results"], expected(image)[:2])
    assert reply["usage"]["total_tokens"] == TOKENS


async def test_many_texts(server: Server) -> None:
    """More texts than are written at once, and one above the size that is decoded at once."""
    texts = [f"text {at}" for at in range(200)] + ["word " * 20_000]
    answer = await server.call("POST", "/rank", {**RANK, "texts": texts})
    reply = answer.json()
    assert answer.status == 200, reply
    assert sorted(each["index"] for each in reply["results"]) == list(range(201))
    scores = [each["score"] for each in reply["results"]]
    assert scores == sorted(scores, reverse=True)
    assert answer.headers["x-shoal-truncated"] == "1"


async def test_sigmoid() -> None:
    """SigLIP's scores do not sum to 1; the order is that of the cosines."""
    scoring = ContrastSpec(scale=8.0, bias=-6.0, activation="sigmoid")
    async with family(CLIP, image_reader=Album().image_reader(), facts={"contrast": scoring}) as server:
        reply = (await server.call("POST", "/rank", RANK)).json()
    assert reply["activation"] == "sigmoid"
    assert same(reply["results"], expected(LINKED, scoring))


async def test_the_default_model(server: Server) -> None:
    """The first image-text model, before the default embedder."""
    answer = await server.call("POST", "/rank", {"image": ONE, "texts": TEXTS, "model": None, "top_n": 0})
    assert (answer.status, answer.json()["model"], len(answer.json()["results"])) == (200, CLIP, 4)


@pytest.mark.parametrize(("names", "status"), [([EMBEDDER], 400), ([CLASSIFIER], 400)])
async def test_no_image_text_model(names: list[str], status: int) -> None:
    """The error names models to serve."""
    async with family(*names) as server:
        answer = await server.call("POST", "/rank", {"image": ONE, "texts": TEXTS})
    assert (answer.status, answer.json()["error"]["param"]) == (status, "model")
    assert "CLIP, SigLIP" in answer.json()["error"]["message"]


async def test_no_model_at_all() -> None:
    server = serve()
    server.gateway.registry.remove(server.model)
    answer = await server.call("POST", "/rank", {"image": ONE, "texts": TEXTS})
    assert answer.status == 404, answer.body


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"model": "nobody"}, 404, "model", "does not exist"),
        ({"model": EMBEDDER}, 400, "model", "does not compare images with texts"),
        ({"model": CLASSIFIER}, 400, "model", "does not compare images with texts"),
        ({"image": None}, 400, "image", "Missing required field 'image' (or 'images')"),
        ({"images": [ONE]}, 400, "images", "'image' and 'images'"),
        ({"image": None, "images": []}, 400, "images", "'images' is an empty list"),
        ({"texts": []}, 400, "texts", "'texts' is an empty list"),
        ({"texts": ["a", ""]}, 400, "texts", "'texts[1]' is empty"),
        ({"texts": "a"}, 400, "texts", "'texts' is invalid"),
        ({"texts": None}, 400, "texts", "'texts' is invalid"),
        ({"texts": ["a"] * 2048}, 400, "texts", "more than 2048"),
        ({"image": None, "images": [ONE] * 300, "texts": ["a"] * 300}, 400, "images", "65536 pairs"),
        ({"top_n": -1}, 400, "top_n", "'top_n' is invalid"),
        ({"image_download_headers": []}, 400, "image_download_headers", "is invalid"),
    ],
)
async def test_refused_before_anything_is_fetched(
    server: Server, album: Album, fields: dict[str, Any], status: int, param: str, words: str
) -> None:
    answer = await server.call("POST", "/rank", {**RANK, **fields})
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (status, param), error
    assert words in error["message"]
    assert not album.fetched


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image": "/etc/passwd"}, "'image': the text is not an image"),
        ({"image": {"url": ""}}, "'image.url': the image is empty"),
        ({"image": None, "images": [ONE, "?"]}, "'images[1]': "),
        ({"texts": ["a", "reject-item"]}, "text 1: "),
    ],
)
async def test_the_bad_input_is_named(server: Server, fields: dict[str, Any], message: str) -> None:
    """Images and texts are counted separately."""
    answer = await server.call("POST", "/rank", {**RANK, **fields})
    assert (answer.status, answer.json()["error"]["message"].startswith(message)) == (400, True), answer.body


@pytest.mark.parametrize(("modality", "words"), [("text", "accepts only text"), ("image", "only images")])
async def test_one_tower_cannot_compare(album: Album, modality: str, words: str) -> None:
    """A model with only one tower loaded gets its own error."""
    async with family(CLIP, image_reader=album.image_reader(), facts={"modalities": (modality,)}) as server:
        answer = await server.call("POST", "/rank", RANK)
    assert (answer.status, words in answer.json()["error"]["message"]) == (400, True), answer.body
    assert not album.fetched


async def test_a_full_queue() -> None:
    """429 with Retry-After."""
    runner = RecordingRunner(error=Overloaded("full", retry_after=3))
    runner.facts = replace(runner.facts, modalities=("text", "image"), contrast=CONTRAST)
    answer = await serve(runner).call("POST", "/rank", {"image": "data:,x", "texts": ["a"]})
    assert (answer.status, answer.headers["retry-after"]) == (429, "3")
