"""What an engine of an OpenAI-compatible server calls: a route, the body for some items, and the rows of an answer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from shoal.backends.base.http_answer import Answer
from shoal.backends.base.response_limit import ResponseLimit
from shoal.errors import UpstreamFailed
from shoal.types import Array

T = TypeVar("T")


class Rows(NamedTuple):
    """`values` [items, ...] in the order of the items, and `tokens`: what the server read for all of them, 0 where it
    does not count."""

    values: Array
    tokens: int


class RouteCalls(Protocol):
    """One route of one server; `output` names its rows. It learns what that server refuses, so each engine has its own.

    - `group`: equal for items that may share a call; None for an item that this route does not take.
    - `body`: what is posted to `path` for items of one group.
    - `response_limit`: what an answer for `count` items may have at most, where `sent` is the body, and `width` the
    numbers of a
      vector, once they are known.
    - `adapt_to_refusal`: whether a refusal (400, 413 or 422) was of a field that is left out, or written otherwise,
    from now on.
    - `read` raises UpstreamFailed for what is not one row for each item.
    """

    path: str
    output: str

    def group(self, item: Any) -> Hashable | None: ...

    def body(self, model: str, items: Sequence[Any], **options: Any) -> dict[str, Any]: ...

    def response_limit(self, count: int, sent: bytes, width: int | None) -> ResponseLimit: ...

    def adapt_to_refusal(self, answer: Answer) -> bool: ...

    async def read(self, answer: Answer, items: Sequence[Any], where: str) -> Rows: ...


def sort_by_index(found: Sequence[tuple[int | None, T]], count: int, where: str) -> list[T]:
    """Entries in the order of their indices, or as they come where they have none. Raises UpstreamFailed for what is
    not one entry for each of `count` inputs."""
    rows: dict[int, T] = {}
    for place, (index, row) in enumerate(found):
        rows[place if index is None else index] = row
    if len(found) != count or set(rows) != set(range(count)):
        raise UpstreamFailed(
            f"the server at {where} answered {len(found)} rows for {count} inputs, or not one for each"
        )
    return [rows[place] for place in range(count)]
