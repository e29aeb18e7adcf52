"""Shoal's extension to ASGI: handles common requests without messages, tasks and timers.

Shoal's server puts an `Exchange` into the scope's `extensions` under EXTENSION. Under other ASGI servers, or when a
method declines, the application uses ASGI messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

EXTENSION = "shoal.exchange"


class Exchange(Protocol):
    """One request and its response. `on_disconnect` is called when the client disconnects before the response is
    complete."""

    on_disconnect: Callable[[], None] | None

    def take_body(self, limit: int) -> bytes | None:
        """Take the whole body. Returns None, and takes nothing, if it is incomplete or longer than `limit`."""

    def send_whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write a whole response, with its Content-Length, at once.

        Returns False, and writes nothing, if it needs messages: the client reads slowly, the connection closes after
        this response, or the response has no body.
        """

    def can_send_piece(self) -> bool:
        """Whether a piece of a streamed response can be written at once: its head was sent, and the client reads."""

    def send_piece(self, piece: bytes) -> None:
        """Write a piece, which is not empty, after `can_send_piece`."""
