"""/openapi.json is accurate: each operation's errors and answers match their declaration."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # it has no types

from shoal.core.gateway import Gateway
from shoal.core.protocols import Operation
from shoal.core.registry import Model, Registry
from shoal.http.openapi import OpenApi, build_document, list_operations, to_openapi_path
from shoal.surfaces import SURFACES, Application, Options, build_app
from tests.surfaces.family_kit import add_family
from tests.surfaces.life_kit import FOREIGN, OTHER, Living, living
from tests.surfaces.surface_kit import MODEL, Answer, Exchange, RecordingRunner, request_scope
from tests.surfaces.talk_kit import FakeRunner, add_runner

LOCAL = {"host": "127.0.0.1:8080"}
JSON = {"content-type": "application/json"}


def app_of(**options: Any) -> Application:
    """Build every documented surface over one ready model."""
    registry = Registry()
    registry.add(model := Model(name=MODEL))
    model.mark_loaded(RecordingRunner())
    settings = Options(metrics=lambda _: b"", **options)
    surfaces = [make(settings) for make in SURFACES]
    return build_app(Gateway(registry), [*surfaces, OpenApi(surfaces)], settings)


OPERATIONS = [route.operation for route in app_of().routes.all]


@pytest.fixture(scope="module")
def documented() -> dict[str, Any]:
    """Return the paths of /openapi.json, as served."""
    (shown,) = [each for each in OPERATIONS if each.path == "/openapi.json"]
    paths: dict[str, Any] = asyncio.run(call(app_of(), shown, LOCAL)).json()["paths"]
    return paths


async def call(
    app: Application,
    operation: Operation,
    headers: dict[str, str],
    body: Sequence[bytes] = (b"",),
    *,
    silent: bool = False,
) -> Answer:
    path = operation.path.replace("{id:path}", MODEL)
    exchange = Exchange(body, silent=silent)
    await app(request_scope(operation.method, path, headers), exchange.receive, exchange.send)
    return exchange.answer()


async def provoke(operation: Operation) -> AsyncIterator[tuple[str, Answer]]:
    """Yield each way to make a request fail, and the answer."""
    if operation.access != "public":
        yield "no key", await call(app_of(api_key=("k",), admin_key=("a",)), operation, LOCAL)
        yield "a foreign Host", await call(app_of(), operation, {"host": "evil.example"})
    if operation.method != "GET":
        yield "too large", await call(app_of(), operation, {**LOCAL, "content-length": "40000000"})
        yield "compressed", await call(app_of(), operation, {**LOCAL, "content-encoding": "gzip"})
        yield "a senseless length", await call(app_of(), operation, {**LOCAL, "content-length": "many"})
        slow = {**LOCAL, "content-length": "5"}
        yield "too slow", await call(app_of(body_timeout_s=0.01), operation, slow, silent=True)
    if operation.request is not None:
        yield "not JSON by its type", await call(app_of(), operation, {**LOCAL, "content-type": "text/plain"}, [b"{}"])
        yield "bad JSON", await call(app_of(), operation, LOCAL | JSON, [b"{"])
        yield "the wrong JSON", await call(app_of(), operation, LOCAL | JSON, [b"7"])


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: f"{each.method} {each.path}")
async def test_refusals_are_declared(operation: Operation, documented: dict[str, Any]) -> None:
    """Without a key, from a foreign Host, or with a body that is too large, compressed, slow or invalid: status and
    content type are declared, and an answer without a body is declared without one."""
    declared = documented[to_openapi_path(operation.path)][operation.method.lower()]["responses"]
    walked = 0
    async for cause, answer in provoke(operation):
        assert 400 <= answer.status < 500, cause
        content = declared.get(str(answer.status), {"content": "nothing"}).get("content", {})
        if answer.body:
            assert answer.headers["content-type"].partition(";")[0] in content, cause
        else:
            assert content == {}, cause
        walked += 1
    # 2 for keys, 4 for bodies, 3 more for JSON bodies
    guarded, sends, json = operation.access != "public", operation.method != "GET", operation.request is not None
    assert walked == 2 * guarded + 4 * sends + 3 * json


def test_both_forms_of_one_status_are_declared() -> None:
    """TEI's 400 is its own JSON or its framework's plain text; its 401 has no body; OpenAI's errors are JSON."""
    surfaces = [make(Options()) for make in SURFACES]
    paths = build_document({each.name: list_operations(each, Gateway(Registry())) for each in surfaces})["paths"]
    tei, openai = (paths[path]["post"]["responses"] for path in ("/embed", "/v1/embeddings"))
    assert set(tei["400"]["content"]) == set(tei["422"]["content"]) == {"application/json", "text/plain"}
    assert "content" not in tei["401"]
    assert set(tei["401"]["headers"]) == {"x-request-id", "www-authenticate"}
    assert set(tei["413"]["content"]) == {"text/plain"}
    assert set(openai["400"]["content"]) == set(openai["415"]["content"]) == {"application/json"}
    assert "415" not in paths["/v1/embedding"]["post"]["responses"]
    assert "413" in paths["/v1/models"]["post"]["responses"]
    assert "413" not in paths["/v1/models"]["get"]["responses"]


async def served_document(app: Application) -> dict[str, Any]:
    exchange = Exchange([b""])
    await app(request_scope("GET", "/openapi.json", LOCAL), exchange.receive, exchange.send)
    document: dict[str, Any] = exchange.answer().json()
    return document


def check(document: dict[str, Any], operation: dict[str, Any], answer: Answer) -> None:
    """Check that the status is declared, and that the body matches its declaration."""
    content = operation["responses"][str(answer.status)]["content"]
    media_type = answer.headers["content-type"].partition(";")[0]
    assert media_type in content, (answer.status, media_type)
    if media_type == "application/json":
        schema = {**content[media_type]["schema"], "components": document["components"]}
        Draft202012Validator(schema).validate(answer.json())


def with_document(life: Living) -> Application:
    surfaces = [make(Options(metrics=lambda _: b"")) for make in SURFACES]
    return build_app(life.server.gateway, [*surfaces, OpenApi(surfaces)], Options(metrics=lambda _: b""))


async def test_every_example_works() -> None:
    """Sending each documented example returns the documented answer."""
    async with living() as life, AsyncExitStack() as stack:
        add_runner(life.server.gateway, FakeRunner())
        add_family(life.server.gateway, stack)
        app = with_document(life)
        document = await served_document(app)
        walked = 0
        for path, item in document["paths"].items():
            for method, operation in item.items():
                body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
                if "example" not in body:
                    continue
                exchange = Exchange([orjson.dumps(body["example"])])
                path_sent = path.replace("{id}", MODEL if path.startswith("/v2/models") else OTHER)
                await app(request_scope(method.upper(), path_sent, LOCAL | JSON), exchange.receive, exchange.send)
                assert exchange.answer().status == 200, (path, exchange.answer().body)
                check(document, operation, exchange.answer())
                walked += 1
        shown = [route.operation for route in app.routes.all if route.operation.example is not None]
        assert walked == len(shown) > 20


CALLS: list[tuple[str, str, str, Any, int]] = [
    ("GET", "/models", "", None, 200),
    ("GET", "/v1/models", "", None, 200),
    ("GET", "/v1/models/{id}", "", None, 200),
    ("GET", "/loaded_models", "", None, 200),
    ("GET", "/repository_models", "", None, 200),
    ("GET", "/metrics", "", None, 200),
    ("GET", "/metrics", "?format=json", None, 200),
    ("GET", "/metrics", "?format=xml", None, 400),
    ("POST", "/v1/models", "", {"model": OTHER}, 200),
    ("POST", "/v1/models", "?wait=false", {"model": OTHER}, 202),
    ("POST", "/models", "", {"model": OTHER}, 200),
    ("POST", "/infer_text", "", {"model_name": "nobody", "text": "a"}, 400),
    ("POST", "/infer_text", "", {"text": "a"}, 422),
    ("POST", "/load_sentence_transformer_model", "?wait=false", {"model_name": OTHER}, 202),
    ("GET", "/jobs", "", None, 200),
    ("GET", "/jobs/{id}", "", None, 404),
    ("POST", "/unload_model", "?wait=false", {"model_name": OTHER}, 202),
    ("POST", "/load_sentence_transformer_model", "", {"model_name": ".."}, 400),
    ("POST", "/v1/models/{id}/unload", "", None, 200),
    ("GET", "/v1/models/{id}", "", None, 404),
    ("DELETE", "/v1/models/{id}", "?wait=false", None, 202),
    ("DELETE", "/v1/models/{id}", "", None, 404),
    ("DELETE", "/models", f"?model={FOREIGN}", None, 403),
    ("DELETE", "/models", "", None, 400),
    ("POST", "/delete_model", "", {"model_name": FOREIGN}, 403),
]


async def test_answers_about_models_are_declared() -> None:
    """Every status of a model's whole life cycle is documented, and each body matches its schema."""
    async with living() as life:
        app = with_document(life)
        document = await served_document(app)
        for method, path, query, body, status in CALLS:
            exchange = Exchange([b"" if body is None else orjson.dumps(body)])
            scope = request_scope(method, path.replace("{id}", MODEL) + query, LOCAL | JSON)
            if (path, query) == ("/metrics", ""):
                scope = request_scope(method, path, LOCAL)
            await app(scope, exchange.receive, exchange.send)
            answer = exchange.answer()
            assert answer.status == status, (path, answer.body)
            check(document, document["paths"][path][method.lower()], answer)
            for job in life.lifecycle.jobs():
                await job.done_event.wait()


def commands() -> list[list[str]]:
    """Return the curl commands of docs/api.md, as a shell would split them."""
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    blocks = text.split("```sh\n")[1:]
    lines = [line for block in blocks for line in block.partition("```")[0].splitlines()]
    return [shlex.split(line.rstrip("& ")) for line in lines if line.startswith("curl ")]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
async def test_commands_of_the_page_work(words: list[str]) -> None:
    """Each returns 200, or 202 without waiting, from a server that has the examples' model."""
    options = {name: words[at + 1] for at, name in enumerate(words) if name in {"-X", "-H", "-d"}}
    (url,) = [word for word in words if word.startswith("localhost:8080")]
    name, _, value = options.get("-H", "accept: */*").partition(": ")
    headers = LOCAL | {name: value}
    method = options.get("-X", "POST" if "-d" in options else "GET")
    async with living() as life:
        await life.lifecycle.load(OTHER).wait()
        exchange = Exchange([options.get("-d", "").encode()])
        scope = request_scope(method, url.removeprefix("localhost:8080"), headers)
        task = asyncio.create_task(life.server.app(scope, exchange.receive, exchange.send))
        if "/models/sse" in url:
            exchange.leave()
        await task
        assert exchange.messages[0]["status"] == (202 if "wait=false" in url else 200)


def test_there_are_commands() -> None:
    assert len(commands()) >= 10
