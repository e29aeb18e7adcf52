"""Whole requests that a front hands over to the model process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import Crashed, InternalError, ModelNotReady, TooLong
from shoal.http.request import Request
from shoal.workers.forwarding import Forwarder
from tests.unit.workers.kit import build_gateway, front, model_end, pair, until

Asgi = Callable[[Any, Any, Any], Awaitable[None]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "models"


class Client:
    """A client of a front: sends `events`, then waits; keeps what it gets. `gate`: each send waits for it."""

    def __init__(self, *events: dict[str, Any], body: bytes | None = None, method: str = "POST") -> None:
        self.events = list(events)
        self.sent: list[Any] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.left = asyncio.Event()
        self.request = Request(
            {
                "method": method,
                "path": "/a b/é",
                "query_string": b"x=%20",
                "headers": [(b"b", b"1"), (b"a", b"\xff")],
                "client": ("10.0.0.1", 9),
            },
            0.0,
        )
        if body is not None:
            self.request.body, self.request.body_read = body, True

    async def receive(self) -> Any:
        if self.events:
            return self.events.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, event: Any) -> None:
        await self.gate.wait()
        self.sent.append(event)

    @property
    def body(self) -> bytes:
        return b"".join(event["body"] for event in self.sent[1:])


def piece(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def start(send: Any, status: int = 200, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def finish(send: Any, body: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def forwarder(asgi: Asgi, path: Path) -> AsyncIterator[Forwarder]:
    async with pair(build_gateway(), path, asgi) as (remote, _):
        yield Forwarder(remote)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer 201 with the pieces of the body joined by "|"."""
    pieces, more = [], True
    while more:
        event = await receive()
        pieces.append(event["body"])
        more = event["more_body"]
    await start(send, 201, (b"x", b"\xff"), (b"x", b"2"))
    await finish(send, b"|".join(pieces))


async def test_the_scope_is_that_of_the_request(path: Path) -> None:
    """Method, path, query, headers and the client's address arrive as they are."""
    seen: dict[str, Any] = {}

    async def look(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope)
        await start(send, 204)
        await finish(send)

    async with forwarder(look, path) as forward:
        client = Client(method="DELETE")
        assert await forward(client.request, client.receive, client.send) == 204
    assert (seen["type"], seen["method"], seen["path"]) == ("http", "DELETE", "/a b/é")
    assert (seen["query_string"], seen["client"][0]) == (b"x=%20", "10.0.0.1")
    assert [tuple(each) for each in seen["headers"]] == [(b"b", b"1"), (b"a", b"\xff")]
    assert not Request(seen, 0.0).is_traced


async def test_a_front_s_own_trace_is_told_from_the_client_s(path: Path) -> None:
    """The trace that a front has begun replaces the client's, and is trusted."""
    seen: dict[str, Any] = {}

    async def look(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope)
        await start(send, 204)
        await finish(send)

    async with forwarder(look, path) as forward:
        client = Client(method="DELETE")
        client.request.headers[b"traceparent"] = b"the client's"
        client.request.trace = "the-front-s"
        assert await forward(client.request, client.receive, client.send) == 204
    request = Request(seen, 0.0)
    assert request.is_traced
    assert request.headers[b"traceparent"] == b"the-front-s"


async def test_a_body_arrives_in_pieces(path: Path) -> None:
    """The pieces of a body keep their borders, and the head of the response its headers."""
    async with forwarder(echo, path) as forward:
        client = Client(piece(b"one", True), piece(b"", True), piece(b"\x00\xff", False))
        assert await forward(client.request, client.receive, client.send) == 201
    assert client.body == b"one||\x00\xff"
    assert client.sent[0] == {
        "type": "http.response.start",
        "status": 201,
        "headers": [(b"x", b"\xff"), (b"x", b"2")],
    }
    assert client.request.is_forwarded
    assert client.request.has_response


async def test_a_body_that_was_read_is_sent_once(path: Path) -> None:
    """A body that the front has read is one piece, and what follows is the client's disconnect."""

    async def read_twice(scope: Any, receive: Any, send: Any) -> None:
        first, second = await receive(), await receive()
        await start(send)
        await finish(send, first["body"] + second["type"].encode())

    async with forwarder(read_twice, path) as forward:
        client = Client(body=b"whole ")
        client.left.set()
        await forward(client.request, client.receive, client.send)
    assert client.body == b"whole http.disconnect"


async def test_a_body_is_read_only_when_asked_for(path: Path) -> None:
    """A request that is refused by its head reads nothing of its body."""

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await start(send, 413)
        await finish(send)

    async with forwarder(refuse, path) as forward:
        client = Client(piece(b"large", True))
        assert await forward(client.request, client.receive, client.send) == 413
    assert len(client.events) == 1


async def test_a_disconnect_reaches_the_application(path: Path) -> None:
    """An application that watches its client learns that it has left."""
    seen: list[str] = []

    async def watch(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"a"
        seen.append((await receive())["type"])
        await start(send, 499)
        await finish(send)

    async with forwarder(watch, path) as forward:
        client = Client(piece(b"a", False))
        answer = asyncio.create_task(forward(client.request, client.receive, client.send))
        await until(lambda: not client.events)
        client.left.set()
        assert await answer == 499
    assert seen == ["http.disconnect"]


async def test_a_cancelled_request_is_cancelled(path: Path) -> None:
    """A front that gives a request up ends it in the model process."""
    seen: list[str] = []

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        seen.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("ended")

    async with forwarder(wait, path) as forward:
        client = Client()
        answer = asyncio.create_task(forward(client.request, client.receive, client.send))
        await until(lambda: seen == ["began"])
        answer.cancel()
        await until(lambda: seen == ["began", "ended"])


async def test_a_streaming_response_waits_for_its_client(path: Path) -> None:
    """Each piece arrives by itself, and the application is at most one piece ahead of the client."""
    produced = 0

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        nonlocal produced
        await start(send)
        for number in range(5):
            produced = number
            await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
        await finish(send)

    async with forwarder(stream, path) as forward:
        client = Client()
        client.gate.clear()
        answer = asyncio.create_task(forward(client.request, client.receive, client.send))
        for count in range(1, 7):
            client.gate.set()
            await until(lambda count=count: len(client.sent) >= count)  # type: ignore[misc]
            client.gate.clear()
            assert produced <= len(client.sent) + 1
        client.gate.set()
        assert await answer == 200
    assert [event["body"] for event in client.sent[1:]] == [b"0", b"1", b"2", b"3", b"4", b""]
    assert [event["more_body"] for event in client.sent[1:]] == [True] * 5 + [False]


async def test_an_error_before_the_head_is_raised(path: Path) -> None:
    """The front can still answer with the status of the error."""

    async def fail(scope: Any, receive: Any, send: Any) -> None:
        raise TooLong("no", param="p")

    async with forwarder(fail, path) as forward:
        client = Client()
        with pytest.raises(TooLong, match="no"):
            await forward(client.request, client.receive, client.send)
    assert client.sent == []
    assert not client.request.has_response


async def test_an_error_after_the_head_is_raised(path: Path) -> None:
    """The front knows that a response has begun, so that it closes the connection."""

    async def fail(scope: Any, receive: Any, send: Any) -> None:
        await start(send)
        raise RuntimeError("bug")

    async with forwarder(fail, path) as forward:
        client = Client()
        with pytest.raises(InternalError):
            await forward(client.request, client.receive, client.send)
    assert client.request.has_response


async def test_a_lost_model_process_fails_the_request(path: Path) -> None:
    """A request that is under way raises Crashed, and a later one ModelNotReady."""
    began = asyncio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        began.set()
        await asyncio.Event().wait()

    client = Client()
    async with front(path) as remote:
        forward = Forwarder(remote)
        async with model_end(build_gateway(), path, wait):
            await until(lambda: not remote.pending_sources)
            answer = asyncio.create_task(forward(client.request, client.receive, client.send))
            async with asyncio.timeout(30):
                await began.wait()
        with pytest.raises(Crashed):
            await answer
        with pytest.raises(ModelNotReady):
            await forward(client.request, client.receive, client.send)


async def test_a_client_whose_connection_fails_ends_the_request(path: Path) -> None:
    """An error of the client's connection while its body is read does not leave the application waiting."""
    ended = asyncio.Event()

    async def read(scope: Any, receive: Any, send: Any) -> None:
        try:
            await receive()
        finally:
            ended.set()

    async with forwarder(read, path) as forward:
        client = Client()

        async def fail() -> Any:
            raise OSError("reset")

        answer = asyncio.create_task(forward(client.request, fail, client.send))
        async with asyncio.timeout(2):
            await ended.wait()
        await asyncio.wait([answer])
