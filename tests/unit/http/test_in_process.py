"""Requests of the server to itself."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from shoal.http import in_process
from shoal.http.auth import Caller
from shoal.http.request import Request


async def test_a_request_and_its_answer() -> None:
    """The application sees a JSON request of this client, of this class, and its answer comes back whole."""
    seen: list[Request] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(Request(scope, 0.0))
        assert await receive() == {"type": "http.request", "body": b"{}", "more_body": False}
        await send({"type": "http.response.start", "status": 201, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        await send({"type": "http.response.body", "body": b"2"})

    answer = await in_process.post(app, "/x", b"{}", client="me", traffic="bulk")
    assert answer == (201, {b"a": b"b"}, b"12")
    (request,) = seen
    assert (request.method, request.path, request.traffic, request.peer) == ("POST", "/x", "bulk", "")
    assert request.caller == Caller("me")


async def test_a_bug_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    """An application that fails in mid-stream answers 500, and the log has the reason."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("a bug")

    with caplog.at_level(logging.ERROR, "shoal"):
        answer = await in_process.post(app, "/x", b"{}", client="me", traffic="bulk")
    assert answer.status == 500
    assert b"server_error" in answer.body
    assert "a bug" in caplog.text
