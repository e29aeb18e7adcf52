"""Reading a request's body: bounded in bytes, and refused before it is read where that can be known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from shoal.errors import BodyTooLarge, Cancelled, Malformed, Overloaded, UnsupportedMediaType
from shoal.http.request import Request

Receive = Callable[[], Awaitable[Any]]

MAX_UNREAD_BYTES = 65_536
"""A refused body up to this size is cheaper to skip than a connection is to open again."""

MAX_PENDING_BYTES = 536_870_912
"""Bytes of bodies that have begun to come, of all connections together."""

LINGER_S = 1.0
LINGER_BYTES = 268_435_456


def check_head(request: Request, limit: int, json: bool, form: bool = False) -> None:
    """Judge by the headers alone; `form`: where JSON is read, multipart/form-data is too. Raises UnsupportedMediaType,
    BodyTooLarge, Overloaded (by the bodies under way) or Malformed (a senseless length)."""
    headers = request.headers
    if b"content-encoding" in headers:
        encoding = headers[b"content-encoding"].strip().lower()
        if encoding not in {b"identity", b""}:
            name = _to_printable(encoding)
            raise UnsupportedMediaType(f"Content-Encoding '{name}' is not read here; send the body uncompressed.")
    if json and headers.get(b"content-type") != b"application/json":
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if (
            kind not in {b"", b"application/json"}
            and not kind.endswith((b"/json", b"+json"))
            and not (form and kind == b"multipart/form-data")
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
        if len(length) > 4:  # shorter ones are never too much
            _PENDING_BODIES.check(0, int(length))


def _is_curl_form(request: Request) -> bool:
    """`curl -d` says of every body that it is a form, and many examples of Ollama's are such. No page in a browser can
    send that name without asking first."""
    headers = request.headers
    form = headers.get(b"content-type", b"").startswith(b"application/x-www-form-urlencoded")
    return form and headers.get(b"user-agent", b"").startswith(b"curl/") and b"origin" not in headers


class PendingBodies:
    """What all bodies hold that have not come whole: each is bounded, but not how many there are.

    A body alone may be of any size, and one that comes in a single piece is not counted: it never waits. Up to
    MAX_UNREAD_BYTES, which a connection may hold before anybody reads it, none is refused: large ones that stall do not
    keep small ones out.
    """

    def __init__(self, most: int = MAX_PENDING_BYTES) -> None:
        self.size = 0
        self._most = most

    def add(self, own: int, size: int) -> None:
        """Count `size` bytes more of a body that has `own` here. Raises Overloaded when that is too much for all."""
        self.check(own, size)
        self.size += size

    def check(self, own: int, size: int) -> None:
        """Raises Overloaded where `size` bytes more of a body that has `own` here would be too much for all."""
        if own + size > MAX_UNREAD_BYTES and self.size > own and self.size + size > self._most:
            raise Overloaded("Too many large bodies are being sent at once; send this one again.", retry_after=1.0)

    def remove(self, size: int) -> None:
        self.size -= size


_PENDING_BODIES = PendingBodies()


async def read_body(receive: Receive, limit: int, unfinished: PendingBodies = _PENDING_BODIES) -> bytes:
    """The whole body.

    Raises BodyTooLarge, Overloaded when all unfinished bodies together are too large, and Cancelled when the client
    leaves half-way.
    """
    pieces: list[bytes] = []
    size = 0
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Cancelled("The client left while it sent the body.")
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


def has_unread_body(request: Request) -> bool:
    """More of the body is still to come than is worth skipping: the connection should end with the reply."""
    if request.body_read:
        return False
    headers = request.headers
    length = headers.get(b"content-length", b"0")
    return b"transfer-encoding" in headers or not length.isdigit() or int(length[:20]) > MAX_UNREAD_BYTES


async def linger(receive: Receive) -> None:
    """Read on for a moment and forget it, after the reply and before the connection is closed.

    Closing at once resets the connection, and clients that send all before they read would never see the reply.
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
