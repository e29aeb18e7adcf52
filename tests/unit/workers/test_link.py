"""The framing of messages on a connection."""

from __future__ import annotations

import asyncio
import logging
import socket
from itertools import pairwise
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import TooManyInputs
from shoal.workers import link as module
from shoal.workers import messages
from shoal.workers.link import Link


class Endpoint:
    """Collects what arrives."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.lost = 0

    def receive(self, link: Link, message: Any) -> None:
        self.received.append(message)

    def lose(self, link: Link) -> None:
        self.lost += 1


class Transport:
    """Collects the writes of a link."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def get_extra_info(self, name: str) -> None:
        """It has no socket."""

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True


def connect(endpoint: Endpoint | None = None) -> tuple[Link, Transport]:
    link, transport = Link(endpoint or Endpoint(), messages.decoder_from_front()), Transport()
    link.connection_made(cast(asyncio.Transport, transport))
    return link, transport


async def write(*sent: Any) -> bytes:
    """Return the bytes of messages on a connection."""
    link, transport = connect()
    for message in sent:
        link.send(message)
    await asyncio.sleep(0)
    return b"".join(transport.writes)


MESSAGES = st.lists(
    st.builds(messages.Event, st.integers(0, 99), st.binary(max_size=40), st.booleans())
    | st.builds(messages.More, st.integers(0, 2**40), st.integers(1, 9))
    | st.builds(messages.Refused, st.text("abc", max_size=300)),
    max_size=6,
)


@given(MESSAGES, st.lists(st.integers(0, 400), max_size=12))
def test_any_split_gives_the_same_messages(sent: list[Any], cuts: list[int]) -> None:
    """However the bytes are divided, each message arrives once, in order."""

    async def check() -> None:
        data = await write(*sent)
        endpoint = Endpoint()
        link, _ = connect(endpoint)
        edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        for start, stop in pairwise(edges):
            link.data_received(data[start:stop])
        assert endpoint.received == sent

    asyncio.run(check())


async def test_every_byte_may_come_alone() -> None:
    """A message arrives with its last byte, not before."""
    data = await write(messages.Cancel(1), messages.Cancel(2))
    endpoint = Endpoint()
    link, _ = connect(endpoint)
    counts = []
    for at in range(len(data)):
        link.data_received(data[at : at + 1])
        counts.append(len(endpoint.received))
    half = len(data) // 2
    assert counts == [0] * (half - 1) + [1] * half + [2]


async def test_messages_of_one_turn_leave_in_one_write() -> None:
    """What is sent in one turn of the event loop is one write, and what is sent later another one."""
    link, transport = connect()
    for number in range(3):
        link.send(messages.Cancel(number))
    assert transport.writes == []
    await asyncio.sleep(0)
    assert len(transport.writes) == 1
    link.send(messages.Cancel(3))
    await asyncio.sleep(0)
    assert len(transport.writes) == 2
    await asyncio.sleep(0)
    assert len(transport.writes) == 2


async def test_a_close_sends_what_is_left() -> None:
    """Messages of the same turn still leave before the connection is closed."""
    link, transport = connect()
    link.send(messages.Cancel(1))
    link.close()
    assert transport.closed
    assert b"".join(transport.writes) == await write(messages.Cancel(1))
    await asyncio.sleep(0)  # nothing is written afterwards


async def test_a_send_on_a_lost_link_is_ignored() -> None:
    """Nothing is written or kept once the connection is lost, and its endpoint is told once."""
    endpoint = Endpoint()
    link, transport = connect(endpoint)
    link.connection_lost(None)
    link.send(messages.Cancel(1))
    await asyncio.sleep(0)
    link.close()
    assert (transport.writes, endpoint.lost) == ([], 1)


async def test_a_text_that_is_not_unicode_is_refused_alone() -> None:
    """The caller gets the error, and messages before and after it leave."""
    link, transport = connect()
    link.send(messages.Refused("a", "tei"))
    with pytest.raises(UnicodeEncodeError):
        link.send(messages.Refused("\ud800", "tei"))
    link.send(messages.Refused("b", "tei"))
    await asyncio.sleep(0)
    assert b"".join(transport.writes) == await write(messages.Refused("a", "tei"), messages.Refused("b", "tei"))


@pytest.mark.parametrize(
    "garbage",
    [b"\x00\x00\x00\x01\xc1", b"\x00\x00\x00\x00", b"\x00\x00\x00\x03\x92\x63\x01"],
    ids=["no MessagePack", "empty", "unknown tag"],
)
async def test_garbage_closes_the_link(garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be read ends the connection with a line in the log; messages before it still arrive."""
    endpoint = Endpoint()
    link, transport = connect(endpoint)
    with caplog.at_level(logging.ERROR, "shoal.workers"):
        link.data_received(await write(messages.Cancel(1)) + garbage)
    assert endpoint.received == [messages.Cancel(1)]
    assert transport.closed
    assert "cannot be read" in caplog.text


async def test_nothing_after_garbage_is_read() -> None:
    """A connection whose framing is lost delivers no more messages."""
    endpoint = Endpoint()
    link, _ = connect(endpoint)
    link.data_received(b"\x00\x00\x00\x01\xc1")
    link.data_received(await write(messages.Cancel(1)))
    assert endpoint.received == []


async def test_a_large_message_arrives_over_a_socket() -> None:
    """A message larger than any buffer of the system arrives whole."""
    body = bytes(range(256)) * 20_000
    async with asyncio.timeout(30):
        far, seen = asyncio.Event(), []

        class Far(Endpoint):
            def receive(self, link: Link, message: Any) -> None:
                seen.append(message)
                far.set()

        one, other = socket.socketpair()
        loop = asyncio.get_running_loop()
        _, sender = await loop.create_connection(lambda: Link(Endpoint(), messages.decoder_from_front()), sock=one)
        _, reader = await loop.create_connection(lambda: Link(Far(), messages.decoder_from_front()), sock=other)
        sender.send(messages.Event(1, body, False))
        await far.wait()
        assert seen == [messages.Event(1, body, False)]
        sender.close()
        reader.close()


def test_the_decoder_rejects_what_is_for_the_other_end() -> None:
    """A message of the model process is none of a front."""
    with pytest.raises(msgspec.MsgspecError):
        messages.decoder_from_front().decode(messages.encode(messages.Start(1, 200, [])))


async def test_a_message_that_the_other_end_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs its own request; what is sent before and after it arrives."""
    monkeypatch.setattr(module, "MAX_BYTES", 200)
    link, transport = connect()
    link.send(messages.Hello(1, b"a"))
    with pytest.raises(TooManyInputs, match="split the request"):
        link.send(messages.Hello(2, b"b" * 200))
    link.send(messages.Hello(3, b"c"))
    await asyncio.sleep(0)
    endpoint = Endpoint()
    connect(endpoint)[0].data_received(b"".join(transport.writes))
    assert endpoint.received == [messages.Hello(1, b"a"), messages.Hello(3, b"c")]
