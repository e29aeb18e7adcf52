"""Close several resources together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack


async def close_all(*closes: Callable[[], Awaitable[None]]) -> None:
    """Call the functions in order, even if an earlier one fails: a resource left open holds memory and connections for
    the life of the process. Raises the last exception, with the earlier ones as its context."""
    async with AsyncExitStack() as stack:
        for close in reversed(closes):
            stack.push_async_callback(close)
