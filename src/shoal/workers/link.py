"""One connection between a front and the model process: messages with their length before them.

All messages of one turn of the event loop leave in one write, and all that arrived are read in one turn: under load a
system call carries many requests.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from typing import Any, Protocol, cast

import msgspec

from shoal.errors import TooManyInputs
from shoal.workers import messages

MAX_BYTES = 2**30
"""Longest message; a longer one is a sign of a broken stream."""
GREETING_BYTES = 1024
"""Longest message of an end that must name itself first."""

LOST_S = 15.0
"""Time without an answer of the other machine after which a connection is lost."""

_LENGTH = struct.Struct(">I")

logger = logging.getLogger("shoal.workers")


class Endpoint(Protocol):
    """What is at one end of a link. `receive` must not raise."""

    def receive(self, link: Link, message: Any) -> None: ...

    def lose(self, link: Link) -> None:
        """The link is closed; called once."""


class Link(asyncio.Protocol):
    """One end of a connection. `send` never blocks and is ignored once the link is closed.

    What it sends is limited by the requests in flight: a stream waits for its reader (see messages.More). `max_bytes`:
    of a message that arrives; a longer one closes the link.
    """

    def __init__(
        self, endpoint: Endpoint, decoder: msgspec.msgpack.Decoder[Any], *, max_bytes: int = MAX_BYTES
    ) -> None:
        self.max_bytes = max_bytes
        self._endpoint = endpoint
        self._decode: Callable[[Any], Any] = decoder.decode
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._outgoing: list[bytes] = []
        self._call_soon = asyncio.get_running_loop().call_soon

    def send(self, message: Any) -> None:
        """Send a message at the end of this turn of the event loop. Raises UnicodeEncodeError for a text that is not
        Unicode, and TooManyInputs for a message that the other end would not read."""
        data = messages.encode(message)
        if len(data) > MAX_BYTES:
            raise TooManyInputs(
                f"a request or its answer would have {len(data)} bytes between Shoal's processes: split the request"
            )
        if not self._outgoing:
            self._call_soon(self._flush)
        self._outgoing += (_LENGTH.pack(len(data)), data)

    def abort(self) -> None:
        """Close at once; what is not sent is lost."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family != socket.AF_UNIX:
            _notice_lost_machines(connection)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        start, size = 0, len(received)
        view = memoryview(received)
        try:
            while size - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(received, start)
                if length > self.max_bytes:
                    raise msgspec.MsgspecError(f"a message of {length} bytes")
                stop = start + _LENGTH.size + length
                if stop > size:
                    break
                message = self._decode(view[start + _LENGTH.size : stop])
                start = stop
                self._endpoint.receive(self, message)
        except msgspec.MsgspecError:  # the other end has another version, or a bug
            logger.exception("a message between Shoal's processes cannot be read")
            self.close()
        finally:
            view.release()
            del received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._endpoint.lose(self)

    def _flush(self) -> None:
        if self._transport is not None and self._outgoing:
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()


def _notice_lost_machines(connection: socket.socket) -> None:
    """Have the system close a connection whose other end has answered nothing for LOST_S, also without any traffic."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": int(LOST_S * 1000)}
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
