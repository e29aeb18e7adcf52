"""What Shoal's own server offers an application beyond ASGI: the common request without messages, tasks and timers.

An `Exchange` stands in the `extensions` of a scope under EXTENSION. Other ASGI servers have none, and even Shoal's may
say no: then the application uses ASGI's messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

EXTENSION = "shoal.exchange"


class Exchange(Protocol):
    """One request and its answer. `body_complete`: the whole body has arrived."""

    @property
    def body_complete(self) -> bool: ...

    def take_body(self, limit: int) -> bytes | None:
        """The whole body. None, and nothing taken, while it is incomplete or where it is longer than `limit`."""

    def when_disconnected(self, call: Callable[[], None] | None) -> None:
        """Call `call` when the client leaves before its answer is complete; None calls nothing any more."""

    def send_whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write a whole answer, with its Content-Length, at once. False, and nothing written, where only messages do:
        a client that reads slowly, a connection that ends with this answer, an answer without a body."""
