"""Cohere's /v2/rerank, /v2/embed and /v1/embed, as its client sends and reads them."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from shoal.backends.fake.model import compute_scores, compute_vector, tokenize_item
from shoal.errors import EngineFailed, Overloaded
from shoal.types import Embed, Image
from tests.surfaces.family_kit import CLASSIFIER, CLIP, DIMENSION, EMBEDDER, RERANKER, SPLADE, family
from tests.surfaces.surface_kit import MODEL, RecordingRunner, Server, serve

QUERY = "what is a shoal"
DOCUMENTS = ["a group of fish", "a kind of bread", "water that is not deep"]
SCORES = [float(compute_scores(tokenize_item((QUERY, each)), 1, raw=False)[0]) for each in DOCUMENTS]
ORDER = sorted(range(3), key=lambda at: -SCORES[at])
LINK = "https://pictures.example/one.png"
IMAGE_INPUT = {"content": [{"type": "image_url", "image_url": {"url": "data:,one", "detail": "auto"}}]}
RANK = {"model": RERANKER, "query": QUERY, "documents": DOCUMENTS}
EMBED = {"model": EMBEDDER, "texts": DOCUMENTS, "input_type": "search_document"}


def unit(item: str | Image) -> Any:
    vector = compute_vector(tokenize_item(item), DIMENSION)
    return vector / np.linalg.norm(vector)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with family() as server:
        yield server


async def test_rerank(server: Server) -> None:
    """Results in descending order, without documents, and with billed units."""
    answer = await server.call("POST", "/v2/rerank", {**RANK, "max_tokens_per_doc": 4096})
    reply = answer.json()
    assert answer.status == 200
    assert list(reply) == ["id", "results", "meta"]
    assert reply["id"] == answer.headers["x-request-id"]
    assert [each["index"] for each in reply["results"]] == ORDER
    assert [each["relevance_score"] for each in reply["results"]] == pytest.approx([SCORES[at] for at in ORDER])
    assert all(set(each) == {"index", "relevance_score"} for each in reply["results"])
    total = sum(len(tokenize_item((QUERY, each))) for each in DOCUMENTS)
    assert reply["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": total},
    }


async def test_rerank_some(server: Server) -> None:
    """`top_n`, documents on request, and one search unit per hundred documents."""
    reply = (await server.call("POST", "/v2/rerank", {**RANK, "top_n": 1, "return_documents": True})).json()
    assert [each["document"] for each in reply["results"]] == [{"text": DOCUMENTS[ORDER[0]]}]
    many = (await server.call("POST", "/v2/rerank", {**RANK, "documents": DOCUMENTS * 34})).json()
    assert many["meta"]["billed_units"]["search_units"] == 2


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"documents": []}, 400, "'documents' is an empty list"),
        ({"documents": None}, 422, "'documents' is invalid"),
        ({"query": "  "}, 400, "'query' is empty"),
        ({"query": {"text": "a"}}, 422, "'query' is invalid"),
        ({"top_n": -1}, 422, "'top_n' is invalid"),
        ({"relevant_spans": {"mode": "enabled"}}, 400, "'relevant_spans' is not supported"),
        ({"model": "rerank-v9"}, 404, "does not exist"),
        ({"model": CLASSIFIER}, 400, "cannot rerank"),
    ],
)
async def test_rerank_refuses(server: Server, fields: dict[str, Any], status: int, words: str) -> None:
    """A `message`, with the status that the client maps to an exception class; unknown fields are ignored."""
    answer = await server.call("POST", "/v2/rerank", {**RANK, **fields})
    assert (answer.status, list(answer.json())) == (status, ["message"]), answer.body
    assert words in answer.json()["message"]
    known = {"relevant_spans": {"mode": "disabled"}, "top_k": 3, "made_up": 1}
    assert (await server.call("POST", "/v2/rerank", {**RANK, **known})).status == 200


async def test_embed_by_type(server: Server) -> None:
    """Each type under its name, in the requested order; base64 encodes float32."""
    types = ["base64", "float", "int8", "uint8", "binary", "ubinary", "float"]
    answer = await server.call("POST", "/v2/embed", {**EMBED, "embedding_types": types})
    reply = answer.json()
    assert answer.status == 200
    assert list(reply) == ["id", "embeddings", "texts", "meta", "response_type"]
    assert (reply["texts"], reply["response_type"]) == (DOCUMENTS, "embeddings_by_type")
    assert list(reply["embeddings"]) == types[:-1]
    for at, text in enumerate(DOCUMENTS):
        vector = unit(text)
        by_type = {name: rows[at] for name, rows in reply["embeddings"].items()}
        assert by_type["float"] == pytest.approx(vector.tolist(), abs=1e-6)
        assert np.frombuffer(base64.b64decode(by_type["base64"]), "<f4").tolist() == pytest.approx(by_type["float"])
        assert by_type["int8"] == np.rint(vector * 127).tolist()
        assert by_type["uint8"] == (np.rint(vector * 127) + 128).tolist()
        assert by_type["ubinary"] == [int("1111", 2) << 4] == [each + 128 for each in by_type["binary"]]
    total = sum(len(tokenize_item(each)) for each in DOCUMENTS)
    assert reply["meta"]["billed_units"] == {"input_tokens": total}


async def test_embed_defaults(server: Server) -> None:
    """The default type is float, the default model the first embedder; texts may be sent as `inputs`."""
    inputs = [{"content": [{"type": "text", "text": each}]} for each in DOCUMENTS]
    reply = (await server.call("POST", "/v2/embed", {"inputs": inputs, "output_dimension": 2})).json()
    assert list(reply["embeddings"]) == ["float"]
    assert np.shape(reply["embeddings"]["float"]) == (3, 2)
    assert reply["texts"] == DOCUMENTS


async def test_embed_many(server: Server) -> None:
    """2,048 texts in both forms, decoded and encoded in slices."""
    texts = [f"text {at} " + "filler " * 6 for at in range(2048)]
    inputs = [{"content": [{"type": "text", "text": each}]} for each in texts]
    for body in ({"texts": texts}, {"inputs": inputs}):
        answer = await server.call("POST", "/v2/embed", {**body, "embedding_types": ["int8", "float"]})
        assert answer.pieces > 2
        reply = answer.json()
        assert reply["texts"] == texts
        assert reply["embeddings"]["float"][2047] == pytest.approx(unit(texts[2047]).tolist(), abs=1e-6)
        assert len(reply["embeddings"]["int8"]) == 2048


async def test_embed_first_version(server: Server) -> None:
    """A list of floats without types, an object with types; the client fails without `id` and `response_type`."""
    reply = (await server.call("POST", "/v1/embed", EMBED)).json()
    assert list(reply) == ["id", "embeddings", "texts", "meta", "response_type"]
    assert reply["response_type"] == "embeddings_floats"
    assert np.allclose(reply["embeddings"], [unit(each) for each in DOCUMENTS], atol=1e-6)
    typed = (await server.call("POST", "/v1/embed", {**EMBED, "embedding_types": ["int8"]})).json()
    assert (typed["response_type"], list(typed["embeddings"])) == ("embeddings_by_type", ["int8"])
    assert typed["meta"]["api_version"] == {"version": "1"}


@pytest.mark.parametrize("path", ["/v2/embed", "/v1/embed"])
async def test_embed_images(server: Server, path: str) -> None:
    """Both versions return vectors in the order of the images, and bill images but no tokens."""
    body = {"model": CLIP, "images": ["data:,one", "data:;base64,dHdv"], "input_type": "image"}
    answer = await server.call("POST", path, {**body, "embedding_types": ["float"]})
    reply = answer.json()
    assert answer.status == 200, reply
    assert np.allclose(reply["embeddings"]["float"], [unit(Image(b"one")), unit(Image(b"two"))], atol=1e-6)
    assert (reply["texts"], reply["meta"]["billed_units"]) == ([], {"images": 2})
    assert reply["meta"]["tokens"] == {"input_tokens": 0}


async def test_embed_texts_and_images(server: Server) -> None:
    """`inputs` may mix texts and images; an image's URL may be a string or an object."""
    inputs = [
        {"content": [{"type": "text", "text": "two words"}]},
        IMAGE_INPUT,
        {"content": [{"type": "image_url", "image_url": "data:,two"}]},
    ]
    answer = await server.call("POST", "/v2/embed", {"model": CLIP, "inputs": inputs, "output_dimension": 4})
    reply = answer.json()
    expected = [unit("two words"), unit(Image(b"one")), unit(Image(b"two"))]
    assert np.allclose(reply["embeddings"]["float"], expected, atol=1e-6)
    assert (reply["texts"], reply["meta"]["billed_units"]) == (["two words"], {"input_tokens": 2, "images": 2})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"input_type": "search_query"}, {"input_type": "query"}),
        ({"input_type": "search_document"}, {"input_type": "document"}),
        ({"input_type": "classification"}, {"input_type": None, "prompt_name": "classification"}),
        ({"input_type": "clustering"}, {"input_type": None, "prompt_name": None}),
        ({}, {"input_type": None, "truncate": None}),
        ({"truncate": "NONE"}, {"truncate": False}),
        ({"truncate": "START"}, {"truncate": True, "truncation_direction": "left"}),
        ({"truncate": "END"}, {"truncate": True, "truncation_direction": "right"}),
        ({"max_tokens": 256}, {"truncate": True}),
        ({"output_dimension": 2}, {"dimensions": 2}),
        ({"priority": 3}, {"dimensions": None}),
    ],
)
async def test_fields_reach_the_task(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """Input types, truncation and dimensions become fields of the task."""
    runner = RecordingRunner()
    object.__setattr__(runner.facts, "prompts", {"classification": "classify: "})
    await serve(runner).call("POST", "/v2/embed", {"model": MODEL, "texts": ["a"], **fields})
    (task,) = runner.tasks
    assert isinstance(task, Embed)
    assert {name: getattr(task, name) for name in expected} == expected


@pytest.mark.parametrize("path", ["/v2/embed", "/v1/embed"])
@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"texts": None}, 422, "Missing required field 'texts'"),
        ({"texts": []}, 400, "'texts' is an empty list"),
        ({"texts": ["a", ""]}, 400, "'texts[1]' is empty"),
        ({"texts": ["a"] * 2049}, 400, "2048"),
        ({"texts": "a"}, 422, "'texts' is invalid"),
        ({"texts": None, "images": ["data:image/png;base64,AA=="]}, 400, "accepts only text"),
        (
            {"texts": None, "model": CLIP, "images": ["data:,x", "/etc/passwd"]},
            400,
            "'images[1]': the text is not an image",
        ),
        ({"texts": None, "model": CLIP, "images": [LINK]}, 400, "'images[0]': "),
        ({"texts": None, "images": ["data:,x"] * 2049}, 400, "'images' has more than 2048 entries; split the request."),
        ({"texts": None, "images": ["data:,x"], "embedding_types": ["x"]}, 422, "'embedding_types[0]' is invalid"),
        ({"images": ["data:,x"]}, 400, "'texts' and 'images'"),
        ({"texts": None, "images": []}, 422, "Missing required field 'texts'"),
        ({"input_type": "image"}, 400, "'input_type' is image, but the inputs are texts"),
        ({"input_type": "query"}, 422, "'input_type' is invalid"),
        ({"embedding_types": ["float16"]}, 422, "'embedding_types[0]' is invalid"),
        ({"truncate": "MIDDLE"}, 422, "'truncate' is invalid"),
        ({"truncate": "NONE", "texts": ["word " * 600]}, 400, "512"),
        ({"model": "nobody"}, 404, "does not exist"),
        ({"model": RERANKER}, 400, "cannot embed"),
        ({"model": SPLADE}, 400, "no dense vectors"),
        ({"texts": ["nan-item"]}, 500, "NaN"),
    ],
)
async def test_embed_refuses(server: Server, path: str, fields: dict[str, Any], status: int, words: str) -> None:
    """A `message` in both versions."""
    answer = await server.call("POST", path, {**EMBED, **fields})
    assert (answer.status, list(answer.json())) == (status, ["message"]), answer.body
    assert words in answer.json()["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"texts": ["a"], "inputs": []}, "'texts' and 'inputs'"),
        ({"inputs": []}, "'inputs' is an empty list"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}, "accepts only text"),
        ({"inputs": [IMAGE_INPUT], "images": ["data:,x"]}, "'inputs' and 'images'"),
        ({"inputs": [{"content": [{"type": "image_url", "text": "a"}]}]}, "'inputs[0].content[0]' is of type"),
        (
            {"model": CLIP, "inputs": [IMAGE_INPUT, {"content": [{"type": "image_url", "image_url": LINK}]}]},
            "'inputs[1].content[0].image_url': ",
        ),
        ({"inputs": [{"content": []}]}, "0 parts"),
        ({"inputs": [{"content": [{"type": "text", "text": "a"}] * 2}]}, "2 parts"),
        ({"inputs": [{"content": [{"type": "text", "text": ""}]}]}, "'inputs[0]' is empty"),
        ({"texts": ["a"], "max_tokens": 8}, "'max_tokens' cannot be"),
    ],
)
async def test_inputs_refused(server: Server, fields: dict[str, Any], words: str) -> None:
    """`inputs` exist only in the second version."""
    answer = await server.call("POST", "/v2/embed", {"model": EMBEDDER, **fields})
    status = 422 if "is of type" in words else 400
    assert (answer.status, words in answer.json()["message"]) == (status, True), answer.body


@pytest.mark.parametrize("path", ["/v2/rerank", "/v2/embed", "/v1/embed"])
async def test_error_format(path: str) -> None:
    """Keys, methods, unknown paths below, a full queue and a broken model: each error is a `message`."""
    server = serve(api_key=("key",))
    key = {"authorization": "Bearer key"}
    for answer, status in (
        (await server.call("POST", path, {}), 401),
        (await server.call("GET", path, headers=key), 405),
        (await server.call("POST", f"{path}/more", {}, headers=key), 404),
        (await server.call("POST", path, body=b"{", headers=key), 400),
        (await server.call("POST", path, {}, headers={**key, "content-type": "text/plain"}), 415),
    ):
        assert (answer.status, list(answer.json())) == (status, ["message"])
    body = {"texts": ["a"], "query": "a", "documents": ["b"]}
    full = await serve(RecordingRunner(error=Overloaded("full", retry_after=3))).call("POST", path, body)
    assert (full.status, full.json(), full.headers["retry-after"]) == (429, {"message": "full"}, "3")
    broken = await serve(RecordingRunner(error=EngineFailed("broken"))).call("POST", path, body)
    assert (broken.status, broken.json()) == (500, {"message": "broken"})
