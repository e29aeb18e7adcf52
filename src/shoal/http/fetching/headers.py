"""Check the headers that a client wants sent with its fetches (`image_download_headers`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from shoal.errors import InvalidValue

MAX_HEADERS: Final = 32
MAX_CHARACTERS: Final = 8192

FIELD: Final = "image_download_headers"

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"(?:[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)?")
_REFUSED = re.compile(
    # Headers of the connection or of the body's transfer (RFC 9110 7.6.1), which the fetch sets.
    r"host|connection|keep-alive|te|trailer|transfer-encoding|upgrade|http2-settings|proxy-.*|content-.*|expect|range"
    r"|if-.*|accept-encoding"
    # Headers that proxies and frameworks trust, and those that change the method.
    r"|forwarded|via|x-forwarded-.*|x-real-ip|x-http-method.*|x-method-override",
    re.IGNORECASE,
)


def check_download_headers(headers: Mapping[str, str], *, listed: bool) -> dict[str, str]:
    """Return the headers as a dict. Only hosts that the operator listed may get any, since they usually hold secrets.

    Raises InvalidValue with the field's name and never a value.
    """
    if headers and not listed:
        raise InvalidValue(
            f"{FIELD} are sent only to hosts that image_hosts lists by name: omit them, or ask the operator to add "
            "the host",
            param=FIELD,
        )
    if len(headers) > MAX_HEADERS or sum(map(len, headers)) + sum(map(len, headers.values())) > MAX_CHARACTERS:
        raise InvalidValue(
            f"{FIELD} are limited to {MAX_HEADERS} headers and {MAX_CHARACTERS} characters in total: send fewer",
            param=FIELD,
        )
    seen: set[str] = set()
    for name, value in headers.items():
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise InvalidValue(
                f"{FIELD} has an invalid header: a name must be an ASCII token, and a value must be visible ASCII "
                "characters separated by spaces",
                param=FIELD,
            )
        if _REFUSED.fullmatch(name):
            raise InvalidValue(f"{FIELD} cannot contain {name}, which Shoal sets itself: omit it", param=FIELD)
        if name.lower() in seen:
            raise InvalidValue(f"{FIELD} contains {name} twice: remove one", param=FIELD)
        seen.add(name.lower())
    return dict(headers)
