"""Read a request's body within size limits, and refuse it before reading where its headers allow that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

from shoal.errors import BodyTooLarge, Cancelled, Malformed, Overloaded, UnsupportedMediaType
from shoal.http.request import Request

Receive = Callable[[], Awaitable[Any]]

MAX_UNREAD_BYTES = 65_536
"""Skipping a refused body up to this size is cheaper than opening a new connection."""

MAX_PENDING_BYTES = 536_870_912
"""Maximum bytes of incomplete bodies, of all connections together."""

LINGER_S = 1.0
LINGER_BYTES = 268_435_456


def check_head(request: Request, limit: int, json: bool, others: Collection[bytes] = ()) -> None:
    """Check a body by its headers. `json`: it must be JSON, or of one of the media types `others`.

    Raises UnsupportedMediaType, BodyTooLarge, Overloaded (too many incomplete bodies) or Malformed (invalid length).
    """
    headers = request.headers
    if b"content-encoding" in headers:
        encoding = headers[b"content-encoding"].strip().lower()
        if encoding not in {b"identity", b""}:
            name = _to_printable(encoding)
            raise UnsupportedMediaType(f"Content-Encoding '{name}' is not supported; send the body uncompressed.")
    if json and headers.get(b"content-type") != b"application/json":
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if (
            kind not in {b"", b"application/json"}
            and not kind.endswith((b"/json", b"+json"))
            and kind not in others
            and not _is_curl_form(request)
        ):
            raise UnsupportedMediaType(
                f"Unsupported content type '{_to_printable(kind)}'; send JSON with 'Content-Type: application/json'."
            )
    length = headers.get(b"content-length")
    if length is not None:
        if not length.isdigit():
            raise Malformed("Content-Length is not a number.")
        if int(length[:20]) > limit:
            raise _too_large_error(limit)
        if len(length) > 4:  # bodies below 10 kB are always accepted
            _PENDING_BODIES.check(0, int(length))


def _is_curl_form(request: Request) -> bool:
    """Whether the request is from `curl -d`, which labels every body as a form; many examples for Ollama use it.

    A browser page cannot send this User-Agent without a preflight.
    """
    headers = request.headers
    form = headers.get(b"content-type", b"").startswith(b"application/x-www-form-urlencoded")
    return form and headers.get(b"user-agent", b"").startswith(b"curl/") and b"origin" not in headers


class PendingBodies:
    """Limits the total size of incomplete bodies; other limits bound each body but not their number.

    A single body may have any size. One that arrives in one piece is not counted, because it never waits. Bodies up to
    MAX_UNREAD_BYTES, which a connection may buffer unread anyway, are never refused: stalled large bodies do not block
    small ones.
    """

    def __init__(self, max_bytes: int = MAX_PENDING_BYTES) -> None:
        self.size = 0
        self._max_bytes = max_bytes

    def add(self, own: int, size: int) -> None:
        """Add `size` bytes to a body that has `own` bytes counted. Raises Overloaded when the total is too large."""
        self.check(own, size)
        self.size += size

    def check(self, own: int, size: int) -> None:
        """Raise Overloaded if adding `size` bytes to a body with `own` counted bytes would make the total too large."""
        if own + size > MAX_UNREAD_BYTES and self.size > own and self.size + size > self._max_bytes:
            raise Overloaded("The server is receiving too many large bodies; send the request again.", retry_after=1.0)

    def remove(self, size: int) -> None:
        self.size -= size


_PENDING_BODIES = PendingBodies()


async def read_body(receive: Receive, limit: int, unfinished: PendingBodies = _PENDING_BODIES) -> bytes:
    """Read the whole body.

    Raises BodyTooLarge, Overloaded when all incomplete bodies together are too large, and Cancelled when the client
    disconnects.
    """
    pieces: list[bytes] = []
    size = 0
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Cancelled("The client disconnected while sending the body.")
            piece: bytes = message.get("body", b"")
            if size + len(piece) > limit:
                raise _too_large_error(limit)
            if not message.get("more_body", False):
                return b"".join([*pieces, piece]) if pieces else piece
            unfinished.add(size, len(piece))
            size += len(piece)
            pieces.append(piece)
    finally:
        if size:
            unfinished.remove(size)


async def read_pieces(
    request: Request, receive: Receive, limit: int, limit_time: Callable[[], AbstractContextManager[None]]
) -> AsyncGenerator[bytes]:
    """Yield the body as it comes, each piece within `limit_time`, and mark it as read at its end.

    Raises BodyTooLarge, and Cancelled when the client disconnects.
    """
    size = 0
    more = True
    while more:
        with limit_time():
            message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("The client disconnected while sending the body.")
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise _too_large_error(limit)
        more = message.get("more_body", False)
        request.body_read = not more
        if piece:
            yield piece


def has_unread_body(request: Request) -> bool:
    """Whether more of the body is outstanding than is worth skipping, so that the reply should close the connection."""
    if request.body_read:
        return False
    headers = request.headers
    length = headers.get(b"content-length", b"0")
    return b"transfer-encoding" in headers or not length.isdigit() or int(length[:20]) > MAX_UNREAD_BYTES


async def linger(receive: Receive) -> None:
    """Read and discard the body for up to LINGER_S, after the reply and before the connection closes.

    Closing at once resets the connection, and clients that send everything before they read would not see the reply.
    """
    size = 0
    try:
        async with asyncio.timeout(LINGER_S):
            while size < LINGER_BYTES:
                message = await receive()
                if not message.get("more_body", False):
                    return
                size += len(message.get("body", b""))
    except TimeoutError:
        return


def _too_large_error(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {limit} bytes; split the request, or raise max_body_bytes.")


def _to_printable(value: bytes) -> str:
    return value[:64].decode("latin-1").encode("ascii", "replace").decode()
