"""Clients that rank, classify and embed, images too, against their own servers: both versions of Cohere's package, and
OpenAI's; and the requests of Voyage, NVIDIA and Jina as sent on the wire, with the parts of the reply that they
read."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import cohere
import numpy as np
import openai
import pytest

from shoal.backends.fake.model import compute_scores, compute_vector, tokenize_item
from shoal.types import Image
from tests.integration.server_kit import Server, ShoalServer

QUERY = "what is a shoal"
DOCUMENTS = ["a group of fish", "a kind of bread", "water that is not deep"]
SCORES = [float(compute_scores(tokenize_item((QUERY, each)), 1, raw=False)[0]) for each in DOCUMENTS]
ORDER = sorted(range(3), key=lambda at: -SCORES[at])
KEY = "sesame"
IMAGE = Image(b"a file that nobody looks into")
IMAGE_URI = f"data:image/png;base64,{base64.b64encode(IMAGE.data).decode()}"


def unit(item: str | Image) -> Any:
    vector = compute_vector(tokenize_item(item), 32)
    return vector / np.linalg.norm(vector)


@pytest.fixture(scope="module")
def server(shared_server: ShoalServer) -> Server:
    return shared_server(["embedder=fake:", "reranker=fake:labels=1", "classifier=fake:labels=3"])


@pytest.fixture(scope="module")
def clip_server(shared_server: ShoalServer) -> Server:
    return shared_server(["embedder=fake:", "clip=fake:images=1"])


@pytest.fixture
def client(server: Server) -> Iterator[cohere.ClientV2]:
    with cohere.ClientV2(api_key="any", base_url=server.base_url) as client:
        yield client


@pytest.fixture
def older(server: Server) -> Iterator[cohere.Client]:
    with cohere.Client(api_key="any", base_url=server.base_url) as client:
        yield client


def post(server: Server, path: str, body: Any) -> Any:
    status, _, reply = server.request("POST", path, body)
    assert status == 200, reply
    return json.loads(reply)


def test_cohere_reranks(client: cohere.ClientV2) -> None:
    """/v2/rerank: indexes, scores and billed units."""
    reply = client.rerank(model="reranker", query=QUERY, documents=DOCUMENTS, top_n=2, max_tokens_per_doc=4096)
    assert [each.index for each in reply.results] == ORDER[:2]
    assert [each.relevance_score for each in reply.results] == pytest.approx([SCORES[at] for at in ORDER[:2]])
    assert reply.id
    assert reply.meta is not None and reply.meta.billed_units is not None
    assert reply.meta.billed_units.search_units == 1


def test_cohere_embeds(client: cohere.ClientV2) -> None:
    """/v2/embed: every type that it knows, from texts and from contents."""
    types: Any = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    reply = client.embed(
        model="embedder", texts=DOCUMENTS, input_type="search_document", embedding_types=types, truncate="END"
    )
    vectors: Any = reply.embeddings
    assert np.allclose(vectors.float_, [unit(each) for each in DOCUMENTS], atol=1e-6)
    assert np.shape(vectors.int8) == np.shape(vectors.uint8) == (3, 32)
    assert np.shape(vectors.binary) == np.shape(vectors.ubinary) == (3, 4)
    packed = [np.frombuffer(base64.b64decode(each), "<f4") for each in vectors.base64]
    assert np.array_equal(packed, np.float32(vectors.float_))
    inputs: Any = [{"content": [{"type": "text", "text": each}]} for each in DOCUMENTS]
    again: Any = client.embed(model="embedder", inputs=inputs, input_type="search_query", output_dimension=8)
    assert np.shape(again.embeddings.float_) == (3, 8)
    assert reply.texts == DOCUMENTS


def test_cohere_embeds_images(clip_server: Server) -> None:
    """/v2/embed with `images` and with mixed `inputs`, and /v1/embed: vectors in order, and billed units."""
    inputs: Any = [
        {"content": [{"type": "text", "text": DOCUMENTS[0]}]},
        {"content": [{"type": "image_url", "image_url": {"url": IMAGE_URI}}]},
    ]
    with cohere.ClientV2(api_key="any", base_url=clip_server.base_url) as client:
        reply: Any = client.embed(model="clip", images=[IMAGE_URI] * 2, input_type="image", embedding_types=["float"])
        mixed: Any = client.embed(model="clip", inputs=inputs, input_type="search_document")
        with pytest.raises(cohere.BadRequestError, match="no model here combines"):
            parts: Any = [{"content": inputs[0]["content"] + inputs[1]["content"]}]
            client.embed(model="clip", inputs=parts, input_type="search_document")
    with cohere.Client(api_key="any", base_url=clip_server.base_url) as older:
        first: Any = older.embed(model="clip", images=[IMAGE_URI], input_type="image")
    assert np.allclose(reply.embeddings.float_, [unit(IMAGE)] * 2, atol=1e-6)
    assert (reply.texts, reply.meta.billed_units.images) == ([], 2)
    assert np.allclose(mixed.embeddings.float_, [unit(DOCUMENTS[0]), unit(IMAGE)], atol=1e-6)
    assert (mixed.texts, mixed.meta.billed_units.images) == (DOCUMENTS[:1], 1)
    assert np.allclose(first.embeddings, [unit(IMAGE)], atol=1e-6)


def test_openai_embeds_images(clip_server: Server) -> None:
    """Fields that its package sends beside `input` with `extra_body`, and objects that it passes on; base64 by
    default."""
    parts: Any = [{"type": "text", "text": DOCUMENTS[0]}, {"type": "image_url", "image_url": {"url": IMAGE_URI}}]
    with openai.OpenAI(base_url=f"{clip_server.base_url}/v1", api_key="none", max_retries=0) as client:
        infinity = client.embeddings.create(model="clip", input=[IMAGE_URI], extra_body={"modality": "image"})
        objects: Any = [{"text": DOCUMENTS[0]}, {"image": IMAGE_URI}]
        jina = client.embeddings.create(model="clip", input=objects)
        openai_parts = client.embeddings.create(model="clip", input=parts, encoding_format="float")
        messages: Any = {"input": None, "messages": [{"role": "user", "content": parts[1:]}]}
        vllm = client.embeddings.create(model="clip", input="", extra_body=messages)
        with pytest.raises(openai.BadRequestError, match="image_hosts") as caught:
            client.embeddings.create(model="clip", input="https://a.example/b.png", extra_body={"modality": "image"})
        assert caught.value.param == "input"
        with pytest.raises(openai.BadRequestError, match="accepts only text"):
            client.embeddings.create(model="embedder", input=IMAGE_URI, extra_body={"modality": "image"})
    both: list[str | Image] = [DOCUMENTS[0], IMAGE]
    for reply, items in ((infinity, both[1:]), (jina, both), (openai_parts, both), (vllm, both[1:])):
        assert np.allclose([each.embedding for each in reply.data], [unit(each) for each in items], atol=1e-6)
    assert (infinity.usage.total_tokens, jina.usage.total_tokens) == (0, len(tokenize_item(DOCUMENTS[0])))


def test_cohere_older_reranks(older: cohere.Client) -> None:
    """/v1/rerank, with documents as texts and as objects; their texts are returned unless disabled."""
    documents: Any = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, {"text": DOCUMENTS[2]}]
    reply = older.rerank(model="reranker", query=QUERY, documents=documents, rank_fields=["text"], max_chunks_per_doc=9)
    assert [each.index for each in reply.results] == ORDER
    assert [each.document.text for each in reply.results if each.document] == [DOCUMENTS[at] for at in ORDER]
    short = older.rerank(model="reranker", query=QUERY, documents=documents, return_documents=False, top_n=1)
    assert [each.document for each in short.results] == [None]


# Its client merges its batches by means that pydantic deprecates.
@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")
def test_cohere_older_embeds(older: cohere.Client) -> None:
    """/v1/embed: more texts than one of its requests holds, in both shapes of its replies."""
    texts = [f"text {at}" for at in range(200)]
    reply: Any = older.embed(model="embedder", texts=texts, input_type="search_document")
    assert np.allclose(reply.embeddings, [unit(each) for each in texts], atol=1e-6)
    typed: Any = older.embed(model="embedder", texts=texts, input_type="search_document", embedding_types=["int8"])
    assert np.array_equal(typed.embeddings.int8, [np.rint(unit(each) * 127) for each in texts])


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"documents": []}, cohere.BadRequestError, "empty list"),
        ({"model": "nobody"}, cohere.NotFoundError, "does not exist"),
        ({"model": "classifier"}, cohere.BadRequestError, "cannot rerank"),
        ({"top_n": -1}, cohere.UnprocessableEntityError, "top_n"),
    ],
)
def test_cohere_understands_refusals(
    client: cohere.ClientV2, wrong: dict[str, Any], error: type[cohere.core.ApiError], words: str
) -> None:
    """Each raises its own exception, with the message in the body."""
    with pytest.raises(error) as caught:
        client.rerank(**{"model": "reranker", "query": QUERY, "documents": DOCUMENTS, **wrong})
    assert list(caught.value.body) == ["message"]
    assert words in caught.value.body["message"]
    with pytest.raises(cohere.BadRequestError, match="accepts only text"):
        client.embed(model="embedder", images=["data:image/png;base64,AA=="], input_type="image")


def test_cohere_with_a_wrong_key(shoal_server: ShoalServer) -> None:
    """A wrong key raises UnauthorizedError; the right one succeeds."""
    base_url = shoal_server(["reranker=fake:labels=1"], "--api-key", KEY).base_url
    with cohere.ClientV2(api_key="wrong", base_url=base_url) as client, pytest.raises(cohere.UnauthorizedError):
        client.rerank(model="reranker", query=QUERY, documents=DOCUMENTS)
    with cohere.ClientV2(api_key=KEY, base_url=base_url) as client:
        assert client.rerank(model="reranker", query=QUERY, documents=DOCUMENTS).results


def test_voyage(server: Server) -> None:
    """voyageai 0.5: embed and rerank, with all the nulls that it sends."""
    embed = {"input_type": None, "truncation": True, "output_dtype": None, "output_dimension": None}
    embeddings = post(
        server, "/v1/embeddings", {"input": DOCUMENTS, "model": "embedder", **embed, "encoding_format": "base64"}
    )
    vectors = [np.frombuffer(base64.b64decode(each["embedding"]), np.float32) for each in embeddings["data"]]
    assert np.allclose(vectors, [unit(each) for each in DOCUMENTS], atol=1e-6)
    assert embeddings["usage"]["total_tokens"] == sum(len(tokenize_item(each)) for each in DOCUMENTS)
    small = post(
        server,
        "/v1/embeddings",
        {"input": DOCUMENTS, "model": "embedder", **embed, "output_dtype": "ubinary", "encoding_format": "base64"},
    )
    bits = np.frombuffer(base64.b64decode(small["data"][0]["embedding"]), np.uint8)
    assert np.array_equal(np.unpackbits(bits), unit(DOCUMENTS[0]) > 0)
    request = {"query": QUERY, "documents": DOCUMENTS, "model": "reranker", "top_k": None, "truncation": True}
    ranked = post(server, "/v1/rerank", request)
    assert [DOCUMENTS[each["index"]] for each in ranked["data"]] == [DOCUMENTS[at] for at in ORDER]
    assert ranked["usage"]["total_tokens"] > 0
    status, _, reply = server.request("POST", "/v1/rerank", {**request, "documents": []})
    assert (status, list(json.loads(reply))) == (400, ["detail"])


def test_nvidia(server: Server) -> None:
    """langchain-nvidia-ai-endpoints 1.5: it looks up a model, embeds queries and passages, and ranks by logits."""
    (first, *_) = json.loads(server.request("GET", "/v1/models")[2])["data"]
    assert first["id"] == "embedder"
    request = {"input": DOCUMENTS, "model": "embedder", "encoding_format": "float", "truncate": "NONE"}
    for body in ({**request, "input_type": "passage"}, {**request, "model": "embedder-passage"}):
        reply = post(server, "/v1/embeddings", body)
        assert [each["index"] for each in reply["data"]] == [0, 1, 2]
    passages = [{"text": each} for each in DOCUMENTS]
    ranked = post(server, "/v1/ranking", {"model": "reranker", "query": {"text": QUERY}, "passages": passages})
    assert [each["index"] for each in ranked["rankings"]] == ORDER
    logits = [float(compute_scores(tokenize_item((QUERY, DOCUMENTS[at])), 1, raw=True)[0]) for at in ORDER]
    assert [each["logit"] for each in ranked["rankings"]] == pytest.approx(logits)


def test_jina(server: Server) -> None:
    """langchain-community's embeddings and reranker, and the API's extra fields."""
    vectors = post(server, "/v1/embeddings", {"input": DOCUMENTS, "model": "embedder"})
    assert [each["index"] for each in vectors["data"]] == [0, 1, 2]
    extras = {"task": "retrieval.passage", "normalized": True, "embedding_type": "binary", "late_chunking": False}
    small = post(
        server, "/v1/embeddings", {"input": [{"text": each} for each in DOCUMENTS], "model": "embedder", **extras}
    )
    assert np.shape([each["embedding"] for each in small["data"]]) == (3, 4)
    request = {"query": QUERY, "documents": DOCUMENTS, "model": "reranker", "top_n": None}
    ranked = post(server, "/v1/rerank", request)["results"]
    assert [(each["index"], each["document"]["text"]) for each in ranked] == [(at, DOCUMENTS[at]) for at in ORDER]
    status, _, reply = server.request("POST", "/v1/rerank", {**request, "model": "nobody"})
    assert (status, list(json.loads(reply))) == (404, ["detail"])


def test_open_webui(server: Server) -> None:
    """Its external reranker: one entry per document, to be sorted by `index`."""
    request = {"model": "reranker", "query": QUERY, "documents": DOCUMENTS, "top_n": len(DOCUMENTS)}
    results = sorted(post(server, "/v1/rerank", request)["results"], key=lambda each: each["index"])
    assert [each["relevance_score"] for each in results] == pytest.approx(SCORES)
