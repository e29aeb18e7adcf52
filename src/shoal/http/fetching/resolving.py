"""Names to addresses, once for each fetch, and the connector's view of what came of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from aiohttp.abc import AbstractResolver, ResolveResult

from shoal.http.fetching.addresses import Address


class Resolver(Protocol):
    async def addresses(self, host: str, port: int) -> Sequence[str]:
        """All addresses of a name, without zones. Raises OSError where it has none."""
        ...

    async def aclose(self) -> None:
        """Return at once; what is still being asked is let go."""
        ...


class SystemResolver:
    """The C library's answers, in threads of its own: a name server that does not answer holds a thread for as long as
    the library waits, and must not hold those that others of this process need."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, "shoal-names")

    async def addresses(self, host: str, port: int) -> Sequence[str]:
        found = await asyncio.get_running_loop().run_in_executor(self._threads, _look_up, host, port)
        return list(dict.fromkeys(found))

    async def aclose(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str, port: int) -> list[str]:
    return [str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class PinnedResolver(AbstractResolver):
    """Answers for one host with the addresses that were checked, and for no other."""

    def __init__(self, host: str, addresses: Sequence[Address]) -> None:
        self._host = host
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        if host != self._host:
            raise OSError(f"only {self._host} was checked")
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        """It holds nothing."""
