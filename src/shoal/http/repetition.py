"""Repeats requests that came before the servers named at startup had answered for the first time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from shoal.errors import ModelNotReady

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway

T = TypeVar("T")


async def repeat_until_answered(
    gateway: Gateway, deadline: float, call: Callable[[], Awaitable[T]], error: ModelNotReady
) -> T:
    """Repeat a call that found no ready model, and for which nothing was done yet, after each first answer of a server.
    Raises the last error once all have answered, or the deadline is over."""
    while await gateway.wait_for_first_answer(deadline):
        try:
            return await call()
        except ModelNotReady as again:
            error = again
    raise error
