"""Prepare the items of many requests together: read each task's options once, and tokenize all texts in one call."""

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
"""Maximum options cached per model; real traffic uses a few."""

KNOWN_NAME = 256
"""Longest prompt name to cache, in characters: a server with its own prompts accepts any text as a name."""


class OptionsCache(Generic[Options]):
    """Caches the options computed from a task, shared by all tasks that differ only in model and inputs."""

    def __init__(self) -> None:
        self._found: dict[Embed, Options] = {}

    def get_or_compute(self, task: Embed, work_out: Callable[[Embed], Options]) -> Options:
        """Return `work_out(task)`, or the cached result for an equal task. Raises whatever `work_out` raises."""
        if task.prompt_name is not None and len(task.prompt_name) > KNOWN_NAME:
            return work_out(task)
        key = msgspec.structs.replace(task, model="", inputs=())
        found = self._found.get(key)
        if found is None:
            found = work_out(task)
            if len(self._found) >= MAX_CACHED_OPTIONS:  # threads share the cache and may overshoot the limit
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
    """Prepare the items and return one entry per item, in order.

    `asked` resolves a task's options, once per run of neighboring items of that task; if it raises a ShoalError, all of
    them fail with it. `ids` prepares token ids one item at a time; `texts` prepares everything else in one call.
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
