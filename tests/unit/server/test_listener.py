"""Accepting connections: many per loop turn, none lost at shutdown, and behavior without file descriptors."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import select
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import shoal.server.listener
from shoal.server.listener import Listener

CLIENTS = 40


class Protocol(asyncio.Protocol):
    def __init__(self, transports: list[asyncio.Transport]) -> None:
        self._made = transports

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._made.append(transport)


class RunningListener:
    """A listener, its accepted connections, and the number of calls to make room."""

    def __init__(self, *sockets: Any, kept: int = 0) -> None:
        self.made: list[asyncio.Transport] = []
        self.rooms = 0
        self.listener = Listener(sockets, lambda: Protocol(self.made), self._make_room, kept)

    def _make_room(self) -> None:
        self.rooms += 1

    def leave(self) -> None:
        for transport in self.made:
            transport.abort()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server_socket:
        server_socket.setblocking(False)
        yield server_socket


@pytest.fixture
def clients(listener: socket.socket) -> Iterator[list[socket.socket]]:
    """Connected clients in the backlog."""
    connections = [socket.create_connection(listener.getsockname()) for _ in range(CLIENTS)]
    yield connections
    for one in connections:
        one.close()


async def run_loop(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_one_turn_accepts_all_waiting_connections(listener: socket.socket, clients: list[socket.socket]) -> None:
    """A few turns of the loop, not one per connection."""
    place = RunningListener(listener)
    place.listener.start()
    await run_loop(6)
    assert len(place.made) == CLIENTS
    await place.listener.close()
    place.leave()


async def test_closing_loses_no_connection(listener: socket.socket, clients: list[socket.socket]) -> None:
    """Connections in the backlog are accepted first."""
    place = RunningListener(listener)
    place.listener.start()
    await place.listener.close()
    assert len(place.made) == CLIENTS
    assert listener.fileno() == -1
    place.leave()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such filter")
def test_no_connection_begins_while_the_backlog_is_emptied(
    listener: socket.socket, clients: list[socket.socket]
) -> None:
    """Waiting connections stay; new ones are not established, so closing resets none."""
    shoal.server.listener._refuse_handshakes(listener)
    with socket.socket() as late:
        late.setblocking(False)
        assert late.connect_ex(listener.getsockname()) == errno.EINPROGRESS
        assert select.select([], [late], [], 0)[1] == []
        accepted = [listener.accept()[0] for _ in range(CLIENTS)]
        with pytest.raises(BlockingIOError):
            listener.accept()
    clients[0].sendall(b"still here")
    accepted[0].setblocking(True)
    assert accepted[0].recv(20) == b"still here"
    for one in accepted:
        one.close()


class ExhaustedSocket:
    """A listening socket whose accept fails for the first `failures` calls for lack of resources."""

    def __init__(self, listener: socket.socket, number: int, failures: int) -> None:
        self._listening = listener
        self._number = number
        self.failures = failures

    def fileno(self) -> int:
        return self._listening.fileno()

    def setsockopt(self, *option: int) -> None:
        self._listening.setsockopt(*option)

    def accept(self) -> Any:
        if self.failures:
            self.failures -= 1
            raise OSError(self._number, "exhausted")
        return self._listening.accept()


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "on this machine"), (errno.EPERM, "cannot accept a connection")],
)
async def test_connections_wait_and_the_reason_is_logged_once(
    listener: socket.socket,
    clients: list[socket.socket],
    number: int,
    words: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long it lasts. Once resources are available, all are served."""
    monkeypatch.setattr(shoal.server.listener, "RETRY_S", 0.0)
    exhausted = ExhaustedSocket(listener, number, 5)
    place = RunningListener(exhausted)
    with caplog.at_level(logging.ERROR, logger="shoal.server.listener"):
        place.listener.start()
        while len(place.made) < CLIENTS:  # noqa: ASYNC110 - the loop's turns are what is waited for
            await asyncio.sleep(0)
    assert (exhausted.failures, place.rooms) == (0, 5)
    (record,) = caplog.records
    assert words in record.message
    place.listener._pause()
    place.leave()


@pytest.mark.parametrize(("limit", "kept"), [(20, 0), (60, 40)])
async def test_some_descriptors_are_left_for_others(
    listener: socket.socket,
    clients: list[socket.socket],
    limit: int,
    kept: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Model files and backend connections need the last descriptors, and another server has its share."""
    monkeypatch.setattr(shoal.server.listener, "RETRY_S", 3600.0)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (clients[-1].fileno() + limit, resource.RLIM_INFINITY))
    place = RunningListener(listener, kept=kept)
    place.listener.start()
    await run_loop(6)
    assert 0 < len(place.made) < CLIENTS
    assert place.rooms == 1
    assert "out of file descriptors" in caplog.text
    place.listener._pause()
    place.leave()
