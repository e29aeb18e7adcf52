from __future__ import annotations

import asyncio
import math

import pytest

from shoal.core.generation.stream_timeout import StreamTimeout
from shoal.errors import DeadlineExceeded, Unavailable
from tests.unit.core.conftest import Run, gathered


async def listen(waits: list[float], *, first: float = 5.0, between: float = 2.0, total: float = 100.0) -> float:
    """Wait so long for each chunk; return the total time."""
    start = asyncio.get_running_loop().time()
    with StreamTimeout(first, between, total) as stream_timeout:
        for wait in waits:
            stream_timeout.start_wait()
            await asyncio.sleep(wait)
            stream_timeout.end_wait()
    return asyncio.get_running_loop().time() - start


@pytest.mark.parametrize(
    ("waits", "fails_after"),
    [
        ([4.9, 1.9, 1.9], None),
        ([6.0], 5.0),
        ([4.0, 3.0], 6.0),
        ([0.5] * 20 + [60.0], 12.0),
        ([], None),
    ],
)
def test_a_wait_is_bounded_by_its_kind(virtual: Run[None], waits: list[float], fails_after: float | None) -> None:
    """The first wait has its own limit, later ones have another, and each starts anew."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        if fails_after is None:
            await listen(waits)
            return
        with pytest.raises(DeadlineExceeded, match="no token"):
            await listen(waits)
        assert loop.time() - start == pytest.approx(fails_after, abs=0.05)

    virtual(main)


def test_all_together_are_bounded_too(virtual: Run[None]) -> None:
    """The total limit applies during a wait, and before the next one starts."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        with pytest.raises(DeadlineExceeded, match="complete"):
            await listen([1.0] * 50, total=7.5)
        assert loop.time() - start == pytest.approx(7.5, abs=0.05)
        with (
            pytest.raises(DeadlineExceeded, match="complete"),
            StreamTimeout(math.inf, math.inf, 1.0) as total,
        ):
            await asyncio.sleep(3)
            total.start_wait()

    virtual(main)


def test_the_readers_own_time_is_not_silence(virtual: Run[None]) -> None:
    """The time between two waits is unlimited."""

    async def main() -> None:
        with StreamTimeout(1.0, 1.0, 1000.0) as stream_timeout:
            for _ in range(3):
                stream_timeout.start_wait()
                await asyncio.sleep(0.5)
                stream_timeout.end_wait()
                await asyncio.sleep(50)

    virtual(main)


def test_other_cancellations_pass(virtual: Run[None]) -> None:
    """Other cancellations are not taken for timeouts and leave no timer."""

    async def main() -> None:
        task = asyncio.create_task(listen([4.0]))
        await asyncio.sleep(1)
        task.cancel()
        assert isinstance((await gathered(task))[0], asyncio.CancelledError)
        await asyncio.sleep(20)

    virtual(main)


def test_it_can_be_broken_off(virtual: Run[None]) -> None:
    """A stream can be aborted during a wait or before the next one; the first reason counts."""

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def read(stream_timeout: StreamTimeout, pause: float) -> None:
            with stream_timeout:
                while True:
                    stream_timeout.start_wait()
                    await asyncio.sleep(1)
                    stream_timeout.end_wait()
                    await asyncio.sleep(pause)

        for pause in (0.0, 100.0):
            stream_timeout = StreamTimeout(5, 5, 1000)
            reader = asyncio.create_task(read(stream_timeout, pause))
            await asyncio.sleep(2.5)
            stream_timeout.abort(Unavailable("going down"))
            stream_timeout.abort(Unavailable("again"))
            start = loop.time()
            outcome = (await gathered(reader))[0]
            assert isinstance(outcome, Unavailable)
            assert outcome.message == "going down"
            assert loop.time() - start < 101

    virtual(main)
