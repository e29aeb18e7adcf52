"""Fetch images from URLs that clients send.

The host is resolved once. All its addresses must be allowed, and the connection goes to one of them even if the name
resolves differently later. The TLS server name and the `Host` header are those of the URL. Fetches share nothing: no
connections, resolved names or cookies. Proxies from the environment, redirects and compressed responses are not used.

Any failure of the remote host, slowness included, is an InvalidValue, since only the client can send another URL. The
message names the host as the client wrote it, and neither its addresses nor its response. If the request's own deadline
comes first, the error is DeadlineExceeded; if no fetch could start in time, Overloaded.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, TypeAlias

from shoal.core.concurrency import FairSlots
from shoal.errors import DeadlineExceeded, InvalidValue, Overloaded, Unavailable
from shoal.http.fetching.addresses import Address, parse_ip
from shoal.http.fetching.allowed import ALTERNATIVE, FetchPolicy, Target, not_public_error
from shoal.http.fetching.headers import check_download_headers
from shoal.http.fetching.resolving import Resolver, SystemResolver

MAX_BYTES: Final = 20 * 2**20
TIMEOUT_S: Final = 10.0
SLOTS: Final = 16

MAX_ADDRESSES: Final = 8
"""Maximum addresses tried per host name; every address is checked first."""

_NO_HEADERS: Final[Mapping[str, str]] = {}
_DOWNLOADING = "shoal.http.fetching.download"

Download: TypeAlias = Callable[..., Awaitable[bytes]]


class Fetcher:
    """Runs at most `slots` fetches at once, each limited to `max_bytes` and to `seconds`, the wait for a slot included;
    clients take turns.

    `tls` is a verifying context for certificates that the system does not trust. Create a Fetcher on the event loop
    that uses it.
    """

    def __init__(
        self,
        allowed: FetchPolicy,
        *,
        max_bytes: int = MAX_BYTES,
        seconds: float = TIMEOUT_S,
        slots: int = SLOTS,
        resolver: Resolver | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._allowed = allowed
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._slots = FairSlots(slots)
        self._resolver = SystemResolver(slots) if resolver is None else resolver
        self._tls = tls
        self._closed = False
        self._download: Download | None = None

    async def get(
        self, url: str, headers: Mapping[str, str] = _NO_HEADERS, *, deadline: float, client: str = ""
    ) -> bytes:
        """Return the body of a 200 response. `headers` are the client's, for listed hosts only. `deadline` is absolute,
        in seconds of `time.monotonic()`. `client` is the identity for fair sharing.

        Raises InvalidValue, DeadlineExceeded and Overloaded as described for the module, and Unavailable after
        `aclose`. Cancelling it closes its connection in every phase.
        """
        target = self._allowed.check_url(url)
        sent = check_download_headers(headers, listed=target.listed)
        if self._closed:
            raise Unavailable("the server is shutting down: send the request again")
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineExceeded("the request's deadline passed before its image was fetched")
        began = False
        try:
            async with asyncio.timeout(min(remaining, self._seconds)):
                await self._slots.acquire(client)
                began = True
                try:
                    return await self._fetch(target, sent)
                finally:
                    self._slots.leave()
        except TimeoutError:
            # Only the limit above raises this here: the operating system's timeouts are handled in `_fetch`.
            raise self._timeout_error(target.host, began, remaining) from None

    async def aclose(self) -> None:
        """Refuse new fetches; running ones belong to the callers that await them."""
        self._closed = True
        await self._resolver.aclose()

    def _timeout_error(self, host: str, began: bool, remaining: float) -> Exception:
        if remaining <= self._seconds:
            return DeadlineExceeded(f"{host} did not send the image before the request's deadline")
        if not began:
            return Overloaded("the server is fetching too many images: send the request again", retry_after=1.0)
        return InvalidValue(f"{host} did not send the image within {self._seconds:g} s: {ALTERNATIVE}")

    async def _fetch(self, target: Target, headers: Mapping[str, str]) -> bytes:
        addresses = await self._resolve_addresses(target)
        self._download = self._download or await _load_download()
        return await self._download(target, addresses, headers, max_bytes=self._max_bytes, tls=self._tls)

    async def _resolve_addresses(self, target: Target) -> Sequence[Address]:
        """Return the addresses to connect to. Raises InvalidValue unless every address of the host is allowed."""
        if target.address is not None:
            return [target.address]
        try:
            found = await self._resolver.addresses(target.host, target.port)
        except (OSError, UnicodeError):  # names that the library cannot encode are UnicodeErrors
            found = []
        if not found:
            raise InvalidValue(f"{target.host} cannot be resolved: check the URL's host")
        addresses = [address for text in found if (address := parse_ip(text)) is not None]
        if len(addresses) < len(found) or not all(map(target.permits, addresses)):
            raise not_public_error(target.host)
        return addresses[:MAX_ADDRESSES]


async def _load_download() -> Download:
    """Return the function that downloads. Its module takes a third of a second to import, which servers without image
    URLs never need. Fetches that start meanwhile wait for the import: in `sys.modules` it is only half there."""
    module: Any = await asyncio.to_thread(import_module, _DOWNLOADING)
    found: Download = module.download
    return found
