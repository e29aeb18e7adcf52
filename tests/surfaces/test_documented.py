"""The document tells the truth: each operation is provoked, and what comes back is what /openapi.json declares."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from shoal.core.gateway import Gateway
from shoal.core.protocols import Operation
from shoal.core.registry import Model, Registry
from shoal.surfaces import SURFACES, Front, Options, build_app
from shoal.surfaces.openapi import OpenApi, document, operations_of, template
from tests.surfaces.surface_kit import MODEL, Answer, Exchange, Told, request_scope

LOCAL = {"host": "127.0.0.1:8080"}
JSON = {"content-type": "application/json"}


def app_of(**options: Any) -> Front:
    """Every documented surface over one model that is ready."""
    registry = Registry()
    registry.add(model := Model(name=MODEL))
    model.loaded(Told())
    settings = Options(metrics=lambda: b"", **options)
    surfaces = [make(settings) for make in SURFACES]
    return build_app(Gateway(registry), [*surfaces, OpenApi(surfaces)], settings)


OPERATIONS = [route.operation for route in app_of().routes.all]


async def call(
    app: Front, operation: Operation, headers: dict[str, str], body: Sequence[bytes] = (b"",), *, silent: bool = False
) -> Answer:
    path = operation.path.replace("{id:path}", MODEL)
    exchange = Exchange(body, silent=silent)
    await app(request_scope(operation.method, path, headers), exchange.receive, exchange.send)
    return exchange.answer()


async def provoked(operation: Operation) -> AsyncIterator[tuple[str, Answer]]:
    """What is wrong with each request, and the answer to it."""
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
async def test_refusals_are_declared(operation: Operation) -> None:
    """Without a key, from a foreign Host, with a body that is too much, compressed, late or wrong: status and content
    type of the answer are in the document, and an answer without a body is declared without one."""
    (shown,) = [each for each in OPERATIONS if each.path == "/openapi.json"]
    paths = (await call(app_of(), shown, LOCAL)).json()["paths"]
    declared = paths[template(operation.path)][operation.method.lower()]["responses"]
    walked = 0
    async for what, answer in provoked(operation):
        assert 400 <= answer.status < 500, what
        content = declared.get(str(answer.status), {"content": "nothing"}).get("content", {})
        if answer.body:
            assert answer.headers["content-type"].partition(";")[0] in content, what
        else:
            assert content == {}, what
        walked += 1
    # two for keys; four for a body, three more for one that is JSON
    guarded, sends, json = operation.access != "public", operation.method != "GET", operation.request is not None
    assert walked == 2 * guarded + 4 * sends + 3 * json


def test_both_forms_of_one_status_are_declared() -> None:
    """TEI's 400 is JSON of its own or plain text of its framework; its 401 has no body; OpenAI's are JSON alone."""
    surfaces = [make(Options()) for make in SURFACES]
    paths = document({each.name: operations_of(each, Gateway(Registry())) for each in surfaces})["paths"]
    tei, openai = (paths[path]["post"]["responses"] for path in ("/embed", "/v1/embeddings"))
    assert set(tei["400"]["content"]) == set(tei["422"]["content"]) == {"application/json", "text/plain"}
    assert "content" not in tei["401"]
    assert set(tei["401"]["headers"]) == {"x-request-id", "www-authenticate"}
    assert set(tei["413"]["content"]) == {"text/plain"}
    assert set(openai["400"]["content"]) == set(openai["415"]["content"]) == {"application/json"}
    assert "415" not in paths["/v1/embedding"]["post"]["responses"]
    assert "413" in paths["/v1/models"]["post"]["responses"]
    assert "413" not in paths["/v1/models"]["get"]["responses"]
