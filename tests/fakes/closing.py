"""Stopping a server in this process without leaking a connection."""

from __future__ import annotations

import asyncio


async def close(server: asyncio.Server) -> None:
    """Close the port after the pending connections are accepted.

    asyncio creates a connection some loop turns after it accepts the socket. If the port is closed in between, that
    fails silently, and the orphaned socket is reported as a leak by whichever test runs when it is collected.
    """
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    for _ in range(8):
        await asyncio.sleep(0)
    server.close()
