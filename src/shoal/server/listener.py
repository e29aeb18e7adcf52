"""Accept connections, many per turn of the event loop, and lose none on shutdown.

asyncio's `create_server` on uvloop accepts one connection per turn. A turn lasts as long as the work of all
connections, so during many uploads a new connection waited one long turn for each connection queued before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import socket
import struct
from collections.abc import Callable, Sequence

from shoal.server.descriptors import connection_descriptors, descriptor_limit

ACCEPTS_PER_TURN = 64
RETRY_S = 0.1
REPORT_EVERY_S = 60.0
HANDSHAKE_S = 0.05
"""Time for handshakes in progress when the listener closes."""

_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
# Classic BPF on the TCP header: drop segments with SYN (byte 13, bit 1), keep all others.
_DROP_SYN = ((0x30, 0, 0, 13), (0x45, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))

_log = logging.getLogger(__name__)


class Listener:
    """Accepts connections on listening sockets and calls `make_protocol` for each.

    When file descriptors run out, new connections wait in the backlog, and `make_room` closes idle ones.
    `kept_descriptors` are left to other servers of the process.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        make_protocol: Callable[[], asyncio.Protocol],
        make_room: Callable[[], None],
        kept_descriptors: int = 0,
    ) -> None:
        self._sockets = list(sockets)
        self._make_protocol = make_protocol
        self._make_room = make_room
        self._connecting: set[asyncio.Task[object]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._closing = False
        self._reported_at = -REPORT_EVERY_S
        self._limit = descriptor_limit()
        self._max_descriptors = connection_descriptors(self._limit) - kept_descriptors

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._retry = None
        for one in self._sockets:
            _accept_handshakes(one)
            self._loop.add_reader(one, self._accept_many, one)

    async def close(self) -> None:
        """Accept every connection that is established for its client, then stop listening."""
        for one in self._sockets:
            _refuse_handshakes(one)
        await asyncio.sleep(HANDSHAKE_S)
        self._pause()
        self._closing = True
        for one in self._sockets:
            while self._accept(one):
                pass
            one.close()
        if self._connecting:
            await asyncio.wait(self._connecting)

    def _accept_many(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            if not self._accept(listening):
                return

    def _accept(self, listening: socket.socket) -> bool:
        """Accept one connection; returns whether there may be another one."""
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        except OSError as error:
            self._wait_for_descriptors(error)
            return False
        connection.setblocking(False)
        task = self._loop.create_task(self._connect(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        # The system assigns the lowest free descriptor, so this number shows how many are in use.
        if connection.fileno() >= self._max_descriptors and not self._closing:
            self._wait_for_descriptors(None)
            return False
        return True

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError as error:  # the client has closed it
            _log.debug("a connection was lost before its first request: %s", error)
            connection.close()

    def _pause(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        for one in self._sockets:
            self._loop.remove_reader(one)

    def _wait_for_descriptors(self, error: OSError | None) -> None:
        if not self._closing:
            self._pause()
            self._retry = self._loop.call_later(RETRY_S, self.start)
            self._make_room()
        now = self._loop.time()
        if now - self._reported_at < REPORT_EVERY_S:
            return
        self._reported_at = now
        if error is None or error.errno == errno.EMFILE:
            _log.error(
                "out of file descriptors: connections use nearly all of %d, and new ones wait; raise the limit "
                "(ulimit -n, LimitNOFILE= in systemd, --ulimit nofile= in Docker), or close idle connections sooner",
                self._limit,
            )
        elif error.errno in _NO_DESCRIPTORS:
            _log.error("cannot accept connections: %s on this machine; they wait", error.strerror)
        else:
            _log.error("cannot accept a connection: %s", error.strerror)


def _accept_handshakes(listening: socket.socket) -> None:
    """Undo `_refuse_handshakes`: another process may have had this socket before and closed it."""
    with contextlib.suppress(OSError):  # there is no filter
        listening.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _refuse_handshakes(listening: socket.socket) -> None:
    """Drop new handshakes, so that the backlog can be emptied: closing a listener resets the connections in it.

    The client's system retries after a second and is then refused. Where filters are not supported, a connection that
    arrives between the last accept and the close is reset.
    """
    program = b"".join(struct.pack("HBBI", *each) for each in _DROP_SYN)
    buffer = ctypes.create_string_buffer(program)
    option = struct.pack("HP", len(_DROP_SYN), ctypes.addressof(buffer))
    try:
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
    except OSError as error:
        _log.debug("cannot filter new connections: %s", error.strerror)
