"""Whether a server is in service: what ejects it, and what brings it back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import pytest

from shoal.backends.base.presence import SLOW_LOOKS, Presence
from shoal.errors import ConfigError, DeadlineExceeded, ShoalError, TransportFailed

logger = logging.getLogger("shoal.test")


class Server:
    """The result of checks and admission: an error, or nothing."""

    def __init__(self) -> None:
        self.ill: Exception | None = None
        self.refuses: Exception | None = None
        self.looks = 0
        self.admitted = 0

    async def look(self) -> None:
        self.looks += 1
        if self.ill is not None:
            raise self.ill

    async def admit(self) -> None:
        self.admitted += 1
        if self.refuses is not None:
            raise self.refuses


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def presence(server: Server) -> AsyncIterator[Presence]:
    made = Presence("m-0", logger, look=server.look, admit=server.admit, serving=True)
    yield made
    await made.aclose()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the watch tells nobody
            await asyncio.sleep(0.001)


def begin(presence: Presence, look_s: float = 0.001) -> None:
    presence.start(look_s=look_s, again_s=(0.001,))


async def test_one_that_never_served_is_admitted_first(server: Server) -> None:
    presence = Presence("m-0", logger, look=server.look, admit=server.admit)
    assert not presence.ready
    assert presence.reason == "it has not been reached yet"
    server.refuses = ConfigError("it is a different model")
    begin(presence)
    await until(lambda: presence.reason == "it is a different model")
    assert not presence.ready
    server.refuses = None
    await until(lambda: presence.ready)
    assert presence.reason == ""
    await presence.aclose()
    assert not presence.ready


async def test_one_that_is_away_goes_at_once(server: Server, presence: Presence) -> None:
    server.ill = TransportFailed("away")
    begin(presence)
    await until(lambda: not presence.ready)
    assert server.looks == 1
    server.ill = None
    await until(lambda: presence.ready)
    assert server.admitted == 1


async def test_a_server_that_returns_with_another_model_is_logged(
    server: Server, presence: Presence, caplog: pytest.LogCaptureFixture
) -> None:
    """The new reason is logged once, however long the server was unreachable."""
    server.ill = TransportFailed("away")
    begin(presence)
    await until(lambda: server.looks > SLOW_LOOKS)
    server.ill, server.refuses = None, ConfigError("it is a different model")
    await until(lambda: server.admitted > SLOW_LOOKS)
    assert presence.reason == "it is a different model"
    messages = [each.getMessage() for each in caplog.records]
    assert messages == ["m-0 is out of service: away", "m-0 cannot serve: it is a different model"]


async def test_one_that_is_late_has_more_time(server: Server, presence: Presence) -> None:
    server.ill = DeadlineExceeded("late")
    begin(presence)
    await until(lambda: not presence.ready)
    assert server.looks == SLOW_LOOKS
    assert presence.reason == "late"


async def test_a_call_that_finds_it_gone(server: Server, presence: Presence) -> None:
    """The server is checked at once, not at its next interval."""
    begin(presence, look_s=60.0)
    await asyncio.sleep(0)
    with pytest.raises(TransportFailed, match="cut"), presence:
        raise TransportFailed("cut")
    assert (presence.ready, presence.reason) == (False, "cut")
    await until(lambda: presence.ready)
    assert server.looks == 1


async def test_other_failures_are_not_its_absence(presence: Presence) -> None:
    with pytest.raises(ShoalError), presence:
        raise DeadlineExceeded("slow")
    assert presence.ready


async def test_a_bug_does_not_end_the_watch(
    server: Server, presence: Presence, caplog: pytest.LogCaptureFixture
) -> None:
    server.ill = ValueError("bug")
    begin(presence)
    await until(lambda: server.looks > 2)
    assert "the health check failed: ValueError('bug')" in presence.reason
    assert "unexpectedly" in caplog.text
    server.ill = None
    await until(lambda: presence.ready)


async def test_closing_waits_for_calls(presence: Presence) -> None:
    begin(presence)
    with presence:
        closing = asyncio.create_task(presence.aclose())
        await asyncio.sleep(0)
        assert not closing.done()
    await closing
    await presence.aclose()
    with pytest.raises(TransportFailed, match="m-0 is closed"), presence:
        pass
