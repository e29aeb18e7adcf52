"""The items of many requests, prepared together: each task is asked once, texts are answered in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from shoal.core.protocols import Prepared
from shoal.errors import ShoalError
from shoal.types import Batched, Image, Item, TextPair

Entry: TypeAlias = Prepared | ShoalError
Text: TypeAlias = str | TextPair
Asked = TypeVar("Asked")


def in_order(
    items: Sequence[tuple[Batched, Item]],
    *,
    asked: Callable[[Batched], Asked | ShoalError],
    texts: Callable[[list[tuple[Asked, Text]]], list[Entry]],
    ids: Callable[[Asked, list[int]], Entry],
) -> list[Entry]:
    """One entry an item, in order.

    `asked` says what a task wants of each of its items, once for neighbours of one task, or why they all fail. Token
    ids are answered by `ids` one by one; everything else by `texts`, in one call.
    """
    entries: list[Entry | None] = []
    waiting: list[tuple[Asked, Text]] = []
    places: list[int] = []
    last: Batched | None = None
    wants: Asked | ShoalError
    for task, item in items:
        if task is not last:
            wants, last = asked(task), task
        if isinstance(wants, ShoalError):
            entries.append(wants)
        elif isinstance(item, list):
            entries.append(ids(wants, item))
        else:
            assert not isinstance(item, Image)
            places.append(len(entries))
            entries.append(None)
            waiting.append((wants, item))
    if waiting:
        for place, entry in zip(places, texts(waiting), strict=True):
            entries[place] = entry
    return [entry for entry in entries if entry is not None]
