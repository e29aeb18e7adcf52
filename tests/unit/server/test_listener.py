"""Accepting: many in a turn, none lost at the end, and what happens without file descriptors."""

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
from shoal.server.listener import MAX_DESCRIPTORS, Listener, raise_descriptor_limit

CLIENTS = 40


class Protocol(asyncio.Protocol):
    def __init__(self, made: list[asyncio.Transport]) -> None:
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._made.append(transport)


class Place:
    """A listener, the connections that it took, and how often it asked for room."""

    def __init__(self, *sockets: Any) -> None:
        self.made: list[asyncio.Transport] = []
        self.rooms = 0
        self.listener = Listener(sockets, lambda: Protocol(self.made), self._make_room)

    def _make_room(self) -> None:
        self.rooms += 1

    def leave(self) -> None:
        for transport in self.made:
            transport.abort()


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as made:
        made.setblocking(False)
        yield made


@pytest.fixture
def clients(listening: socket.socket) -> Iterator[list[socket.socket]]:
    """Connected, and waiting in the backlog."""
    made = [socket.create_connection(listening.getsockname()) for _ in range(CLIENTS)]
    yield made
    for one in made:
        one.close()


async def run_loop(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_a_turn_accepts_all_that_wait(listening: socket.socket, clients: list[socket.socket]) -> None:
    """A few turns of the loop, and not one for each connection."""
    place = Place(listening)
    place.listener.start()
    await run_loop(6)
    assert len(place.made) == CLIENTS
    await place.listener.close()
    place.leave()


async def test_closing_loses_nobody(listening: socket.socket, clients: list[socket.socket]) -> None:
    """Whoever waited in the backlog is accepted first."""
    place = Place(listening)
    place.listener.start()
    await place.listener.close()
    assert len(place.made) == CLIENTS
    assert listening.fileno() == -1
    place.leave()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such filter")
def test_no_connection_begins_while_the_backlog_is_emptied(
    listening: socket.socket, clients: list[socket.socket]
) -> None:
    """Those that wait are still there; a new one does not come about, and is no victim of the closing."""
    shoal.server.listener._refuse_handshakes(listening)
    with socket.socket() as late:
        late.setblocking(False)
        assert late.connect_ex(listening.getsockname()) == errno.EINPROGRESS
        assert select.select([], [late], [], 0)[1] == []
        accepted = [listening.accept()[0] for _ in range(CLIENTS)]
        with pytest.raises(BlockingIOError):
            listening.accept()
    clients[0].sendall(b"still here")
    accepted[0].setblocking(True)
    assert accepted[0].recv(20) == b"still here"
    for one in accepted:
        one.close()


class Exhausted:
    """A listening socket whose system is out of something for the first `failures` calls."""

    def __init__(self, listening: socket.socket, number: int, failures: int) -> None:
        self._listening = listening
        self._number = number
        self.failures = failures

    def fileno(self) -> int:
        return self._listening.fileno()

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
    listening: socket.socket,
    clients: list[socket.socket],
    number: int,
    words: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long it lasts. When there is room again, they are all served."""
    monkeypatch.setattr(shoal.server.listener, "RETRY_S", 0.0)
    exhausted = Exhausted(listening, number, 5)
    place = Place(exhausted)
    with caplog.at_level(logging.ERROR, logger="shoal.server.listener"):
        place.listener.start()
        while len(place.made) < CLIENTS:  # noqa: ASYNC110 - the loop's turns are what is waited for
            await asyncio.sleep(0)
    assert (exhausted.failures, place.rooms) == (0, 5)
    (record,) = caplog.records
    assert words in record.message
    place.listener._pause()
    place.leave()


async def test_some_descriptors_are_left_for_others(
    listening: socket.socket,
    clients: list[socket.socket],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Models' files and connections to backends need them: the last ones are not given to clients."""
    monkeypatch.setattr(shoal.server.listener, "RETRY_S", 3600.0)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (clients[-1].fileno() + 20, resource.RLIM_INFINITY))
    place = Place(listening)
    place.listener.start()
    await run_loop(6)
    assert 0 < len(place.made) < CLIENTS
    assert place.rooms == 1
    assert "out of file descriptors" in caplog.text
    place.listener._pause()
    place.leave()


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 4096, 4096),
        (1024, resource.RLIM_INFINITY, MAX_DESCRIPTORS),
        (1024, 10**6, MAX_DESCRIPTORS),
        (10**6, 10**6, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_the_limit_is_raised(soft: int, hard: int, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: done.append(limits))
    raise_descriptor_limit()
    assert done == ([] if expected is None else [(expected, hard)])
