from __future__ import annotations

import asyncio
import math

import pytest

from shoal.core.generation.stream_timeout import StreamTimeout
from shoal.errors import DeadlineExceeded, Unavailable
from tests.unit.core.conftest import Run, gathered


async def listen(waits: list[float], *, first: float = 5.0, between: float = 2.0, total: float = 100.0) -> float:
    """Wait so long for each chunk; answers the time that it took."""
    began = asyncio.get_running_loop().time()
    with StreamTimeout(first, between, total) as silence:
        for wait in waits:
            silence.start_wait()
            await asyncio.sleep(wait)
            silence.end_wait()
    return asyncio.get_running_loop().time() - began


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
    """The first by its own bound, later ones by theirs, and each counts anew."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        if fails_after is None:
            await listen(waits)
            return
        with pytest.raises(DeadlineExceeded, match="silent"):
            await listen(waits)
        assert loop.time() - began == pytest.approx(fails_after, abs=0.05)

    virtual(main)


def test_all_together_are_bounded_too(virtual: Run[None]) -> None:
    """In the middle of a wait, and before the next one begins."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(DeadlineExceeded, match="complete"):
            await listen([1.0] * 50, total=7.5)
        assert loop.time() - began == pytest.approx(7.5, abs=0.05)
        with pytest.raises(DeadlineExceeded, match="complete"), StreamTimeout(math.inf, math.inf, 1.0) as silence:
            await asyncio.sleep(3)
            silence.start_wait()

    virtual(main)


def test_the_readers_own_time_is_not_silence(virtual: Run[None]) -> None:
    """Between two waits anything may take as long as it likes."""

    async def main() -> None:
        with StreamTimeout(1.0, 1.0, 1000.0) as silence:
            for _ in range(3):
                silence.start_wait()
                await asyncio.sleep(0.5)
                silence.end_wait()
                await asyncio.sleep(50)

    virtual(main)


def test_other_cancellations_pass(virtual: Run[None]) -> None:
    """They are not taken for silence, and leave no timer behind that could strike later."""

    async def main() -> None:
        task = asyncio.create_task(listen([4.0]))
        await asyncio.sleep(1)
        task.cancel()
        assert isinstance((await gathered(task))[0], asyncio.CancelledError)
        await asyncio.sleep(20)

    virtual(main)


def test_it_can_be_broken_off(virtual: Run[None]) -> None:
    """In the middle of a wait, or before the next one; the first reason counts."""

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def read(silence: StreamTimeout, pause: float) -> None:
            with silence:
                while True:
                    silence.start_wait()
                    await asyncio.sleep(1)
                    silence.end_wait()
                    await asyncio.sleep(pause)

        for pause in (0.0, 100.0):
            silence = StreamTimeout(5, 5, 1000)
            reader = asyncio.create_task(read(silence, pause))
            await asyncio.sleep(2.5)
            silence.abort(Unavailable("going down"))
            silence.abort(Unavailable("again"))
            began = loop.time()
            outcome = (await gathered(reader))[0]
            assert isinstance(outcome, Unavailable)
            assert outcome.message == "going down"
            assert loop.time() - began < 101

    virtual(main)
