"""Fields of other servers of a dialect, on every route that accepts them: supported or refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson
import pytest

from shoal.app import App, open_app
from shoal.config import load
from shoal.http.json.unsupported import KNOWN_FIELDS
from shoal.sampling_fields import FIELDS_OF_OTHER_APIS, UNSUPPORTED_FIELDS
from shoal.surfaces.anthropic.wire import MessagesRequest
from shoal.surfaces.ollama.chat_requests import UNSUPPORTED_OPTIONS
from shoal.surfaces.ollama.wire import OllamaOptions
from shoal.surfaces.openai.responses.wire import ResponsesRequest
from shoal.surfaces.openai.wire_chat import ChatRequest, CompletionRequest
from tests.surfaces.surface_kit import Answer, Exchange, request_scope

SAID = [{"role": "user", "content": "one two"}]
GENERATION: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "fake", "messages": SAID},
    "/v1/completions": {"model": "fake", "prompt": "one two"},
    "/v1/responses": {"model": "fake", "input": "one two"},
    "/v1/messages": {"model": "fake", "messages": SAID},
}
OLLAMA: dict[str, dict[str, Any]] = {
    "/api/chat": {"model": "fake", "messages": SAID, "stream": False},
    "/api/generate": {"model": "fake", "prompt": "one two", "stream": False},
}
OWN_FIELDS: dict[str, frozenset[str]] = {
    "/v1/chat/completions": frozenset(ChatRequest.__struct_fields__),
    "/v1/completions": frozenset(CompletionRequest.__struct_fields__),
    "/v1/responses": frozenset(ResponsesRequest.__struct_fields__),
    "/v1/messages": frozenset(MessagesRequest.__struct_fields__),
    **dict.fromkeys(OLLAMA, frozenset(OllamaOptions.__struct_fields__)),
}
"""The fields that each API has: the tests of its route cover them."""
OTHERS: dict[str, dict[str, dict[str, Any]]] = {
    "openai": {"/v1/embeddings": {"model": "fake", "input": "one"}, "/embeddings": {"model": "fake", "input": "one"}},
    "rerank": {
        "/rerank": {"model": "ranker", "query": "q", "documents": ["a"]},
        "/v1/rerank": {"model": "ranker", "query": "q", "documents": ["a"]},
        "/v1/ranking": {"model": "ranker", "query": {"text": "q"}, "passages": [{"text": "a"}]},
    },
    "scoring": {
        "/score": {"model": "ranker", "text_1": "q", "text_2": "a"},
        "/classify": {"model": "ranker", "input": ["a"]},
        "/pooling": {"model": "fake", "input": ["a"]},
    },
    "ollama": {
        "/api/embed": {"model": "fake", "input": "a"},
        "/api/embeddings": {"model": "fake", "prompt": "a"},
    },
    "tei": {"/rerank": {"model": "ranker", "query": "q", "texts": ["a"]}, "/embed": {"model": "fake", "inputs": "a"}},
    "cohere": {
        "/v2/rerank": {"model": "ranker", "query": "q", "documents": ["a"]},
        "/v2/embed": {"model": "fake", "texts": ["a"], "input_type": "search_query", "embedding_types": ["float"]},
        "/v1/embed": {"model": "fake", "texts": ["a"]},
    },
}
SOMETHING: Mapping[str, Any] = {"truncation_direction": "left", "truncation_side": "left", "add_special_tokens": False}
"""Values that ask for something, of fields that some route has with a type; of others any text does."""


@pytest.fixture
async def app() -> AsyncIterator[App]:
    async with open_app(load({}, {}), ["fake:", "ranker=fake:labels=1"]) as application:
        await application.wait_until_loaded()
        yield application


async def post(app: App, path: str, body: dict[str, Any]) -> Answer:
    exchange = Exchange([orjson.dumps(body)])
    sent = {"host": "127.0.0.1:8080", "content-type": "application/json"}
    await app.asgi(request_scope("POST", path, sent), exchange.receive, exchange.send)
    return exchange.answer()


def assert_refused(answer: Answer, name: str) -> None:
    assert 400 <= answer.status < 500, (name, answer.body)
    assert name in answer.body.decode(), answer.body


@pytest.mark.parametrize("path", GENERATION)
async def test_unsupported_samplers_are_refused(app: App, path: str) -> None:
    """Each is refused by name unless its value is neutral; unknown fields are ignored."""
    for name, neutral in UNSUPPORTED_FIELDS.items():
        assert_refused(await post(app, path, {**GENERATION[path], name: "something"}), name)
        for value in (None, *neutral):
            answer = await post(app, path, {**GENERATION[path], name: value})
            assert answer.status == 200, (name, value, answer.body)
    assert (await post(app, path, {**GENERATION[path], "made_up": 5})).status == 200


@pytest.mark.parametrize("path", [*GENERATION, *OLLAMA])
async def test_fields_of_other_apis(app: App, path: str) -> None:
    """A field that another API has is refused by name where it would be dropped silently; neutral values pass."""
    body = {**GENERATION, **OLLAMA}[path]
    for name in FIELDS_OF_OTHER_APIS.keys() - OWN_FIELDS[path]:
        for value in ("something", None, *FIELDS_OF_OTHER_APIS[name]):
            fields = {"options": {name: value}} if path in OLLAMA else {name: value}
            answer = await post(app, path, {**body, **fields})
            if value == "something":
                assert_refused(answer, name)
            else:
                assert answer.status == 200, (name, value, answer.body)


async def test_ignored_fields_of_other_apis() -> None:
    """The operator can ignore such a field; the answer names it."""
    settings = load({"ignore_parameters": ["stop"]}, {})
    async with open_app(settings, ["fake:"]) as application:
        await application.wait_until_loaded()
        answer = await post(application, "/v1/responses", {**GENERATION["/v1/responses"], "stop": ["two"]})
        assert (answer.status, answer.headers["x-shoal-ignored"]) == (200, "stop")


@pytest.mark.parametrize("path", OLLAMA)
async def test_options_of_ollama(app: App, path: str) -> None:
    """Options of other servers are refused unless they have no effect."""
    for name, neutral in UNSUPPORTED_OPTIONS.items():
        assert_refused(await post(app, path, {**OLLAMA[path], "options": {name: 0.5}}), name)
        for value in (None, *neutral):
            assert (await post(app, path, {**OLLAMA[path], "options": {name: value}})).status == 200
    assert (await post(app, path, {**OLLAMA[path], "options": {"num_ctx": 4096, "made_up": 1}})).status == 200


@pytest.mark.parametrize("dialect", KNOWN_FIELDS)
async def test_fields_of_other_servers(app: App, dialect: str) -> None:
    """The fields are refused on each route without them; null and neutral values are accepted."""
    for path, body in OTHERS[dialect].items():
        assert (await post(app, path, {**body, "made_up": 5})).status == 200
        for name, neutral in KNOWN_FIELDS[dialect].items():
            answer = await post(app, path, {**body, name: SOMETHING.get(name, "something")})
            if answer.status != 200:  # otherwise the field works, and the tests of the route cover it
                assert_refused(answer, name)
            else:
                assert name in ("truncation_direction", "truncation_side"), (path, name)
            for value in (None, *neutral):
                answer = await post(app, path, {**body, name: value})
                assert answer.status == 200, (path, name, value, answer.body)


async def test_every_table_has_its_routes() -> None:
    assert KNOWN_FIELDS.keys() == OTHERS.keys()


async def test_both_names_of_the_truncation_side_work(app: App) -> None:
    """Both vLLM's and TEI's name work; contradicting values are refused."""
    body = {"model": "fake", "input": " ".join(f"w{number}" for number in range(600))}
    left = await post(app, "/v1/embeddings", {**body, "truncation_direction": "left"})
    assert (
        left.json()["data"] == (await post(app, "/v1/embeddings", {**body, "truncation_side": "left"})).json()["data"]
    )
    assert left.json()["data"] != (await post(app, "/v1/embeddings", body)).json()["data"]
    both = {"truncation_direction": "left", "truncation_side": "right"}
    assert (await post(app, "/v1/embeddings", {**body, **both})).status == 400
