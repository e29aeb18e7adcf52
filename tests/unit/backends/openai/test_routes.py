"""Which routes a server has for a model that scores."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shoal.backends.base.http_client import Client
from shoal.backends.openai.routes import Kind, Route, find_score_routes
from shoal.backends.openai.scores import ClassifyCalls, LabelNames, RerankCalls, ScoreCalls
from tests.fakes.openai_server import FakeUpstream, Script, answer
from tests.fakes.scoring import EMPTY, NO_TASK

ALL: tuple[Kind, ...] = ("score", "rerank", "classify")


@pytest.fixture
async def server() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as made:
        yield made


@pytest.fixture
async def client(server: FakeUpstream) -> AsyncIterator[Client]:
    made = Client(server.base, connect_timeout_s=30.0)
    yield made
    await made.aclose()


async def test_below_the_path_and_beside_it(server: FakeUpstream, client: Client) -> None:
    server.on("/score", EMPTY)
    server.on("root/classify", answer({"data": []}))
    routes, unsure = await find_score_routes(client, "m", ALL, 5.0)
    root = client.base.removesuffix("/v1")
    assert routes == [Route("score", "/score"), Route("classify", f"{root}/classify")]
    assert not unsure
    assert [one.path for one in server.requests] == ["/v1/score", "/v1/rerank", "/rerank", "/v1/classify", "/classify"]


async def test_a_base_without_a_version(server: FakeUpstream) -> None:
    """A base URL without a version has no other candidate."""
    client = Client(server.base.removesuffix("/v1"), connect_timeout_s=30.0)
    server.on("root/rerank", answer({}, 422))
    assert (await find_score_routes(client, "m", ALL, 5.0))[0] == [Route("rerank", "/rerank")]
    assert len(server.requests) == 3
    await client.aclose()


@pytest.mark.parametrize(
    ("script", "there"),
    [
        (EMPTY, True),
        (answer({"detail": [{"msg": "List should have at least 1 item"}]}, 422), True),
        (answer({"error": {"message": "internal"}}, 500), True),
        (NO_TASK, False),
        (answer({"error": {"message": "this server does not support reranking"}}, 501), False),
        (answer({}, 404), False),
        (answer({}, 405), False),
        (answer({"error": {"message": "The model `m` does not exist."}}, 404), False),
        (answer(b"", 302, location="/elsewhere"), False),
        (answer(b"<html>hello</html>", content_type="text/html"), False),
    ],
)
async def test_what_an_answer_means(server: FakeUpstream, client: Client, script: Script, there: bool) -> None:
    server.on("/rerank", script)
    routes, unsure = await find_score_routes(client, "m", ("rerank",), 5.0)
    assert routes == ([Route("rerank", "/rerank")] if there else [])
    assert not unsure


@pytest.mark.parametrize("status", [401, 403, 429, 503])
async def test_answers_that_may_change(server: FakeUpstream, client: Client, status: int) -> None:
    server.on("/rerank", answer({"error": "wait"}, status))
    routes, unsure = await find_score_routes(client, "m", ("rerank",), 5.0)
    assert not routes
    assert [each.status for each in unsure] == [status]


def test_what_calls_a_route() -> None:
    labels = LabelNames()
    assert isinstance(Route("score", "/a").make_calls(labels), ScoreCalls)
    assert isinstance(Route("rerank", "/a").make_calls(labels), RerankCalls)
    classifying = Route("classify", "/a").make_calls(labels)
    assert isinstance(classifying, ClassifyCalls)
    assert (classifying.path, classifying.labels) == ("/a", labels)
