from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from shoal.core.generation.merging import AHEAD, merge_streams
from tests.unit.core.conftest import Run, gathered


class Source:
    """Counts its chunks and how often it was closed."""

    def __init__(self, count: int, *, pause: float = 0.0, error: Exception | None = None) -> None:
        self.count = count
        self.pause = pause
        self.error = error
        self.yielded = 0
        self.begun = 0
        self.ended = 0

    async def stream(self) -> AsyncGenerator[tuple[int, int]]:
        self.begun += 1
        try:
            for at in range(self.count):
                await asyncio.sleep(self.pause)
                self.yielded += 1
                yield id(self), at
            if self.error is not None:
                raise self.error
        finally:
            self.ended += 1


def test_every_chunk_of_every_stream_in_its_order(virtual: Run[None]) -> None:
    """The order within each stream is kept, however different the speeds are."""

    async def main() -> None:
        sources = [Source(20, pause=pause) for pause in (0.0, 0.001, 0.01, 1.0)]
        seen: dict[int, list[int]] = {}
        async for source, at in merge_streams([source.stream() for source in sources], at_once=2):
            seen.setdefault(source, []).append(at)
        assert seen == {id(source): list(range(20)) for source in sources}
        assert [source.ended for source in sources] == [1] * 4

    virtual(main)


def test_a_reader_that_stops_stops_them(virtual: Run[None]) -> None:
    """No stream runs further ahead than the few buffered chunks."""

    async def main() -> None:
        source = Source(1000)
        async with aclosing(merge_streams([source.stream(), source.stream()], at_once=2)) as chunks:
            await anext(chunks)
            await asyncio.sleep(10)
            assert source.yielded <= AHEAD + 4
        assert (source.begun, source.ended) == (2, 2)

    virtual(main)


def test_one_that_fails_ends_all(virtual: Run[None]) -> None:
    """The reader gets the error, the other streams are closed, and waiting ones never start."""

    async def main() -> None:
        bad, slow, waiting = Source(1, error=ValueError("bad")), Source(100, pause=1.0), Source(1)
        with pytest.raises(ValueError, match="bad"):
            async for _ in merge_streams([slow.stream(), bad.stream(), waiting.stream()], at_once=2):
                pass
        assert (bad.ended, slow.ended, waiting.yielded) == (1, 1, 0)

    virtual(main)


def test_a_cancelled_reader_leaves_nothing(virtual: Run[None]) -> None:
    """All streams are closed before the cancellation propagates."""

    async def main() -> None:
        source = Source(100, pause=1.0)

        async def read() -> None:
            async for _ in merge_streams([source.stream() for _ in range(3)], at_once=3):
                pass

        reader = asyncio.create_task(read())
        await asyncio.sleep(2.5)
        reader.cancel()
        assert isinstance((await gathered(reader))[0], asyncio.CancelledError)
        assert len(asyncio.all_tasks()) == 1

    virtual(main)
