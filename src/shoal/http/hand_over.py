"""Hands requests over to another process, if several serve as one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from shoal.core.protocols import Operation
from shoal.http.request import Request

Forward: TypeAlias = Callable[[Request, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[int]]
"""Answers a request (with ASGI's `receive` and `send`) by another process, and returns the status. It sets
`is_forwarded` and `has_response` of the request."""


class HandOver(Exception):
    """Raised by an endpoint, before it has done anything, in a process that cannot answer the request."""


def is_for_models(operation: Operation) -> bool:
    """Whether an operation reads or changes models, in place of running one, or other state that one process has: that
    takes the process that has the models."""
    return (
        operation.single or operation.access == "admin" or (operation.method == "GET" and operation.access != "public")
    )
