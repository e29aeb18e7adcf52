"""Requests that the server makes to itself: the same routes, without a socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from shoal.http.auth import Caller
from shoal.http.request import CALLER, JSON
from shoal.types import TrafficClass

logger = logging.getLogger("shoal")

_FAILED = b'{"error":{"message":"The request failed unexpectedly.","type":"server_error","param":null,"code":null}}'


class Answer(NamedTuple):
    """The answer to a request. Header names are in lower case."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


async def post(app: Callable[..., Any], path: str, body: bytes, *, client: str, traffic: TrafficClass) -> Answer:
    """Send a JSON request to an ASGI application of this package, as the client of this identity.

    It never raises but when it is cancelled, which ends the work.
    """
    unread: list[bytes] = [body]
    started: dict[str, Any] = {}
    pieces: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.Event().wait()  # the client never leaves
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            started.update(message)
        else:
            pieces.append(message.get("body", b""))

    length = (b"content-length", b"%d" % len(body))
    headers = [(b"host", b"localhost"), JSON, length, (b"x-shoal-class", traffic.encode())]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": headers,
        "client": None,
        "extensions": {CALLER: Caller(client)},
    }
    try:
        await app(scope, receive, send)
    except Exception:  # a bug, which an HTTP server would answer by closing the connection
        logger.exception("a request to %s of the server to itself failed", path)
        return Answer(500, {}, _FAILED)
    return Answer(started["status"], dict(started["headers"]), b"".join(pieces))
