"""The interface between an engine and a route of an OpenAI-compatible server: request bodies and answer rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from shoal.backends.base.http_answer import Answer
from shoal.backends.base.response_limit import ResponseLimit
from shoal.errors import UpstreamFailed
from shoal.types import Array

T = TypeVar("T")


class Rows(NamedTuple):
    """`values` [items, ...] in item order, and `tokens`: the input tokens of the call, 0 if the server does not report
    them."""

    values: Array
    tokens: int


class RouteCalls(Protocol):
    """One route of one server; `output` names its rows. It records what the server rejects, so every engine has its
    own instance.

    - `group`: equal for items that may share a call; None for an item that this route does not accept.
    - `body`: the body to post to `path` for items of one group.
    - `response_limit`: the maximum size of an answer for `count` items; `sent` is the body, `width` the length of a
      vector if known.
    - `adapt_to_refusal`: whether an error (400, 413 or 422) was about a field that later bodies omit or encode
      differently.
    - `read`: the rows of an answer. Raises UpstreamFailed unless there is one row per item.
    """

    path: str
    output: str

    def group(self, item: Any) -> Hashable | None: ...

    def body(self, model: str, items: Sequence[Any], **options: Any) -> dict[str, Any]: ...

    def response_limit(self, count: int, sent: bytes, width: int | None) -> ResponseLimit: ...

    def adapt_to_refusal(self, answer: Answer) -> bool: ...

    async def read(self, answer: Answer, items: Sequence[Any], where: str) -> Rows: ...


def sort_by_index(found: Sequence[tuple[int | None, T]], count: int, where: str) -> list[T]:
    """Return entries sorted by index, or in their given order if they have none. Raises UpstreamFailed unless there is
    one entry for each of `count` inputs."""
    rows: dict[int, T] = {}
    for place, (index, row) in enumerate(found):
        rows[place if index is None else index] = row
    if len(found) != count or set(rows) != set(range(count)):
        raise UpstreamFailed(
            f"the server at {where} returned {len(found)} rows for {count} inputs, or not one row per input"
        )
    return [rows[place] for place in range(count)]
