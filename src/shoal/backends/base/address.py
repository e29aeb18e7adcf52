"""Parses server addresses of the form `//host[:port][/path][#model]`, which several backends share."""

from __future__ import annotations

import ipaddress
import re

from shoal.errors import AddressError
from shoal.models.address import Address
from shoal.names import is_part

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_MODEL = re.compile(r"[A-Za-z0-9@_][A-Za-z0-9@._:/+-]{0,191}")


def parse_http(scheme: str, text: str) -> Address:
    """Parse `//host[:port][/path][#model]`, the address of an HTTP server. Raises AddressError."""
    place, model = split_url(scheme, text)
    server, slash, path = place.partition("/")
    path = path.rstrip("/")
    if slash and path and not all(map(is_part, path.split("/"))):
        raise AddressError(f"{scheme}:{text}: the path may contain only ASCII letters, digits, '.', '_' and '-'")
    if model and (not _MODEL.fullmatch(model) or {"", ".", ".."} & set(model.split("/"))):
        raise AddressError(f"{scheme}:{text}: {model!r} is not a model name: write #MODEL as the server lists it")
    target = authority(scheme, server) + (f"/{path}" if path else "")
    return Address(scheme=scheme, target=target, model=model)


def split_url(scheme: str, text: str) -> tuple[str, str]:
    """Split `//place#model` into place and model. Raises AddressError, also for URL parts that no address has."""
    if not text.startswith("//"):
        raise AddressError(f"{scheme}:{text}: write {scheme}://host:port#model")
    place, hash_mark, model = text[2:].partition("#")
    if hash_mark and not model:
        raise AddressError(f"{scheme}:{text}: no model after '#': name a model, or remove '#' to serve all models")
    if "@" in place:
        raise AddressError(f"{scheme}: an address must not contain a key, since logs show it: use the configuration")
    if "?" in place or "%" in place:
        raise AddressError(f"{scheme}:{text}: an address must not contain '?' or '%'")
    return place, model


def authority(scheme: str, text: str) -> str:
    """Normalize `host[:port]` to lower case. IPv6 addresses are written in brackets. Raises AddressError."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::([0-9]{1,5}))?", text)
    if match is None or not _is_host(match[1]) or not 1 <= int(match[2] or 1) <= 65535:
        raise AddressError(f"{scheme}://{text}: {text!r} is not host or host:port")
    return match[1].lower() + (f":{int(match[2])}" if match[2] else "")


def _is_host(host: str) -> bool:
    if not host.startswith("["):
        return _HOST.fullmatch(host) is not None and ".." not in host
    try:
        ipaddress.IPv6Address(host[1:-1])
    except ValueError:
        return False
    return True
