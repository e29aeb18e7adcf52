"""Query parameters of lists that come in pages."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.errors import InvalidValue
from shoal.http.request import Request


def read_limit(request: Request, default: int, most: int) -> int:
    """Return the maximum objects of a page."""
    text = request.query_parameter("limit")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
        raise InvalidValue(f"'limit' must be a number from 1 to {most}.", param="limit")
    return int(text)


def read_choice(request: Request, name: str, choices: Sequence[str]) -> str:
    """Return the value of a query parameter, by default the first choice."""
    text = request.query_parameter(name) or choices[0]
    if text not in choices:
        raise InvalidValue(f"'{name}' must be one of {', '.join(choices)}.", param=name)
    return text
