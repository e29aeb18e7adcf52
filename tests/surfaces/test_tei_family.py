"""text-embeddings-inference's routes with every kind of model: the tests compute each answer themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from shoal.backends.fake.model import compute_scores, compute_vector, tokenize_item, word_id
from shoal.core.registry import Model
from shoal.errors import Overloaded, SetupError
from shoal.types import Item
from tests.surfaces.family_kit import CLASSIFIER, DIMENSION, EMBEDDER, RERANKER, SPLADE, family
from tests.surfaces.surface_kit import raising

LABELS = ["LABEL_0", "LABEL_1", "LABEL_2"]


def predict(item: Item, labels: int = 3, *, raw: bool = False) -> list[dict[str, Any]]:
    """Return /predict's answer for a text or a pair, in descending order."""
    scores = compute_scores(tokenize_item(item), labels, raw=raw)
    return [{"score": float(scores[at]), "label": LABELS[at]} for at in np.argsort(scores)[::-1]]


def close(one: Any, other: Any) -> None:
    """Compare lists and objects recursively, up to the last bits of float32."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            close(one[name], other[name])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            close(left, right)
    else:
        assert one == (pytest.approx(other, rel=1e-5) if isinstance(one, float) else other)


@pytest.mark.parametrize(
    ("inputs", "items", "batch"),
    [
        ("a", ["a"], False),
        (["a"], ["a"], False),
        (["a", "b c"], [("a", "b c")], False),
        ([["a"], ["b", "c"]], ["a", ("b", "c")], True),
        ([["a"]], ["a"], True),
        ([[f"text {at}"] for at in range(200)], [f"text {at}" for at in range(200)], True),
    ],
)
async def test_two_texts_are_a_pair(inputs: Any, items: list[Item], batch: bool) -> None:
    """Several inputs are a list of lists, and each is answered by a list."""
    async with family() as server:
        reply = (await server.call("POST", "/predict", {"inputs": inputs})).json()
    close(reply if batch else [reply], [predict(item) for item in items])


async def test_prediction_scores() -> None:
    """A sigmoid for one label, a softmax for several, logits on request."""
    async with family() as server:
        for model, labels in ((CLASSIFIER, 3), (RERANKER, 1)):
            for raw in (False, True):
                body = {"inputs": "a", "raw_scores": raw, "model": model}
                close((await server.call("POST", "/predict", body)).json(), predict("a", labels, raw=raw))


async def test_a_classifier_is_preferred() -> None:
    """A reranker predicts only if there is no classifier."""
    async with family(RERANKER, CLASSIFIER) as server:
        assert len((await server.call("POST", "/predict", {"inputs": "a"})).json()) == 3
        rows = (await server.call("POST", "/", {"query": "q", "texts": ["a"]})).json()
        close(rows, [{"index": 0, "score": float(compute_scores(tokenize_item(("q", "a")), 1, raw=False)[0])}])
    async with family(RERANKER) as server:
        assert len((await server.call("POST", "/predict", {"inputs": "a"})).json()) == 1


async def test_rank_order() -> None:
    """Descending scores, later texts first on a tie; every text is returned."""
    texts = ["a b", "c", "a b", "d", "c"]
    expected = [float(compute_scores(tokenize_item(("q", text)), 1, raw=False)[0]) for text in texts]
    async with family() as server:
        rows = (await server.call("POST", "/", {"query": "q", "texts": texts, "return_text": True})).json()
    assert [row["index"] for row in rows] == sorted(range(5), key=lambda at: (expected[at], at), reverse=True)
    assert [row["text"] for row in rows] == [texts[row["index"]] for row in rows]
    assert [list(row) for row in rows] == [["index", "text", "score"]] * 5


async def test_vectors_of_every_kind() -> None:
    """Token vectors are raw, sparse ones sorted by index."""
    texts = ["a b a", "c"]
    async with family() as server:
        tokens = (await server.call("POST", "/embed_all", {"inputs": texts})).json()
        sparse = (await server.call("POST", "/embed_sparse", {"inputs": texts})).json()
    assert tokens == [[compute_vector([word_id(word)], DIMENSION).tolist() for word in text.split()] for text in texts]
    counted = [{word_id("a"): 2.0, word_id("b"): 1.0}, {word_id("c"): 1.0}]
    assert sparse == [[{"index": at, "value": each[at]} for at in sorted(each)] for each in counted]


async def test_similarity() -> None:
    """The cosine of each sentence with the source; the vectors are not normalized."""
    texts = ["a b", "c", "a b"]
    async with family() as server:
        body = {"inputs": {"source_sentence": texts[0], "sentences": texts[1:]}}
        answer = await server.call("POST", "/similarity", body)
    source, *others = [compute_vector(tokenize_item(text), DIMENSION).astype(float) for text in texts]
    norm = np.linalg.norm
    close(answer.json(), [float(source @ each / norm(source) / norm(each)) for each in others])
    assert answer.headers["x-compute-characters"] == "7"


@pytest.mark.parametrize(
    ("source", "sentences", "status", "words"),
    [
        ("a", ["b", "reject-item"], 422, "sentences[1]: the engine refused an input"),
        ("reject-item", ["b"], 422, "source_sentence: the engine refused an input"),
        ("a", ["nan-item", "b"], 424, "sentences[0]: the model answered NaN for this input"),
        ("a", ["poison-item"], 424, "the engine failed without a reason"),
    ],
)
async def test_similarity_errors(source: str, sentences: list[str], status: int, words: str) -> None:
    """Errors name the client's field, not an index in Shoal's internal list."""
    async with family() as server:
        body = {"inputs": {"source_sentence": source, "sentences": sentences}}
        answer = await server.call("POST", "/similarity", body)
    assert (answer.status, answer.json()["error"]) == (status, words)


@pytest.mark.parametrize(
    ("path", "body", "characters", "tokens"),
    [
        ("/embed", {"inputs": ["été", [1, 2, 3]]}, "6", "4"),
        ("/embed_all", {"inputs": "a b"}, "3", "2"),
        ("/embed_sparse", {"inputs": "a b"}, "3", "2"),
        ("/predict", {"inputs": [["ab"], ["c", "d"]]}, "4", "4"),
        ("/", {"query": "qq", "texts": ["a", "bc"]}, "7", "6"),
        ("/invocations", {"inputs": {"source_sentence": "a", "sentences": ["b c"]}}, "4", "3"),
    ],
)
async def test_headers(path: str, body: Any, characters: str, tokens: str) -> None:
    """The query counts with every text; times are whole milliseconds, and batch headers are added."""
    async with family() as server:
        headers = (await server.call("POST", path, body)).headers
    assert headers["x-compute-type"] == "fake+f32"
    assert (headers["x-compute-characters"], headers["x-compute-tokens"]) == (characters, tokens)
    times = ("compute", "total", "tokenization", "queue", "inference")
    assert all(headers[f"x-{name}-time"].isdigit() for name in times)
    assert headers["x-compute-time"] == headers["x-total-time"]
    assert int(headers["x-shoal-batch-size"]) >= 1


@pytest.mark.parametrize("path", ["/tokenize", "/decode", "/vertex", "/info"])
async def test_routes_without_compute_headers(path: str) -> None:
    """Like the original."""
    body = {"inputs": "a", "ids": [1], "instances": [{"inputs": "a"}]}
    async with family() as server:
        answer = await (server.call("GET", path) if path == "/info" else server.call("POST", path, body))
    assert answer.status == 200
    assert not [name for name in answer.headers if name.startswith("x-compute")]


async def test_a_model_by_name() -> None:
    """Every route accepts `model`; a model that cannot do the task is rejected like in the original."""
    bodies: dict[str, Any] = {
        "/embed": {"inputs": "a"},
        "/embed_all": {"inputs": "a"},
        "/embed_sparse": {"inputs": "a"},
        "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
        "/predict": {"inputs": "a"},
        "/": {"query": "a", "texts": ["b"]},
    }
    able = {
        "/embed": {EMBEDDER},
        "/embed_all": {EMBEDDER},
        "/embed_sparse": {SPLADE},
        "/similarity": {EMBEDDER},
        "/predict": {RERANKER, CLASSIFIER},
        "/": {RERANKER},
    }
    async with family() as server:
        for path, body in bodies.items():
            for model in (EMBEDDER, SPLADE, RERANKER, CLASSIFIER):
                answer = await server.call("POST", path, {**body, "model": model})
                assert answer.status == (200 if model in able[path] else 424), (path, model)
                assert model in able[path] or answer.json()["error_type"] == "Backend"
        assert (await server.call("POST", "/decode", {"ids": [1], "model": "nobody"})).status == 424
        assert (await server.call("POST", "/tokenize", {"inputs": "a", "model": CLASSIFIER})).status == 200


async def test_default_for_is_honored() -> None:
    """The model with `default_for` predicts, even if it is a reranker."""
    async with family() as server:
        named = server.gateway.registry.find(RERANKER)
        named.default_for = ("classify",)
        assert len((await server.call("POST", "/predict", {"inputs": "a"})).json()) == 1


@pytest.mark.parametrize("path", ["/", "/invocations"])
async def test_text_classification_at_the_root(path: str) -> None:
    """huggingface_hub sends one text with `parameters` of only its own names. The classifier answers, although the
    default model embeds; like the original, it ignores their values."""
    async with family() as server:
        for parameters in ({}, {"top_k": 2}, {"function_to_apply": "none", "top_k": None}):
            close((await server.call("POST", path, {"inputs": "a", "parameters": parameters})).json(), predict("a"))
        vectors = (await server.call("POST", path, {"inputs": "a"})).json()
        for body in (
            {"inputs": "a", "parameters": None},
            {"inputs": "a", "parameters": []},
            {"inputs": "a", "parameters": {"normalize": True}},
            {"inputs": ["a"], "parameters": {}},
            {"inputs": "a", "parameters": {}, "model": EMBEDDER},
        ):
            assert (await server.call("POST", path, body)).json() == vectors, body


async def test_text_classification_without_a_classifier() -> None:
    """With options it is an error; without any, the default model answers."""
    async with family() as server:
        server.gateway.registry.remove(server.gateway.registry.find(CLASSIFIER))
        vectors = (await server.call("POST", "/", {"inputs": "a"})).json()
        assert (await server.call("POST", "/", {"inputs": "a", "parameters": {}})).json() == vectors
        server.gateway.registry.remove(server.gateway.registry.find(RERANKER))
        answer = await server.call("POST", "/", {"inputs": "a", "parameters": {"top_k": 1}})
    assert answer.status == 424
    assert "not a classifier" in answer.json()["error"]


async def test_instances_run_concurrently() -> None:
    """A Vertex request may hold many bodies for several routes; each is answered as if alone."""
    bodies = [{"inputs": f"text {at}"} for at in range(100)] + [{"query": "q", "texts": ["a"]}]
    async with family() as server:
        together = (await server.call("POST", "/vertex", {"instances": bodies})).json()["predictions"]
        assert together == [(await server.call("POST", "/", body)).json() for body in bodies]


async def test_the_first_failed_instance_is_reported() -> None:
    """Even if a later one fails sooner; instances that reached a model are not counted as rejected."""
    async with family() as server:
        instances = [{"inputs": "a"}, {"inputs": "a reject-item"}, {"inputs": ""}]
        answer = await server.call("POST", "/vertex", {"instances": instances})
    assert (answer.status, answer.json()["error_type"]) == (422, "Validation")
    assert "refused an input" in answer.json()["error"]


@pytest.mark.parametrize("path", ["/embed", "/embed_all", "/embed_sparse", "/predict", "/"])
async def test_large_answers_leave_the_loop_free(path: str) -> None:
    """While 2,048 inputs are written, other tasks run."""
    inputs: Any = [f"word{at} and {at}" for at in range(2048)]
    if path == "/predict":
        inputs = [[text] for text in inputs]
    async with family() as server:
        names = {"/": CLASSIFIER} if path == "/" else {}
        iterations = 0

        async def ticking() -> None:
            nonlocal iterations
            while True:
                await asyncio.sleep(0)
                iterations += 1

        body = {"inputs": inputs} if path != "/" else {"inputs": [[each] for each in inputs], "model": names["/"]}
        ticker = asyncio.create_task(ticking())
        answer = await server.call("POST", path, body)
        ticker.cancel()
        await asyncio.gather(ticker, return_exceptions=True)
    assert len(answer.json()) == 2048
    assert answer.pieces >= 8
    assert iterations > 20


async def test_a_large_body_of_pairs() -> None:
    """The same answers and errors as in small bodies."""
    pairs = [[f"first {at} {'x' * 60}", f'second \\ " {at}'] for at in range(1500)]
    async with family() as server:
        reply = (await server.call("POST", "/predict", {"inputs": pairs})).json()
        close(reply[:3] + reply[-3:], [predict((one, other)) for one, other in pairs[:3] + pairs[-3:]])
        many = await server.call("POST", "/predict", {"inputs": pairs * 2})
        assert (many.status, many.json()["error"]) == (422, "batch size 3000 > maximum allowed batch size 2048")
        for wrong in (["a", "b", "c", "d"], [], [7]):
            answer = await server.call("POST", "/predict", {"inputs": [*pairs, wrong]})
            assert (answer.status, answer.headers["content-type"]) == (422, "text/plain; charset=utf-8"), wrong


async def test_a_large_body_of_sentences() -> None:
    """The long list is inside an object."""
    sentences = [f"sentence {at} {'x' * 80}" for at in range(1500)]
    async with family() as server:
        body = {"inputs": {"source_sentence": "a", "sentences": sentences}}
        assert len((await server.call("POST", "/similarity", body)).json()) == 1500
        body["inputs"]["sentences"] = sentences * 2
        assert (await server.call("POST", "/similarity", body)).status == 422


async def test_keys() -> None:
    """Every route except /ping requires one; the scheme may have either case."""
    async with family(api_key=("k",)) as server:
        assert (await server.call("GET", "/ping")).status == 200
        assert (await server.call("GET", "/info")).status == 401
        for sent, status in (("Bearer k", 200), ("Bearer other", 401), ("k", 401), ("", 401)):
            answer = await server.call("GET", "/info", headers={"authorization": sent})
            assert answer.status == status, sent
            assert answer.body if status == 200 else not answer.body


async def test_ping_if_no_model_can_answer() -> None:
    """503, like the original's health."""
    async with family(EMBEDDER) as server:
        registry = server.gateway.registry
        registry.remove(registry.find(EMBEDDER))
        assert (await server.call("GET", "/ping")).status == 200  # a server without models is healthy
        registry.add(broken := Model(name="broken"))
        broken.mark_failed(SetupError("the file is broken"))
        answer = await server.call("GET", "/ping")
    assert (answer.status, answer.json()) == (503, {"error": "unhealthy", "error_type": "Unhealthy"})


async def test_overload() -> None:
    """429 with the original's type, plus Retry-After."""
    answer = await raising(Overloaded("later", retry_after=2)).call("POST", "/embed", {"inputs": "a"})
    assert (answer.status, answer.json()["error_type"], answer.headers["retry-after"]) == (429, "Overloaded", "2")


async def test_while_models_load() -> None:
    """503 Unhealthy on every route, at once."""
    async with family(EMBEDDER) as server:
        registry = server.gateway.registry
        registry.remove(registry.find(EMBEDDER))
        registry.add(Model(name="slow"))
        for path, body in (
            ("/embed_all", {"inputs": "a"}),
            ("/embed_sparse", {"inputs": "a"}),
            ("/predict", {"inputs": "a"}),
            ("/", {"query": "a", "texts": ["b"]}),
            ("/", {"inputs": "a"}),
            ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
        ):
            answer = await server.call("POST", path, body)
            assert (answer.status, answer.json()["error_type"]) == (503, "Unhealthy"), path


async def test_without_any_model() -> None:
    """424, with the next step."""
    async with family(EMBEDDER) as server:
        server.gateway.registry.remove(server.gateway.registry.find(EMBEDDER))
        for path, body in (("/predict", {"inputs": "a"}), ("/embed", {"inputs": "a"}), ("/", {"inputs": "a"})):
            answer = await server.call("POST", path, body)
            assert answer.status == 424
            assert "start one with `shoal serve ADDRESS`" in answer.json()["error"]


@pytest.mark.parametrize("path", ["/", "/invocations"])
async def test_null_means_absent(path: str) -> None:
    """Also for fields that select the route: some clients send every field."""
    async with family() as server:
        plain = await server.call("POST", "/embed", {"inputs": "a"})
        null = await server.call("POST", path, {"texts": None, "query": None, "inputs": "a"})
        ranked = await server.call("POST", path, {"texts": ["a", "b"], "query": "q", "inputs": None})
    assert (null.status, null.body) == (200, plain.body)
    assert {each["index"] for each in ranked.json()} == {0, 1}
