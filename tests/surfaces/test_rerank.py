"""Rerank in every dialect: Jina and Voyage on /rerank and /v1/rerank, NVIDIA's /v1/ranking, and /rerank's owner."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest

from shoal.backends.fake.model import compute_scores, compute_vector, tokenize_item
from shoal.errors import Overloaded
from shoal.surfaces.shared.ranking import sort_descending
from shoal.types import Rerank
from tests.surfaces.family_kit import CLASSIFIER, DIMENSION, EMBEDDER, RERANKER, family
from tests.surfaces.surface_kit import RecordingRunner, Server, serve

QUERY = "what is a shoal"
DOCUMENTS = ["a group of fish", "a kind of bread", "water that is not deep", "fish"]
ASK = {"query": QUERY, "documents": DOCUMENTS}


def score(document: str, *, raw: bool = False, query: str = QUERY) -> float:
    return float(compute_scores(tokenize_item((query, document)), 1, raw=raw)[0])


SCORES = [score(each) for each in DOCUMENTS]
ORDER = sorted(range(4), key=lambda at: -SCORES[at])


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with family() as server:
        yield server


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v1/rerank/"])
async def test_the_format_of_jina(server: Server, path: str) -> None:
    """Descending order, each with index, score and text; usage, and the `meta` that older Cohere clients read."""
    answer = await server.call("POST", path, ASK)
    reply = answer.json()
    assert answer.status == 200
    assert answer.headers["x-shoal-batch-size"] == "4"
    assert list(reply) == ["id", "object", "model", "usage", "results", "meta"]
    assert (reply["id"], reply["model"]) == (answer.headers["x-request-id"], RERANKER)
    assert [each["index"] for each in reply["results"]] == ORDER
    assert [each["document"]["text"] for each in reply["results"]] == [DOCUMENTS[at] for at in ORDER]
    assert [each["relevance_score"] for each in reply["results"]] == pytest.approx([SCORES[at] for at in ORDER])
    total = sum(len(tokenize_item((QUERY, each))) for each in DOCUMENTS)
    assert reply["usage"] == {"prompt_tokens": total, "total_tokens": total}
    assert reply["meta"]["billed_units"] == {"search_units": 1}


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
@pytest.mark.parametrize("top_k", [None, 2])
async def test_the_format_of_voyage(server: Server, path: str, top_k: int | None) -> None:
    """A `top_k` field, even null, selects this format; keys are in Voyage's order."""
    voyage = {"query": QUERY, "documents": DOCUMENTS, "model": RERANKER, "top_k": top_k, "truncation": True}
    answer = await server.call("POST", path, voyage)
    reply = answer.json()
    assert list(reply) == ["object", "data", "model", "usage"]
    assert [each["index"] for each in reply["data"]] == ORDER[:top_k]
    assert set(reply["data"][0]) == {"index", "relevance_score"}
    assert list(reply["usage"]) == ["total_tokens"]
    shown = (await server.call("POST", path, {**voyage, "return_documents": True})).json()["data"]
    assert [each["document"] for each in shown] == [DOCUMENTS[at] for at in ORDER[:top_k]]


@pytest.mark.parametrize(
    ("top", "count"), [({"top_n": 2}, 2), ({"top_n": 0}, 4), ({"top_n": None}, 4), ({"top_n": 9}, 4), ({}, 4)]
)
async def test_top_n(server: Server, top: dict[str, Any], count: int) -> None:
    """0, null and more than the number of documents mean all."""
    reply = (await server.call("POST", "/v1/rerank", {**ASK, **top})).json()
    assert [each["index"] for each in reply["results"]] == ORDER[:count]


async def test_without_documents_and_raw(server: Server) -> None:
    """Documents are omitted on request; raw scores are logits, by Infinity's name and by vLLM's."""
    reply = (await server.call("POST", "/v1/rerank", {**ASK, "return_documents": False, "raw_scores": True})).json()
    assert all(set(each) == {"index", "relevance_score"} for each in reply["results"])
    logits = sorted((score(each, raw=True) for each in DOCUMENTS), reverse=True)
    assert [each["relevance_score"] for each in reply["results"]] == pytest.approx(logits)
    other = (await server.call("POST", "/v1/rerank", {**ASK, "use_activation": False})).json()
    assert [each["relevance_score"] for each in other["results"]] == pytest.approx(logits)


async def test_documents_as_objects(server: Server) -> None:
    """Documents and the query may be objects with a text; other fields are ignored."""
    documents = [{"text": each, "id": 7} if at % 2 else each for at, each in enumerate(DOCUMENTS)]
    reply = (await server.call("POST", "/v1/rerank", {"query": {"text": QUERY}, "documents": documents})).json()
    assert [(each["index"], each["document"]["text"]) for each in reply["results"]] == [
        (at, DOCUMENTS[at]) for at in ORDER
    ]


async def test_many_documents(server: Server) -> None:
    """2,048 documents, as texts and as objects, decoded in slices, are answered in pieces and in order."""
    texts = [f"document {at} " + "filler " * 8 for at in range(2048)]
    plain = await server.call("POST", "/v1/rerank", {"query": "q", "documents": texts})
    objects = await server.call("POST", "/v1/rerank", {"query": "q", "documents": [{"text": each} for each in texts]})
    assert plain.pieces > 2
    for answer in (plain, objects):
        results = answer.json()["results"]
        assert sorted(each["index"] for each in results) == list(range(2048))
        assert all(each["document"]["text"] == texts[each["index"]] for each in results)
        scores = [each["relevance_score"] for each in results]
        assert scores == sorted(scores, reverse=True)
        assert scores[0] == pytest.approx(score(results[0]["document"]["text"], query="q"))


async def test_ties_keep_their_order(server: Server) -> None:
    """Equal documents keep their order; in text-embeddings-inference the later one comes first."""
    same = ["fish"] * 3
    jina = (await server.call("POST", "/rerank", {"query": QUERY, "documents": same})).json()["results"]
    tei = (await server.call("POST", "/rerank", {"query": QUERY, "texts": same})).json()
    assert [each["index"] for each in jina] == [0, 1, 2]
    assert [each["index"] for each in tei] == [2, 1, 0]
    assert sort_descending(np.array([1, 3, 1, 3], dtype=np.float32), 3) == [1, 3, 0]


async def test_texts_are_tei(server: Server) -> None:
    """With `texts`, answer and error have text-embeddings-inference's format."""
    answer = await server.call("POST", "/rerank", {"query": QUERY, "texts": DOCUMENTS, "documents": None})
    assert [each["index"] for each in answer.json()] == ORDER
    refused = await server.call("POST", "/rerank", {"query": QUERY, "texts": []})
    assert (refused.status, refused.json()["error_type"]) == (400, "Empty")
    reply = await server.call("POST", "/rerank", {"query": QUERY, "documents": []})
    assert (reply.status, list(reply.json())) == (400, ["detail"])


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"query": "a"}, 422, "Missing required field 'documents' (or 'texts'"),
        ({"query": "a", "documents": None, "texts": None}, 422, "Missing required field"),
        ({"query": "a", "documents": ["b"], "texts": ["b"]}, 422, "send one of them"),
        ([], 422, "The body is invalid"),
    ],
)
async def test_neither_or_both(server: Server, body: Any, status: int, words: str) -> None:
    """An ambiguous body is rejected with what to send."""
    answer = await server.call("POST", "/rerank", body)
    assert (answer.status, words in answer.body.decode()) == (status, True)


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"documents": []}, 400, "'documents' is an empty list"),
        ({"documents": ["a"] * 2049}, 400, "more than 2048 entries; split the request."),
        ({"documents": [1]}, 422, "'documents[0]' is invalid"),
        ({"documents": "a"}, 422, "'documents' is invalid"),
        ({"documents": [{"title": "a"}]}, 422, "Missing required field 'documents[0].text'"),
        ({"documents": [{"text": "a", "image": "data:x"}]}, 400, "'documents[0]' has an image"),
        ({"query": " "}, 400, "'query' is empty"),
        ({"query": ["a"]}, 422, "'query' is invalid"),
        ({"top_n": -1}, 422, "'top_n' is invalid"),
        ({"top_n": 1, "top_k": 2}, 400, "'top_n' and 'top_k' are aliases with different values"),
        ({"rank_fields": ["title"]}, 400, "'rank_fields' can only be"),
        ({"max_tokens_per_query": 4}, 400, "'max_tokens_per_query' is not supported"),
        ({"return_embeddings": True}, 400, "'return_embeddings' is not supported"),
        ({"raw_scores": True, "use_activation": True}, 400, "contradict"),
        ({"truncate_prompt_tokens": 8}, 400, "cannot be less than the model's own length (512)"),
        ({"truncation": False, "documents": ["word " * 600]}, 400, "512"),
        ({"model": "nobody"}, 404, "'nobody' does not exist"),
        ({"model": CLASSIFIER}, 400, "cannot rerank"),
        ({"documents": ["poison-item"]}, 500, "failed"),
    ],
)
async def test_refusals(server: Server, fields: dict[str, Any], status: int, words: str) -> None:
    """A `detail` that names the field, on both paths, and no other key."""
    for path in ("/rerank", "/v1/rerank"):
        answer = await server.call("POST", path, {**ASK, **fields})
        assert (answer.status, list(answer.json())) == (status, ["detail"]), answer.body
        assert words in answer.json()["detail"]


async def test_ignored_fields(server: Server) -> None:
    """Other dialects' fields that have no effect, or state the default."""
    fields = {
        "max_chunks_per_doc": 10,
        "rank_fields": ["text"],
        "truncate_prompt_tokens": -1,
        "max_tokens_per_doc": 0,
        "max_tokens_per_query": 0,
        "truncate": "END",
        "user": "u",
        "priority": 0,
        "model": "default/not-specified",
        "made_up": [1],
    }
    plain = (await server.call("POST", "/v1/rerank", ASK)).json()["results"]
    assert (await server.call("POST", "/v1/rerank", {**ASK, **fields})).json()["results"] == plain
    assert (await server.call("POST", "/v1/rerank", {**ASK, "truncate_prompt_tokens": 512})).status == 200


async def test_rerank_with_an_embedder() -> None:
    """An embedder ranks by cosine; a limit per document is rejected unless it has no effect."""
    async with family(EMBEDDER) as server:
        reply = (await server.call("POST", "/v1/rerank", {**ASK, "max_tokens_per_doc": 4096})).json()
        refused = await server.call("POST", "/v1/rerank", {**ASK, "max_tokens_per_doc": 8})
    query = compute_vector(tokenize_item(QUERY), DIMENSION)
    for each in reply["results"]:
        vector = compute_vector(tokenize_item(each["document"]["text"]), DIMENSION)
        cosine = query @ vector / np.linalg.norm(query) / np.linalg.norm(vector)
        assert each["relevance_score"] == pytest.approx(float(cosine), abs=1e-6)
    assert (reply["model"], refused.status) == (EMBEDDER, 400)


@pytest.mark.parametrize("path", ["/v1/ranking", "/ranking"])
async def test_the_format_of_nvidia(server: Server, path: str) -> None:
    """Descending logits, because its client does not sort."""
    passages = [{"text": each} for each in DOCUMENTS]
    body = {"model": RERANKER, "query": {"text": QUERY}, "passages": passages, "truncate": "END"}
    answer = await server.call("POST", path, body, headers={"authorization": "Bearer **********"})
    reply = answer.json()
    assert list(reply) == ["rankings", "usage"]
    assert [each["index"] for each in reply["rankings"]] == ORDER
    logits = [score(DOCUMENTS[at], raw=True) for at in ORDER]
    assert [each["logit"] for each in reply["rankings"]] == pytest.approx(logits)
    refused = await server.call("POST", path, {**body, "truncate": "NONE", "passages": [{"text": "word " * 600}]})
    assert (refused.status, list(refused.json())) == (400, ["detail"])
    assert (await server.call("POST", path, {**body, "passages": DOCUMENTS})).status == 422


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/ranking", "/ranking"])
async def test_error_format(path: str) -> None:
    """A wrong key, a wrong method and a path below give a `detail`; on /rerank the dialect is not known yet, so a 401
    has text-embeddings-inference's format."""
    server = serve(api_key=("key",))
    wrong = await server.call("POST", path, ASK)
    assert (wrong.status, list(wrong.json())) == (401, ["detail"])
    assert wrong.headers["www-authenticate"] == "Bearer"
    method = await server.call("GET", path, headers={"authorization": "Bearer key"})
    assert (method.status, list(method.json()), method.headers["allow"]) == (405, ["detail"], "POST")
    below = await server.call("POST", f"{path}/more", ASK, headers={"authorization": "Bearer key"})
    assert (below.status, list(below.json())) == (404, ["detail"])
    assert (await server.call("POST", "/rerank", ASK)).body == b""


async def test_a_full_queue() -> None:
    """429 with Retry-After, in the dialect of the body."""
    server = serve(RecordingRunner(error=Overloaded("The queue is full.", retry_after=1.5)))
    for path, body in (("/rerank", ASK), ("/v1/rerank", {**ASK, "top_k": None})):
        answer = await server.call("POST", path, body)
        assert (answer.status, answer.headers["retry-after"]) == (429, "2")
        assert answer.json() == {"detail": "The queue is full."}


async def test_open_webui(server: Server) -> None:
    """Its reranker sorts by `index` and requires every score."""
    body = {"model": RERANKER, "query": QUERY, "documents": DOCUMENTS, "top_n": len(DOCUMENTS)}
    answer = await server.call("POST", "/v1/rerank", body, headers={"authorization": "Bearer "})
    results = sorted(orjson.loads(answer.body)["results"], key=lambda each: each["index"])
    assert [each["relevance_score"] for each in results] == pytest.approx(SCORES)


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"truncate": "END", "truncation": True}, 4),
        ({"max_tokens_per_doc": 0, "max_doc_length": 5000}, 4),
        ({"top_n": 0, "top_k": 2}, 2),
        ({"top_n": 2, "top_k": 0}, 2),
    ],
)
async def test_aliases(server: Server, fields: dict[str, Any], count: int) -> None:
    """A word and a flag that agree are accepted, and 0 means unset."""
    answer = await server.call("POST", "/v1/rerank", {**ASK, **fields})
    assert answer.status == 200, answer.body
    assert len(answer.json()["data" if "top_k" in fields else "results"]) == count


@pytest.mark.parametrize("raw", [False, True])
async def test_infinity(server: Server, raw: bool) -> None:
    """Its clients always send `raw_scores` and require `object` to be `rerank`; others get `list`. A document is
    returned as a text, and only on request."""
    body = {**ASK, "raw_scores": raw}
    answer = (await server.call("POST", "/rerank", body)).json()
    plain = answer["results"]
    assert answer["object"] == "rerank"
    assert (await server.call("POST", "/rerank", ASK)).json()["object"] == "list"
    assert all("document" not in each for each in plain)
    shown = (await server.call("POST", "/rerank", {**body, "return_documents": True})).json()["results"]
    assert [each["document"] for each in shown] == [ASK["documents"][each["index"]] for each in shown]


INSTRUCTIONS: list[dict[str, Any]] = [
    {"instruction": "find fish"},
    {"instruct": "find fish"},
    {"chat_template_kwargs": {"instruction": "find fish"}},
    {"chat_template_kwargs": {"instruct": "find fish"}, "instruction": "find fish"},
]


@pytest.mark.parametrize("fields", INSTRUCTIONS)
@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
async def test_an_instruction_is_refused_by_a_model_without_a_place_for_it(
    server: Server, path: str, fields: dict[str, Any]
) -> None:
    answer = await server.call("POST", path, ASK | fields)
    assert answer.status == 400
    assert "no place for an instruction" in answer.json()["detail"]


@pytest.mark.parametrize("fields", [*INSTRUCTIONS, {"instruction": None}, {"instruction": ""}])
async def test_an_instruction_reaches_the_model(
    server: Server, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    tasks: list[Rerank] = []
    run = server.gateway.run

    async def record(task: Rerank, *rest: Any) -> Any:
        tasks.append(task)
        return await run(msgspec.structs.replace(task, instruction=None), *rest)

    monkeypatch.setattr(server.gateway, "run", record)
    assert (await server.call("POST", "/rerank", ASK | fields)).status == 200
    sides = {"text_1": QUERY, "text_2": DOCUMENTS}
    assert (await server.call("POST", "/score", sides | fields)).status == 200
    expected = "find fish" if any(fields.values()) else None
    assert [task.instruction for task in tasks] == [expected] * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"instruction": "a", "instruct": "b"}, "aliases with different values"),
        ({"chat_template_kwargs": {"system": "a"}}, "has 'system'"),
        ({"chat_template_kwargs": {"instruction": 5}}, "must be a string"),
    ],
)
async def test_wrong_instructions(server: Server, fields: dict[str, Any], message: str) -> None:
    answer = await server.call("POST", "/rerank", ASK | fields)
    assert answer.status in (400, 422)
    assert message in answer.body.decode()
