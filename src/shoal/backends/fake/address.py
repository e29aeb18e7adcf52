"""Addresses of scripted models.

fake[:key=value[:key=value...]][#model]
"""

from __future__ import annotations

import re

from shoal.errors import AddressError
from shoal.models.address import Address, Scheme, check_name

_OPTION = re.compile(r"([a-z][a-z0-9_]{0,31})=([A-Za-z0-9._+-]{1,64})")


def parse(scheme: str, text: str) -> Address:
    """Parse an address. Raises AddressError."""
    settings, _, model = text.partition("#")
    options = []
    for setting in settings.split(":") if settings else ():
        match = _OPTION.fullmatch(setting)
        if match is None:
            raise AddressError(f"fake:{text}: {setting!r} is not key=value; write fake:delay_ms=5:slots=2")
        options.append((match[1], match[2]))
    return Address(scheme=scheme, model=check_name(model) if model else "", options=tuple(options))


SCHEMES = {"fake": Scheme(parse=parse, name_suffices=True)}
