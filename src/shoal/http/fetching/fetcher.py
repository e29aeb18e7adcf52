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
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final

import aiohttp
from yarl import URL

from shoal.errors import DeadlineExceeded, InvalidValue, Overloaded, Unavailable
from shoal.http.fetching.addresses import Address, is_public, parse_ip
from shoal.http.fetching.allowed import ALTERNATIVE, FetchPolicy, Target, not_public_error
from shoal.http.fetching.headers import check_download_headers
from shoal.http.fetching.resolving import PinnedResolver, Resolver, SystemResolver

MAX_BYTES: Final = 20 * 2**20
TIMEOUT_S: Final = 10.0
SLOTS: Final = 16
USER_AGENT: Final = "shoal"

READ_BYTES: Final = 64 * 2**10
"""Read buffer: bytes that may arrive before the size limit is checked."""

MAX_ADDRESSES: Final = 8
"""Maximum addresses tried per host name; every address is checked first."""

_NO_HEADERS: Final[Mapping[str, str]] = {}


class Fetcher:
    """Runs at most `slots` fetches at once, each limited to `max_bytes` and to `seconds`, the wait for a slot included.

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
        self._slots = asyncio.Semaphore(slots)
        self._resolver = SystemResolver(slots) if resolver is None else resolver
        self._tls = tls
        self._closed = False

    async def get(self, url: str, headers: Mapping[str, str] = _NO_HEADERS, *, deadline: float) -> bytes:
        """Return the body of a 200 response. `headers` are the client's, for listed hosts only. `deadline` is absolute,
        in seconds of `time.monotonic()`.

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
            async with asyncio.timeout(min(remaining, self._seconds)), self._slots:
                began = True
                return await self._fetch(target, sent)
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
        connector = aiohttp.TCPConnector(
            resolver=PinnedResolver(target.host, addresses),
            use_dns_cache=False,
            force_close=True,
            limit=1,
            ssl=True if self._tls is None else self._tls,
        )
        session = aiohttp.ClientSession(
            connector=connector,
            headers={"user-agent": USER_AGENT, "accept": "image/*", "accept-encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=READ_BYTES,
        )
        async with session:
            try:
                async with session.get(target.url, headers=headers, allow_redirects=False) as response:
                    self._check_response(response, target)
                    return await self._read_body(response, target.host)
            except (aiohttp.ClientError, OSError) as error:
                raise _connection_error(error, target.host) from error

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

    def _check_response(self, response: aiohttp.ClientResponse, target: Target) -> None:
        """Raise InvalidValue for a response that is unusable by its status or headers."""
        host, status = target.host, response.status
        if 300 <= status < 400:
            where = _describe_redirect(target.url, response.headers.get("location", ""))
            raise InvalidValue(f"{host} redirects to {where}, and redirects are not followed: send the URL it leads to")
        if status != HTTPStatus.OK:
            then = "check the URL" if status < 500 else f"send the request again, or {ALTERNATIVE}"
            raise InvalidValue(f"{host} returned status {status} instead of an image: {then}")
        if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise InvalidValue(f"{host} compressed its response although asked not to: {ALTERNATIVE}")
        if (response.content_length or 0) > self._max_bytes:
            raise self._too_large_error(host)

    async def _read_body(self, response: aiohttp.ClientResponse, host: str) -> bytes:
        pieces: list[bytes] = []
        size = 0
        while piece := await response.content.readany():
            size += len(piece)
            if size > self._max_bytes:
                raise self._too_large_error(host)
            pieces.append(piece)
        if not size:
            raise InvalidValue(f"{host} returned an empty response: check the URL")
        return b"".join(pieces)

    def _too_large_error(self, host: str) -> InvalidValue:
        most = f"{self._max_bytes / 2**20:.3g} MiB" if self._max_bytes >= 2**20 else f"{self._max_bytes} bytes"
        return InvalidValue(f"{host} sends more than the limit of {most} for an image: use a smaller one")


def _describe_redirect(url: URL, location: str) -> str:
    """Describe a redirect's target to the client, without its query, which may hold a key, and internal addresses."""
    try:
        to = url.join(URL(location[:1024]))
        host, name = to.raw_host or "", str(to.with_query(None).with_fragment(None).with_user(None))
    except (ValueError, TypeError):  # includes errors of encoding the host name
        return "another location"
    address = parse_ip(host)
    inner = address is not None and host != url.raw_host and not is_public(address)
    return "another location" if inner or not location or to.scheme not in {"http", "https"} else name[:200]


def _connection_error(error: Exception, host: str) -> InvalidValue:
    """Build the client's error for a failed connection; `error` remains its cause."""
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return InvalidValue(f"{host} has no trusted certificate for this name: {ALTERNATIVE}")
    if isinstance(error, aiohttp.ClientConnectorError):
        return InvalidValue(f"{host} cannot be reached: check the URL, or {ALTERNATIVE}")
    if isinstance(error, aiohttp.ClientPayloadError):
        return InvalidValue(f"{host} ended its response too early: send the request again, or {ALTERNATIVE}")
    return InvalidValue(f"{host} closed the connection, or does not speak HTTP: check the URL, or {ALTERNATIVE}")
