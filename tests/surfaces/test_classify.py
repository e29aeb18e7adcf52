"""vLLM's /classify."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from shoal.backends.fake.model import compute_scores, tokenize_item
from shoal.types import Item
from tests.surfaces.family_kit import CLASSIFIER, EMBEDDER, RERANKER, family
from tests.surfaces.surface_kit import Server


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with family(EMBEDDER, CLASSIFIER, RERANKER) as server:
        yield server


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
@pytest.mark.parametrize(
    ("inputs", "items"),
    [
        ("I like you", ["I like you"]),
        (["one", "two"], ["one", "two"]),
        (["one", ["a premise", "a hypothesis"], ["two"]], ["one", ("a premise", "a hypothesis"), "two"]),
    ],
)
async def test_labels(server: Server, path: str, inputs: Any, items: list[Item]) -> None:
    """The top label and all probabilities, in the order of the model's labels; a list of two texts is never a pair."""
    answer = await server.call("POST", path, {"model": CLASSIFIER, "input": inputs})
    reply = answer.json()
    assert list(reply) == ["id", "object", "created", "model", "data", "usage"]
    assert reply["id"].startswith("classify-")
    for at, (item, each) in enumerate(zip(items, reply["data"], strict=True)):
        expected = compute_scores(tokenize_item(item), 3, raw=False)
        assert list(each) == ["index", "label", "probs", "num_classes"]
        assert (each["index"], each["label"], each["num_classes"]) == (at, f"LABEL_{expected.argmax()}", 3)
        assert each["probs"] == pytest.approx(expected.tolist())
    assert reply["usage"]["total_tokens"] == sum(len(tokenize_item(item)) for item in items)


async def test_raw_and_the_default(server: Server) -> None:
    """Logits without the activation; the default is the first classifier; a reranker has one label."""
    raw = (await server.call("POST", "/classify", {"input": "one", "use_activation": False})).json()
    assert raw["model"] == CLASSIFIER
    assert raw["data"][0]["probs"] == pytest.approx(compute_scores(tokenize_item("one"), 3, raw=True).tolist())
    single = (await server.call("POST", "/classify", {"input": "one", "model": RERANKER})).json()["data"][0]
    assert (single["label"], single["num_classes"]) == ("LABEL_0", 1)


@pytest.mark.parametrize("raw", [False, True])
async def test_infinity(server: Server, raw: bool) -> None:
    """Infinity's client always sends `raw_scores`, and reads lists of labels with scores in descending order."""
    items: list[Item] = ["one", "two"]
    body = {"input": items, "model": "default/not-specified", "raw_scores": raw}
    reply = (await server.call("POST", "/classify", body)).json()
    assert (reply["object"], reply["model"]) == ("classify", CLASSIFIER)
    for item, each in zip(items, reply["data"], strict=True):
        scores = compute_scores(tokenize_item(item), 3, raw=raw)
        order = np.argsort(-scores, kind="stable").tolist()
        assert [one["label"] for one in each] == [f"LABEL_{at}" for at in order]
        assert [one["score"] for one in each] == pytest.approx([float(scores[at]) for at in order])


async def test_many(server: Server) -> None:
    """2,048 inputs, some of them pairs, in a body that is decoded in slices."""
    inputs: list[Any] = [
        [f"a {at} " + "filler " * 5, "b"] if at % 3 == 0 else f"text {at} " + "filler " * 5 for at in range(2048)
    ]
    answer = await server.call("POST", "/classify", {"model": CLASSIFIER, "input": inputs})
    assert answer.pieces > 2
    for at, each in enumerate(answer.json()["data"]):
        item = tuple(inputs[at]) if isinstance(inputs[at], list) else inputs[at]
        assert each["index"] == at
        assert each["probs"] == pytest.approx(compute_scores(tokenize_item(item), 3, raw=False).tolist())


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({"input": []}, 400, "input", "empty list"),
        ({"input": ["a", ""]}, 400, "input", "'input[1]' is empty"),
        ({"input": [["a", "b", "c"]]}, 400, "input", "'input[0]' must be a text or a pair"),
        ({"input": [[]]}, 400, "input", "'input[0]' must be a text or a pair"),
        ({"input": ["a"] * 2049}, 400, "input", "2048"),
        ({"input": 7}, 400, "input", "'input' is invalid"),
        ({"messages": []}, 400, "input", "Missing required field 'input'"),
        ({"input": "a", "model": EMBEDDER}, 400, "model", "cannot classify"),
        ({"input": "a", "model": "nobody"}, 404, "model", "does not exist"),
    ],
)
async def test_refusals(server: Server, body: Any, status: int, param: str | None, words: str) -> None:
    """OpenAI's nested error."""
    answer = await server.call("POST", "/classify", {"model": CLASSIFIER, **body})
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (status, param)
    assert words in error["message"]
