"""The caches of a server's models, in memory and optionally on disk. Off unless `cache_mb` or `cache_disk_mb` is
set."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shoal._version import __version__
from shoal.cache.files import DiskCache
from shoal.config.settings import Settings
from shoal.core.cache import MemoryCache
from shoal.core.protocols import Cache, CacheCounts, ModelFacts

__all__ = ["RowCaches"]

MB = 1 << 20
FOLDER = "rows"

_log = logging.getLogger("shoal")


class RowCaches:
    """One cache per model, by served name.

    Disk caches are in `home`/rows, one folder per model. A single thread writes them; it starts with the first disk
    cache.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._writer: ThreadPoolExecutor | None = None
        self._caches: dict[str, MemoryCache | DiskCache] = {}

    def open(self, name: str, settings: Settings, facts: ModelFacts, precision: str) -> Cache | None:
        """Open the cache of a model that starts to run; return None if the settings disable it.

        Only models with a known `space` are cached on disk. Without it, nothing would reveal that the name now stands
        for another model.
        """
        self.close(name)
        memory = MemoryCache(settings.cache_mb * MB)
        cache: MemoryCache | DiskCache = memory
        if settings.cache_disk_mb and not facts.space:
            scores = "embed" not in facts.tasks
            reason = (
                "it returns scores, and only vectors are cached" if scores else "its server does not identify its model"
            )
            _log.warning("%s: its rows are not cached on disk: %s", name, reason)
        elif settings.cache_disk_mb:
            cache = DiskCache(
                self._home / FOLDER / name.replace("/", "~"),
                _prefix(facts, precision),
                memory,
                max_bytes=settings.cache_disk_mb * MB,
                writer=self._thread(),
            )
        if cache is memory and not settings.cache_mb:
            return None
        self._caches[name] = cache
        return cache

    def close(self, name: str) -> None:
        """Close the cache of a model that no longer runs: its memory is freed, its files stay."""
        cache = self._caches.pop(name, None)
        if isinstance(cache, DiskCache):
            cache.close()

    def counts(self) -> Mapping[str, CacheCounts]:
        """Return counts by model, for the models that have a cache now."""
        return {name: cache.counts() for name, cache in self._caches.items()}

    async def aclose(self) -> None:
        """Close all caches and return once pending rows are written."""
        for name in list(self._caches):
            self.close(name)
        if self._writer is not None:
            await asyncio.to_thread(self._writer.shutdown)

    def _thread(self) -> ThreadPoolExecutor:
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "shoal-rows")
        return self._writer


def _prefix(facts: ModelFacts, precision: str) -> Hashable:
    """Return what distinguishes rows with equal keys. It includes Shoal's version, since another may compute
    differently."""
    return (__version__, facts.backend, facts.space, facts.revision, facts.precision, precision, facts.answers)
