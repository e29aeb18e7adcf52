"""What the front answers before it calls an endpoint, for the document: found out by letting the surface render it."""

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
"""Also without a `request` type: a body that nobody wants has a length and an encoding all the same."""


def with_common_errors(surface: Surface, operation: Operation) -> Operation:
    """The operation with its surface's answers to those errors among `errors`.

    There a status may stand for several types, as a tuple, and for no body at all, as an empty one.
    """
    errors = {status: as_tuple(kinds) for status, kinds in operation.errors.items()}
    for kind in _common_errors(operation):
        status, headers, _ = surface.render_error(kind("."))
        media_type = headers.get("content-type", "").partition(";")[0]
        told: tuple[Any, ...] = {"": (), "text/plain": (str,)}.get(media_type, (surface.error,))
        declared = errors.get(status, ())
        if told == (surface.error,) and any(each is not str for each in declared):
            continue  # the operation knows better what JSON stands under this status
        errors[status] = tuple(dict.fromkeys((*declared, *told)))
    return dataclasses.replace(operation, errors=errors)


def as_tuple(kinds: Any) -> tuple[Any, ...]:
    """The types of an error's bodies: one type, or a tuple of them."""
    return kinds if isinstance(kinds, tuple) else (kinds,)


def _common_errors(operation: Operation) -> Iterator[type[ShoalError]]:
    if operation.access != "public":
        yield from _AUTH_ERRORS
    if operation.method != "GET" and operation.limit != 0:
        yield from _BODY_ERRORS
    if operation.request is not None:
        yield WrongType
