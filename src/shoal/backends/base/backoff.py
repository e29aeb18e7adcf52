"""Waits for servers: the pauses between attempts, and a search for the first of several servers that answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

Notify = Callable[[str], None]
"""Receives a message about the server that a model waits for."""

RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Pauses of an opener or a health check that waits for a server."""


def retry_pauses(pauses: Sequence[float] = ()) -> Iterator[float]:
    """Yield the pauses, or RETRY_S, in order, then the last one forever."""
    pauses = pauses or RETRY_S
    yield from pauses
    yield from itertools.repeat(pauses[-1])


async def find_first(
    ask: Callable[[int], Awaitable[T]], addresses: Sequence[object], waits: tuple[type[Exception], ...], note: Notify
) -> tuple[int, T]:
    """Ask the servers at these addresses in turn until one answers. Return its index and its answer.

    `waits` are the errors after which a server may answer later: `note` receives them. Other errors are raised.
    """
    for pause in retry_pauses():
        for number, address in enumerate(addresses):
            try:
                return number, await ask(number)
            except waits as error:
                note(f"waiting for {address}: {error}")
        await asyncio.sleep(pause)
    raise AssertionError("the retry loop never ends")
