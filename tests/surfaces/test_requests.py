"""GET /v1/requests/{id}: the record of one of the last requests, over real lanes of the fake model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from shoal.app import App, open_app
from shoal.config import load
from tests.surfaces.surface_kit import Exchange, request_scope

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "one two three"}]}


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[App]:
    async with open_app(load(settings, {}), ["fake:"]) as app:
        await app.wait_until_loaded()
        yield app


async def send(app: App, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Return (status, JSON)."""
    data = b"" if body is None else json.dumps(body).encode()
    sent = {"content-type": "application/json", "content-length": str(len(data))}
    exchange = Exchange([data])
    await app.asgi(request_scope(method, path, sent | headers), exchange.receive, exchange.send)
    answer = exchange.answer()
    return answer.status, json.loads(answer.body)


async def embed(app: App, request_id: str, *texts: str) -> int:
    body = {"model": "fake", "input": texts}
    return (await send(app, "POST", "/v1/embeddings", body, **{"x-request-id": request_id}))[0]


async def explain(app: App, request_id: str) -> Any:
    status, found = await send(app, "GET", f"/v1/requests/{request_id}")
    assert status == 200, found
    return found


async def test_an_embedding() -> None:
    """Times follow each other: arrival, task, batch; one batch carried the three items."""
    async with serving() as app:
        assert await embed(app, "an/id", "a", "b c", "d") == 200
        found = await explain(app, "an/id")
    (task,) = found["tasks"]
    (attempt,) = task["attempts"]
    assert (found["method"], found["path"], found["surface"]) == ("POST", "/v1/embeddings", "openai")
    assert (found["status"], found["error"], found["client"], found["model"]) == (200, "", "127.0.0.1", "fake")
    assert (task["task"], task["outcome"], task["items"], task["input_tokens"], task["retries"]) == (
        "embed",
        "ok",
        3,
        4,
        0,
    )
    assert (attempt["items"], attempt["requests"], attempt["replica"]) == (3, 1, "fake-0")
    assert attempt["tokens"] >= 4 and attempt["batch"] > 0
    assert 0 <= task["start_ms"] <= attempt["start_ms"] <= found["ms"]
    assert attempt["start_ms"] + attempt["ms"] <= task["start_ms"] + task["ms"] + 0.01


async def test_a_batch_is_shared() -> None:
    async with serving(max_wait_time_ms=50) as app:
        assert set(await asyncio.gather(embed(app, "one", "a"), embed(app, "two", "b"))) == {200}
        one, two = [(await explain(app, name))["tasks"][0]["attempts"] for name in ("one", "two")]
    assert one[0]["requests"] == 2
    assert one[0]["batch"] == two[0]["batch"]


async def test_failed_calls_and_what_followed() -> None:
    """The batch with the bad text is split until that text is alone; the request fails with its error."""
    async with serving() as app:
        assert await embed(app, "bad", "good", "reject-item") == 400
        found = await explain(app, "bad")
    (task,) = found["tasks"]
    assert (found["error"], task["outcome"]) == ("input_rejected", "input_rejected")
    assert [(each["items"], each.get("step")) for each in task["attempts"] if "error" in each] == [
        (2, "halve"),
        (1, "fail"),
    ]
    assert task["retries"] == 1, "the last failure is none"


async def test_a_generation() -> None:
    async with serving() as app:
        status, _ = await send(app, "POST", "/v1/chat/completions", CHAT, **{"x-request-id": "chat"})
        assert status == 200
        (task,) = (await explain(app, "chat"))["tasks"]
    assert (task["task"], task["input_tokens"], task["output_tokens"]) == ("generate", 3, 3)
    assert 0 <= task["first_token_ms"] <= task["ms"]
    assert [each["replica"] for each in task["attempts"]] == ["fake-0"]


async def test_a_request_that_reached_no_model() -> None:
    async with serving() as app:
        assert (await send(app, "POST", "/v1/embeddings", {"input": 5}, **{"x-request-id": "wrong"}))[0] == 400
        found = await explain(app, "wrong")
    assert (found["status"], found["error"], found["tasks"]) == (400, "wrong_type", [])


async def test_of_an_id_that_is_used_again_the_last_one() -> None:
    async with serving() as app:
        assert await embed(app, "same", "a") == 200
        assert await embed(app, "same", "a", "b") == 200
        (task,) = (await explain(app, "same"))["tasks"]
    assert task["items"] == 2


async def test_only_the_last_ones_are_kept() -> None:
    async with serving(explain_requests=2) as app:
        for number in range(3):
            assert await embed(app, f"id-{number}", "a") == 200
        assert (await explain(app, "id-1"))["status"] == 200
        status, answer = await send(app, "GET", "/v1/requests/id-0")
    assert status == 404
    assert "'id-0' is not among the last 2" in answer["error"]["message"]
    assert "explain_requests" in answer["error"]["message"]


async def test_polls_do_not_count() -> None:
    async with serving(explain_requests=1) as app:
        assert await embed(app, "kept", "a") == 200
        exchange = Exchange([b""])
        await app.asgi(request_scope("GET", "/health", {}), exchange.receive, exchange.send)
        assert (await explain(app, "kept"))["status"] == 200


async def test_off() -> None:
    async with serving(explain_requests=0) as app:
        assert await embed(app, "id", "a") == 200
        status, answer = await send(app, "GET", "/v1/requests/id")
    assert status == 404
    assert "set explain_requests" in answer["error"]["message"]


async def test_it_needs_an_admin_key() -> None:
    """A record names its client: a key of a user does not show it."""
    async with serving(api_key=("user",), admin_key=("admin",)) as app:
        sent = [await send(app, "GET", "/v1/requests/id", authorization=f"Bearer {key}") for key in ("user", "admin")]
    assert [status for status, _ in sent] == [403, 404]


async def test_records_hold_no_input() -> None:
    async with serving() as app:
        assert await embed(app, "private", "a-secret-prompt") == 200
        assert app.log is not None
        found = await app.log.find("private")
    assert found is not None
    assert b"a-secret-prompt" not in msgspec.json.encode(found)
