"""A pool of scripted workers: room, deaths, texts that kill workers, starts that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from shoal.bulk.computing import BlockRunner, Column, Task, Texts
from shoal.bulk.worker_pool import ATTEMPTS, WorkerDied, WorkerPool
from shoal.errors import ConfigError, Crashed, InputRejected, SetupError, ShoalError


class Scripted:
    """A worker that answers with lengths, and dies of a text with "kill": with all calls that it has."""

    def __init__(self, gate: asyncio.Event | None = None) -> None:
        self.calls: list[list[str]] = []
        self.closed = False
        self.most = 0
        self._gate = gate
        self._running = 0
        self._dead = asyncio.Event()

    async def call(self, texts: Sequence[Texts]) -> Mapping[str, Column]:
        self.calls.append([text for (text,) in texts])
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            if self._gate is not None:
                await self._gate.wait()
            await asyncio.sleep(0)
            if any("kill" in text for (text,) in texts):
                self._dead.set()
            await asyncio.sleep(0)
            if self._dead.is_set():
                raise WorkerDied("killed")
        finally:
            self._running -= 1
        if ("bad",) in texts:
            raise InputRejected("refused").at_input(texts.index(("bad",)))
        return {"size": np.array([len(text) for (text,) in texts])}

    async def close(self) -> None:
        self.closed = True


class Starts:
    """Starts workers, after raising `errors` in turn."""

    def __init__(self, *errors: Exception, gate: asyncio.Event | None = None) -> None:
        self.workers: list[Scripted] = []
        self._errors = list(errors)
        self._gate = gate

    async def __call__(self) -> Scripted:
        await asyncio.sleep(0)
        if self._errors:
            raise self._errors.pop(0)
        self.workers.append(Scripted(self._gate))
        return self.workers[-1]


async def test_calls_are_shared_by_the_workers() -> None:
    """Each has its part, within its room, and all are closed at the end."""
    gate = asyncio.Event()
    starts = Starts(gate=gate)
    async with WorkerPool(starts, 2, 3).open() as pool:
        await pool.wait_for_first()
        calls = [asyncio.create_task(pool.call([(f"{number}",)])) for number in range(10)]
        for _ in range(100):
            await asyncio.sleep(0)
        assert [len(worker.calls) for worker in starts.workers] == [3, 3]
        gate.set()
        await asyncio.gather(*calls)
    assert [worker.most for worker in starts.workers] == [3, 3]
    assert all(worker.closed for worker in starts.workers)


async def test_results_do_not_depend_on_deaths() -> None:
    """Of a block, a text that kills workers and one that is refused are set aside; the others have their results,
    whether or not they ran beside it."""
    starts = Starts()
    texts = [("kill",) if at == 13 else ("bad",) if at == 30 else ("a" * at,) for at in range(1, 65)]
    async with WorkerPool(starts, 2, 4).open() as pool:
        results = await BlockRunner(Task(pool.call, 4, 8, {"size": np.empty(0, np.int64)})).run(texts)
    assert sorted(results.reasons) == [12, 29]
    assert results.reasons[12] == f"{ATTEMPTS} workers died of it: killed"
    assert results.kept == [at for at in range(64) if at not in (12, 29)]
    assert np.array_equal(results.columns["size"], [len(texts[at][0]) for at in results.kept])
    assert len(starts.workers) == 2 + 2 * ATTEMPTS  # of the call that has it, and of the text alone
    assert all(worker.closed for worker in starts.workers)


async def test_a_call_beside_a_death_succeeds() -> None:
    """After one death, its calls run alone: the one at fault cannot take the others with it again."""
    starts = Starts()
    async with WorkerPool(starts, 1, 4).open() as pool:
        found = await asyncio.gather(
            *(pool.call([(text,)]) for text in ("kill", "a", "bb", "ccc")), return_exceptions=True
        )
    assert isinstance(found[0], Crashed)
    assert [each["size"].tolist() for each in found[1:]] == [[1], [2], [3]]  # type: ignore[index,union-attr]


async def test_a_worker_that_dies_at_its_start_is_started_again() -> None:
    starts = Starts(WorkerDied("out of memory"))
    async with WorkerPool(starts, 1, 1).open() as pool:
        assert (await pool.call([("a",)]))["size"].tolist() == [1]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ([WorkerDied("out of memory")] * ATTEMPTS, "3 workers died while they loaded the model: out of memory"),
        ([ConfigError("no such model")], "no such model"),
    ],
)
async def test_workers_that_cannot_start_end_the_run(errors: list[Exception], message: str) -> None:
    """The first error is raised as it is; calls raise SetupError, which nothing repeats."""
    async with WorkerPool(Starts(*errors), 1, 1).open() as pool:
        with pytest.raises(ShoalError, match=message):
            await pool.wait_for_first()
        with pytest.raises(SetupError, match=message):
            await pool.call([("a",)])
