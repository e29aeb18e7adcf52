"""Parses addresses of Triton servers.

triton://host[:port][#model[@version]]   `tritons` with TLS
triton:///path[#model[@version]]         the Unix socket of a Triton on this machine
"""

from __future__ import annotations

import re

from shoal.backends.base.address import authority, split_url
from shoal.errors import AddressError
from shoal.models.address import Address, Scheme

_SOCKET = re.compile(r"(?:/[^\s/,]+)+")
_MODEL = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._~-]{0,255}")


def parse(scheme: str, text: str) -> Address:
    """Parse the part of an address after `scheme`. Raises AddressError."""
    place, model = split_url(scheme, text)
    socket = scheme == "triton" and _SOCKET.fullmatch(place)
    if "/" in place and not socket:
        raise AddressError(
            f"{scheme}:{text}: a Triton address has no path: write {scheme}://host:8001#model, or triton:///PATH#model"
            " for the Unix socket of a Triton on this machine"
        )
    name, at, version = model.partition("@")
    if model and not (_MODEL.fullmatch(name) and (not at or re.fullmatch(r"[1-9][0-9]{0,18}", version))):
        raise AddressError(f"{scheme}:{text}: write {scheme}://host:8001#model or #model@3 (a whole number)")
    target = place if socket else authority(scheme, place)
    return Address(scheme=scheme, target=target, model=name, revision=version)


SCHEMES = dict.fromkeys(("triton", "tritons"), Scheme(parse=parse, needs_model=True))
