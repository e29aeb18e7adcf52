"""Rules for a request's headers, checked before any decision depends on them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from functools import lru_cache

from shoal.errors import Malformed

RawHeaders = Sequence[tuple[bytes, bytes]]

SINGLE_VALUE_HEADERS = frozenset(
    {
        b"access-control-request-method",
        b"api-key",
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"expect",
        b"host",
        b"origin",
        b"sec-fetch-site",
        b"transfer-encoding",
        b"x-api-key",
        b"x-request-id",
        b"x-request-timeout",
        b"x-shoal-class",
    }
)
"""Headers that affect decisions and must have one value: of two, a program in front of Shoal may read the other one."""

_VERSIONS = frozenset({"1.0", "1.1", "2", "3"})
_HOST = re.compile(rb"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{0,253}))(?::([0-9]{0,5}))?")


def combine_headers(raw: RawHeaders) -> dict[bytes, bytes]:
    """Return one value per name; the values of a repeated header are joined to a list (RFC 9110, section 5.3)."""
    headers: dict[bytes, bytes] = {}
    for name, value in raw:
        headers[name] = headers[name] + b", " + value if name in headers else value
    return headers


def check_headers(raw: RawHeaders, version: str, client_header: bytes = b"") -> None:
    """Raise Malformed if the request's version, Host or repeated headers are invalid or ambiguous.

    `client_header` identifies the user, so it must have one value too.
    """
    if version not in _VERSIONS:
        raise Malformed(f"HTTP/{version} is not supported; send the request as HTTP/1.1.")
    headers = dict(raw)
    if len(headers) < len(raw):
        check_repeated(raw, client_header)
    host, encoding = headers.get(b"host"), headers.get(b"transfer-encoding")
    if host is not None and host_name(host) is None:
        raise Malformed("The 'host' header must be a host name or an IP address, with an optional port.")
    if encoding is not None and (version == "1.0" or encoding.strip().lower() != b"chunked"):
        raise Malformed("The 'transfer-encoding' header must be 'chunked', and the request must be HTTP/1.1.")
    if host is None and version == "1.1":
        raise Malformed("The request has no 'host' header, which HTTP/1.1 requires.")


def check_repeated(raw: RawHeaders, client_header: bytes) -> None:
    """Raise Malformed if a header that must have one value has several; `client_header` is one more such header."""
    seen = set()
    for name, _ in raw:
        if name in SINGLE_VALUE_HEADERS or name == client_header:
            if name in seen:
                raise Malformed(f"The {name.decode('latin-1')!r} header has more than one value; send it once.")
            seen.add(name)


@lru_cache(maxsize=256)
def host_name(host: bytes) -> bytes | None:
    """Return the lower-case name or address of a Host header, without port and brackets; None if it is malformed."""
    found = _HOST.fullmatch(host[:512])
    if found is None or int(found[3] or 0) > 65535:
        return None
    if found[1] is None:
        return found[2].lower()
    try:
        ipaddress.IPv6Address(found[1].decode())
    except ValueError:
        return None
    return found[1].lower()


@lru_cache(maxsize=256)
def is_loopback(host: bytes) -> bool:
    """Whether a Host header can only mean this machine."""
    name = host_name(host)
    return name is not None and is_loopback_name(name)


def is_loopback_name(name: bytes) -> bool:
    """Whether a name or address without brackets can only mean this machine."""
    text = name.decode("latin-1").lower()
    if text == "localhost" or text.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False
