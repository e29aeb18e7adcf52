"""A server's /info: its model and limits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.backends.base.http_answer import Answer
from shoal.backends.tei.info import Info, parse_info
from shoal.errors import ConfigError, UpstreamFailed
from tests.fakes.tei import FakeTei
from tests.fakes.tei_model import Script
from tests.unit.backends.tei.kit import close, engine_of

WHERE = "http://gpu:8080"
LABELS = {"id2label": {"0": "sad", "2": "merry", "1": "plain", "10": "loud"}, "label2id": {}}
CARD: dict[str, Any] = {
    "model_id": "BAAI/bge-small-en-v1.5",
    "model_sha": None,
    "model_dtype": "float16",
    "model_type": {"embedding": {"pooling": "cls"}},
    "max_concurrent_requests": 512,
    "max_input_length": 512,
    "max_batch_tokens": 16384,
    "max_batch_requests": None,
    "max_client_batch_size": 32,
    "auto_truncate": True,
    "tokenization_workers": 7,
    "version": "1.9.3",
    "sha": None,
    "docker_label": None,
}


def card(status: int = 200, **changes: Any) -> Answer:
    return Answer(status, {"content-type": "application/json"}, json.dumps(CARD | changes).encode())


def read(**changes: Any) -> Info:
    return parse_info(card(**changes), WHERE)


def test_limits_and_facts() -> None:
    info = read(max_client_batch_size=8, max_concurrent_requests=100, served_model_name="mine", model_sha="abc")
    assert (info.model_id, info.served_name, info.revision, info.version) == (CARD["model_id"], "mine", "abc", "1.9.3")
    assert (info.max_client_batch_size, info.max_concurrent_requests) == (8, 100)
    assert (info.max_input_length, info.max_batch_tokens, info.auto_truncate) == (512, 16384, True)
    assert info.dtype == "f16"


@pytest.mark.parametrize(
    ("model_type", "kind", "tasks", "vectors", "labels"),
    [
        ({"embedding": {"pooling": "last_token"}}, "embedding", ("embed",), ("dense", "tokens"), ()),
        ({"embedding": {"pooling": "splade"}}, "splade", ("embed",), ("sparse",), ()),
        ({"classifier": LABELS}, "classifier", ("classify",), (), ("sad", "plain", "merry", "loud")),
        ({"reranker": {"id2label": {"0": "LABEL_0"}}}, "reranker", ("rerank", "classify"), (), ("LABEL_0",)),
        ({"reranker": {}}, "reranker", ("rerank", "classify"), (), ("LABEL_0",)),
        ({"classifier": {"id2label": {"0": "one"}}}, "reranker", ("rerank", "classify"), (), ("one",)),
    ],
)
def test_kinds_of_models(model_type: Any, kind: str, tasks: Any, vectors: Any, labels: Any) -> None:
    """Labels are ordered by their number, not by name or by the order of the hash map."""
    info = read(model_type=model_type)
    assert (info.kind, info.tasks, info.vectors, info.labels) == (kind, tasks, vectors, labels)
    assert info.embeds is ("embed" in tasks)


def test_an_older_server_states_less() -> None:
    old = {"model_id": "m", "model_type": CARD["model_type"], "max_input_length": 128, "max_client_batch_size": 4}
    info = parse_info(Answer(200, {}, json.dumps(old).encode()), WHERE)
    assert (info.max_client_batch_size, info.max_concurrent_requests, info.served_name) == (4, 512, "")


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_starting_server_is_retried(status: int) -> None:
    with pytest.raises(UpstreamFailed, match=f"status {status}.*it may be starting"):
        parse_info(card(status), WHERE)


def test_a_class_of_any_number() -> None:
    """Class numbers may have more digits than Python parses."""
    labels = {"1" * 5000: "last", "0": "first", "x": "after"}
    info = parse_info(card(model_type={"classifier": {"id2label": labels}}), WHERE)
    assert info.labels == ("first", "last", "after")


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_refused(status: int) -> None:
    with pytest.raises(ConfigError, match="the operator must set upstream_api_key"):
        parse_info(card(status), WHERE)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (card(404), "this is not a text-embeddings-inference server"),
        (card(302), "check the address"),
        (Answer(200, {}, b"<html>"), "not an info"),
        (Answer(200, {}, b"{}"), "not an info"),
        (Answer(200, {}, b"[" * 5000), "not an info"),
        (card(max_client_batch_size=0), "not an info"),
        (card(model_type={"oracle": {}}), "no known model_type"),
        (card(model_type={"classifier": {}}), "add id2label"),
        (card(model_type={"classifier": {"id2label": {"0": "a", "1": "a"}}}), "the same name"),
    ],
)
def test_what_cannot_be_served(answer: Answer, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_info(answer, WHERE)


def test_a_model_is_the_same_whatever_its_limits() -> None:
    assert read().same_model(read(max_client_batch_size=1, version="2", auto_truncate=False))
    changes: list[dict[str, Any]] = [
        {"model_id": "x"},
        {"model_sha": "b"},
        {"model_dtype": "float32"},
        {"model_type": {"reranker": {}}},
    ]
    for change in changes:
        assert not read().same_model(read(**change))


@pytest.mark.parametrize("era", ["1.8", "1.9"])
@pytest.mark.parametrize("kind", ["embedding", "splade", "reranker", "classifier"])
async def test_of_a_server(kind: Any, era: str) -> None:
    async with FakeTei(Script(kind=kind, era=era, model_id="org/its")) as server:
        engine = await engine_of(server)
        assert (engine.info.kind, engine.info.model_id) == (kind, "org/its")
        await close(engine)
