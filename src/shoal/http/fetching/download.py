"""One download by aiohttp, from addresses that were checked. Imported at the first fetch."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from shoal.errors import InvalidValue
from shoal.http.fetching.addresses import Address, is_public, parse_ip
from shoal.http.fetching.allowed import ALTERNATIVE, Target

USER_AGENT: Final = "shoal"
READ_BYTES: Final = 64 * 2**10
"""Read buffer: bytes that may arrive before the size limit is checked."""


async def download(
    target: Target,
    addresses: Sequence[Address],
    headers: Mapping[str, str],
    *,
    max_bytes: int,
    tls: ssl.SSLContext | None,
) -> bytes:
    """Return the body of a 200 response of at most `max_bytes`. Raises InvalidValue for every other outcome. `tls`: see
    Fetcher."""
    connector = aiohttp.TCPConnector(
        resolver=PinnedResolver(target.host, addresses),
        use_dns_cache=False,
        force_close=True,
        limit=1,
        ssl=True if tls is None else tls,
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
                _check_response(response, target, max_bytes)
                return await _read_body(response, target.host, max_bytes)
        except (aiohttp.ClientError, OSError) as error:
            raise _connection_error(error, target.host) from error


def _check_response(response: aiohttp.ClientResponse, target: Target, max_bytes: int) -> None:
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
    if (response.content_length or 0) > max_bytes:
        raise _too_large_error(host, max_bytes)


async def _read_body(response: aiohttp.ClientResponse, host: str, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while piece := await response.content.readany():
        size += len(piece)
        if size > max_bytes:
            raise _too_large_error(host, max_bytes)
        pieces.append(piece)
    if not size:
        raise InvalidValue(f"{host} returned an empty response: check the URL")
    return b"".join(pieces)


def _too_large_error(host: str, max_bytes: int) -> InvalidValue:
    most = f"{max_bytes / 2**20:.3g} MiB" if max_bytes >= 2**20 else f"{max_bytes} bytes"
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


class PinnedResolver(AbstractResolver):
    """Resolves one host, to its checked addresses, and no other."""

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
        """Do nothing: there is nothing to release."""
