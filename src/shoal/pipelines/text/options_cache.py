"""Cache what tasks ask for, shared by all tasks that differ only in model and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from shoal.types import BatchTask, Classify, Embed, Rerank

Options = TypeVar("Options")
TaskT = TypeVar("TaskT", bound=BatchTask)

MAX_CACHED_OPTIONS = 256
"""Maximum options cached per model; real traffic uses a few."""

KNOWN_NAME = 256
"""Longest prompt name or instruction to cache, in characters: some servers accept any text as a name."""

_NO_INPUTS: dict[type, dict[str, Any]] = {
    Embed: {"model": "", "inputs": (), "tokenized": None},
    Classify: {"model": "", "inputs": (), "tokenized": None},
    Rerank: {"model": "", "queries": (), "documents": (), "tokenized": None},
}


class OptionsCache(Generic[Options]):
    """Caches the options computed from a task."""

    def __init__(self) -> None:
        self._found: dict[BatchTask, Options] = {}

    def get_or_compute(self, task: TaskT, work_out: Callable[[TaskT], Options]) -> Options:
        """Return `work_out(task)`, or the cached result for an equal task. Raises whatever `work_out` raises."""
        text = task.prompt_name if isinstance(task, Embed) else task.instruction if isinstance(task, Rerank) else None
        if text is not None and len(text) > KNOWN_NAME:
            return work_out(task)
        key = msgspec.structs.replace(task, **_NO_INPUTS[type(task)])
        found = self._found.get(key)
        if found is None:
            found = work_out(task)
            if len(self._found) >= MAX_CACHED_OPTIONS:  # threads share the cache and may overshoot the limit
                self._found.clear()
            self._found[key] = found
        return found
