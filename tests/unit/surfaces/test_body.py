"""Reading bodies within their bounds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import BodyTooLarge, Cancelled, Malformed, UnsupportedMediaType
from shoal.surfaces._body import check_head, leaves_unread, read_body
from shoal.surfaces._request import Request


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
    """However it is cut, a body within the limit comes out whole, and one over it never."""
    whole = b"".join(pieces)
    if len(whole) <= limit:
        assert await read(pieces, limit) == whole
    else:
        with pytest.raises(BodyTooLarge, match=f"{limit} bytes"):
            await read(pieces, limit)


async def test_client_leaves() -> None:
    """Half a body is nobody's request."""

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
    ],
)
def test_heads_that_are_refused(headers: dict[str, str], error: Any) -> None:
    """Before a byte is read."""
    with pytest.raises(error) as caught:
        check_head(request(**headers), 10, json=True)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    "headers",
    [{}, {"content_length": "10"}, {"content_encoding": "identity"}, {"content_type": "application/json"}],
)
def test_heads_that_pass(headers: dict[str, str]) -> None:
    """At most the limit, not compressed, JSON or nameless."""
    check_head(request(**headers), 10, json=True)


def test_only_json_routes_want_json() -> None:
    """A route without a JSON body does not judge content types."""
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
def test_what_is_left_unread(headers: dict[str, str], unread: bool) -> None:
    """A little is skipped for the sake of the connection; much, or nobody knows how much, ends it."""
    asked = request(**headers)
    assert leaves_unread(asked) is unread
    asked.body_read = True
    assert leaves_unread(asked) is False
