"""Document the errors that the application returns before it calls an endpoint, by letting the surface render them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from shoal.core.protocols import Operation, Surface
from shoal.errors import (
    BodyTooLarge,
    Forbidden,
    Malformed,
    RequestTimeout,
    ShoalError,
    Unauthorized,
    UnsupportedMediaType,
    WrongType,
)

_AUTH_ERRORS: tuple[type[ShoalError], ...] = (Unauthorized, Forbidden)
_BODY_ERRORS: tuple[type[ShoalError], ...] = (Malformed, RequestTimeout, BodyTooLarge, UnsupportedMediaType)
"""These also apply without a `request` type: an unused body has a length and an encoding too."""


def with_common_errors(surface: Surface, operation: Operation) -> Operation:
    """Return the operation with its surface's replies to the common errors added to `errors`.

    A status may map to a tuple of several types, or to an empty tuple for a reply without a body.
    """
    errors = {status: as_tuple(kinds) for status, kinds in operation.errors.items()}
    for kind in _common_errors(operation):
        status, headers, _ = surface.render_error(kind("."))
        media_type = headers.get("content-type", "").partition(";")[0]
        reply_types: tuple[Any, ...] = {"": (), "text/plain": (str,)}.get(media_type, (surface.error,))
        declared = errors.get(status, ())
        if reply_types == (surface.error,) and any(each is not str for each in declared):
            continue  # the operation declares a more specific JSON type for this status
        errors[status] = tuple(dict.fromkeys((*declared, *reply_types)))
    return dataclasses.replace(operation, errors=errors)


def as_tuple(kinds: Any) -> tuple[Any, ...]:
    """Return the types of an error's bodies, declared as one type or a tuple, as a tuple."""
    return kinds if isinstance(kinds, tuple) else (kinds,)


def _common_errors(operation: Operation) -> Iterator[type[ShoalError]]:
    if operation.access != "public":
        yield from _AUTH_ERRORS
    if operation.method != "GET" and operation.limit != 0:
        yield from _BODY_ERRORS
    if operation.request is not None:
        yield WrongType
