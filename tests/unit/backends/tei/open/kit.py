"""Tasks for models of servers in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from shoal.backends.tei.open import TeiModel
from shoal.core.protocols import Runner
from shoal.types import BatchTask, Context, Embed, Embedded, Scored
from tests.fakes.tei import FakeTei

Open = Callable[..., Coroutine[Any, Any, TeiModel]]
"""`opened(*servers, **table)`."""


def soon(seconds: float = 30.0, client: str = "") -> Context:
    return Context(id="r", deadline=time.monotonic() + seconds, client=client)


async def embed(runner: Runner, *texts: Any, client: str = "", **fields: Any) -> Embedded:
    answer = await runner.run(Embed(model="m", inputs=list(texts), **fields), soon(client=client))
    assert isinstance(answer, Embedded)
    return answer


async def score(runner: Runner, task: BatchTask) -> Scored:
    answer = await runner.run(task, soon())
    assert isinstance(answer, Scored)
    return answer


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the watch tells nobody
            await asyncio.sleep(0.001)


def calls_after_probe(server: FakeTei) -> list[Any]:
    """Return the calls since the start without the first one, the probe."""
    return server.calls[1:]
