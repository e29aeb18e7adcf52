"""Reading bodies within their limits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import BodyTooLarge, Cancelled, Malformed, Overloaded, UnsupportedMediaType
from shoal.http.body import PendingBodies, check_head, has_unread_body, read_body
from shoal.http.request import Request


def request(**headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return Request({"method": "POST", "path": "/", "headers": raw}, 0.0)


async def read(pieces: list[bytes], limit: int) -> bytes:
    messages = iter([{"type": "http.request", "body": piece, "more_body": True} for piece in pieces])

    async def receive() -> Any:
        return next(messages, {"type": "http.request"})

    return await read_body(receive, limit)


@given(pieces=st.lists(st.binary(max_size=5), max_size=8), limit=st.integers(0, 30))
async def test_pieces(pieces: list[bytes], limit: int) -> None:
    """For every split, a body within the limit is returned whole, and a larger one never."""
    whole = b"".join(pieces)
    if len(whole) <= limit:
        assert await read(pieces, limit) == whole
    else:
        with pytest.raises(BodyTooLarge, match=f"{limit} bytes"):
            await read(pieces, limit)


MIB = 2**20


class Sender:
    """Sends a body in pieces, the last one on request."""

    def __init__(self, pieces: int, size: int) -> None:
        self.left = [bytes(size)] * pieces
        self.rest = asyncio.Event()
        self.waits = asyncio.Event()

    async def __call__(self) -> Any:
        if self.left:
            return {"type": "http.request", "body": self.left.pop(), "more_body": True}
        self.waits.set()
        await self.rest.wait()
        return {"type": "http.request", "body": b"."}


async def test_total_body_memory_is_bounded() -> None:
    """The body that exceeds the total is refused and its memory freed at once; others continue."""
    unfinished = PendingBodies(10 * MIB)
    first, second = Sender(6, MIB), Sender(4, MIB)
    reading = [asyncio.create_task(read_body(each, 100 * MIB, unfinished)) for each in (first, second)]
    await asyncio.gather(first.waits.wait(), second.waits.wait())
    assert unfinished.size == 10 * MIB
    with pytest.raises(Overloaded) as caught:
        await read_body(Sender(10, 10_000), 100 * MIB, unfinished)
    assert caught.value.retry_after == 1.0
    assert unfinished.size == 10 * MIB
    first.rest.set()
    assert await reading[0] == bytes(6 * MIB) + b"."
    assert unfinished.size == 4 * MIB
    reading[1].cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    assert unfinished.size == 0


async def test_small_bodies_are_accepted() -> None:
    """In one piece or several, for any memory that large ones hold."""
    unfinished = PendingBodies(0)
    large, small = Sender(1, MIB), Sender(6, 10_000)
    reading = asyncio.create_task(read_body(large, 2 * MIB, unfinished))
    await large.waits.wait()
    small.rest.set()
    large.rest.set()
    assert len(await read_body(small, MIB, unfinished)) == 60_001
    assert len(await reading) == MIB + 1


async def test_a_body_alone_may_be_larger_than_the_bound() -> None:
    """Its own limit is the setting."""
    unfinished = PendingBodies(MIB)
    alone = Sender(3, MIB)
    alone.rest.set()
    assert len(await read_body(alone, 10 * MIB, unfinished)) == 3 * MIB + 1
    assert unfinished.size == 0


@pytest.mark.parametrize("error", [BodyTooLarge, Cancelled])
async def test_memory_of_a_refused_body_is_freed(error: type[Exception]) -> None:
    """The body was too large, or its client disconnected."""
    unfinished = PendingBodies()
    messages = [{"type": "http.request", "body": bytes(8), "more_body": True}]
    end = {"type": "http.request", "body": bytes(8)} if error is BodyTooLarge else {"type": "http.disconnect"}

    async def receive() -> Any:
        return messages.pop() if messages else end

    with pytest.raises(error):
        await read_body(receive, 10, unfinished)
    assert unfinished.size == 0


async def test_a_disconnect_raises_cancelled() -> None:
    """Half a body is not a request."""

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    with pytest.raises(Cancelled):
        await read_body(receive, 10)


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ({"content_length": "11"}, BodyTooLarge),
        ({"content_length": "9" * 5000}, BodyTooLarge),
        ({"content_length": "-1"}, Malformed),
        ({"content_length": "1e3"}, Malformed),
        ({"content_encoding": "gzip"}, UnsupportedMediaType),
        ({"content_encoding": "GZIP, br"}, UnsupportedMediaType),
        ({"content_encoding": "\x01\xff" * 100}, UnsupportedMediaType),
        ({"content_type": "text/html"}, UnsupportedMediaType),
        ({"content_type": "application/x-www-form-urlencoded"}, UnsupportedMediaType),
        (
            {"content_type": "application/x-www-form-urlencoded", "user_agent": "curl/8.5.0", "origin": "http://x"},
            UnsupportedMediaType,
        ),
        ({"content_type": "text/plain", "user_agent": "curl/8.5.0"}, UnsupportedMediaType),
    ],
)
def test_heads_that_are_refused(headers: dict[str, str], error: Any) -> None:
    """Before a byte is read."""
    with pytest.raises(error) as caught:
        check_head(request(**headers), 10, json=True)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content_length": "10"},
        {"content_encoding": "identity"},
        {"content_type": "application/json"},
        {"content_type": "application/x-www-form-urlencoded", "user_agent": "curl/8.5.0"},
    ],
)
def test_heads_that_pass(headers: dict[str, str]) -> None:
    """Within the limit, not compressed, JSON or without a type, or curl's form type."""
    check_head(request(**headers), 10, json=True)


def test_only_json_routes_require_json() -> None:
    """A route without a JSON body accepts every content type."""
    check_head(request(content_type="text/html"), 10, json=False)


@pytest.mark.parametrize(
    ("headers", "unread"),
    [
        ({}, False),
        ({"content_length": "65536"}, False),
        ({"content_length": "65537"}, True),
        ({"content_length": "many"}, True),
        ({"transfer_encoding": "chunked"}, True),
    ],
)
def test_unread_bodies(headers: dict[str, str], unread: bool) -> None:
    """A short body is skipped to keep the connection; a long one or one of unknown length closes it."""
    message = request(**headers)
    assert has_unread_body(message) is unread
    message.body_read = True
    assert has_unread_body(message) is False
