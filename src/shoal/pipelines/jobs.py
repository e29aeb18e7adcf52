"""The items of many requests, prepared together: each task is asked once, texts are answered in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

import msgspec

from shoal.core.protocols import Prepared
from shoal.errors import ShoalError
from shoal.types import BatchTask, Embed, Image, Item, TextPair

Entry: TypeAlias = Prepared | ShoalError
Text: TypeAlias = str | TextPair
Options = TypeVar("Options")

MAX_CACHED_OPTIONS = 256
"""Ways of asking that are remembered: real ones are a few for each model."""

KNOWN_NAME = 256
"""Characters of the longest name of a prompt that is remembered: a server's own may be any text."""


class OptionsCache(Generic[Options]):
    """What tasks ask of each of their items, worked out once for all tasks that differ in their inputs alone."""

    def __init__(self) -> None:
        self._found: dict[Embed, Options] = {}

    def get_or_compute(self, task: Embed, work_out: Callable[[Embed], Options]) -> Options:
        """`work_out` of the task, or of one that asked for the same. Raises what that raises."""
        if task.prompt_name is not None and len(task.prompt_name) > KNOWN_NAME:
            return work_out(task)
        key = msgspec.structs.replace(task, model="", inputs=())
        found = self._found.get(key)
        if found is None:
            found = work_out(task)
            if len(self._found) >= MAX_CACHED_OPTIONS:  # threads share it, and may have stepped over
                self._found.clear()
            self._found[key] = found
        return found


def prepare_in_order(
    items: Sequence[tuple[BatchTask, Item]],
    *,
    asked: Callable[[BatchTask], Options],
    texts: Callable[[list[tuple[Options, Text]]], list[Entry]],
    ids: Callable[[Options, list[int]], Entry],
) -> list[Entry]:
    """One entry an item, in order.

    `asked` says what a task wants of each of its items, once for neighbours of one task; it raises a ShoalError where
    they all fail. Token ids are answered by `ids` one by one; everything else by `texts`, in one call.
    """
    entries: list[Entry | None] = []
    waiting: list[tuple[Options, Text]] = []
    places: list[int] = []
    last: BatchTask | None = None
    wants: Options | ShoalError
    for task, item in items:
        if task is not last:
            last = task
            try:
                wants = asked(task)
            except ShoalError as error:
                wants = error
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
