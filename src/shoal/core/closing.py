"""What is closed together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack


async def close_all(*closes: Callable[[], Awaitable[None]]) -> None:
    """Call them in this order, each though one before it fails: what stays open holds memory and connections for as
    long as the process lives. Raises what the last one that failed did, with the others as its context."""
    async with AsyncExitStack() as stack:
        for close in reversed(closes):
            stack.push_async_callback(close)
