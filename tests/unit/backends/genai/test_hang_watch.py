"""Detecting a hung process: when it is pinged, taken out of service and abandoned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shoal.backends.genai.hang_watch import GONE_AT, LOOK_S, PING_AT, SILENT_AT, Watch
from tests.unit.core.conftest import VirtualLoop, run_virtual

HALF = LOOK_S / 2


class Recorder:
    """Records the watch's calls, with the time since the last message to the process."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.pings: list[float] = []
        self.losses: list[float] = []
        self.start = self.loop.time()
        self.watch = Watch(
            "tiny",
            ping=lambda: self.pings.append(self.loop.time() - self.start),
            on_silent=lambda: self.losses.append(self.loop.time() - self.start),
        )

    def silent(self) -> bool:
        return self.watch.silent


def test_a_process_that_never_answers(caplog: pytest.LogCaptureFixture) -> None:
    """It is pinged after 15 s, out of service after 30 s, and abandoned 120 s after the ping, each once."""

    async def main() -> None:
        recorder = Recorder()
        recorder.watch.expect_answer()
        await asyncio.sleep(LOOK_S * SILENT_AT - HALF)
        assert not recorder.silent()
        await asyncio.sleep(LOOK_S)
        assert recorder.silent()
        await asyncio.sleep(1000)
        assert recorder.pings == [LOOK_S * PING_AT] == [15.0]
        assert recorder.losses == [LOOK_S * GONE_AT] == [135.0]

    run_virtual(main)
    assert "tiny is out of service: its process has not responded for 30 s" in caplog.text


def test_one_that_answers_the_ping_is_back(caplog: pytest.LogCaptureFixture) -> None:
    """Any message counts; an idle process is not watched."""

    async def main() -> None:
        recorder = Recorder()
        recorder.watch.expect_answer()
        await asyncio.sleep(LOOK_S * (GONE_AT - 1))
        assert recorder.silent()
        recorder.watch.record_message(owes=False)
        assert not recorder.silent()
        await asyncio.sleep(1000)
        assert (len(recorder.pings), recorder.losses) == (1, [])

    run_virtual(main)
    assert "tiny responds again" in caplog.text


def test_one_that_has_more_to_say_is_watched_on() -> None:
    """Time counts from the last message, so many short pauses do not add up."""

    async def main() -> None:
        recorder = Recorder()
        recorder.watch.expect_answer()
        for _ in range(100):
            await asyncio.sleep(LOOK_S * (PING_AT - 1))
            recorder.watch.expect_answer()
            recorder.watch.record_message(owes=True)
        assert (recorder.pings, recorder.silent()) == ([], False)
        await asyncio.sleep(1000)
        assert (len(recorder.pings), len(recorder.losses)) == (1, 1)

    run_virtual(main)


def test_an_idle_process_owes_no_answer() -> None:
    """Neither an idle hour nor closing during a wait counts as a hang."""

    async def main() -> None:
        recorder = Recorder()
        await asyncio.sleep(3600)
        recorder.watch.expect_answer()
        await asyncio.sleep(LOOK_S * SILENT_AT + HALF)
        recorder.watch.close()
        await asyncio.sleep(3600)
        assert (len(recorder.pings), recorder.losses) == (1, [])

    run_virtual(main)


def test_a_gateway_that_was_held_up_blames_nobody() -> None:
    """An hour in which the loop did not run counts as one check."""

    async def main() -> None:
        recorder = Recorder()
        recorder.watch.expect_answer()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for _ in range(PING_AT - 1):
            loop._virtual.now += 3600
            await asyncio.sleep(0)
        assert (recorder.pings, recorder.losses, recorder.silent()) == ([], [], False)

    run_virtual(main)


@pytest.mark.parametrize("end", [Watch.close, lambda watch: watch.record_message(owes=False)])
def test_it_may_end_before_it_began(end: Callable[[Watch], None]) -> None:
    """Ending a watch that has not started does not disable it."""

    async def main() -> None:
        recorder = Recorder()
        end(recorder.watch)
        recorder.watch.expect_answer()
        await asyncio.sleep(1000)
        assert len(recorder.losses) == 1

    run_virtual(main)
