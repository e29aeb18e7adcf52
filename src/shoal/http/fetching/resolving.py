"""Resolve host names, once per fetch."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol


class Resolver(Protocol):
    async def addresses(self, host: str, port: int) -> Sequence[str]:
        """Return all addresses of a name, without zones. Raises OSError if it has none."""
        ...

    async def aclose(self) -> None:
        """Close without waiting; pending lookups are abandoned."""
        ...


class SystemResolver:
    """Resolves names with the C library in its own threads: an unresponsive name server blocks a thread until the
    library times out, and must not block the threads that the rest of the process needs."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, "shoal-names")

    async def addresses(self, host: str, port: int) -> Sequence[str]:
        found = await asyncio.get_running_loop().run_in_executor(self._threads, _look_up, host, port)
        return list(dict.fromkeys(found))

    async def aclose(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str, port: int) -> list[str]:
    return [str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
