"""An in-memory LRU cache of computed rows, bounded by bytes.

It uses no files, clock or event loop. The persistent cache (`shoal.cache`) is built on top of it.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable

import numpy as np

from shoal.core.protocols import CacheCounts, CountedRow, Row, VectorSet
from shoal.types import Array, SparseVector

ENTRY_BYTES = 288
ARRAY_BYTES = 136
"""Overhead in bytes of an entry without its key, and of an array without its data. tracemalloc reports 245 and 110
(CPython 3.11, numpy 2); a hash table that has just grown adds to that."""


class MemoryCache:
    """An LRU cache of at most `max_bytes`, counting arrays, keys and Python's overhead.

    A row larger than the whole cache, or one that contains NaN or infinity, is not stored. Every operation takes
    constant time.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size = 0
        self._rows: OrderedDict[Hashable, tuple[CountedRow, int]] = OrderedDict()
        self._hits = 0
        self._misses = 0
        self._evicted = 0

    def __len__(self) -> int:
        return len(self._rows)

    def counts(self) -> CacheCounts:
        return CacheCounts(self._hits, self._misses, self._evicted, memory_bytes=self.size)

    def get(self, key: Hashable) -> CountedRow | None:
        """See Cache.get. The returned row is read-only and stays valid after eviction."""
        found = self._rows.get(key)
        if found is None:
            self._misses += 1
            return None
        self._hits += 1
        self._rows.move_to_end(key)
        return found[0]

    def put(self, key: Hashable, found: CountedRow) -> None:
        """See Cache.put."""
        arrays = collect_arrays(found.row)
        size = entry_size(key, arrays)
        if size > self.max_bytes or not all_finite(arrays):
            return
        old = self._rows.pop(key, None)
        if old is not None:
            self.size -= old[1]
        self.size += size
        self._rows[key] = (CountedRow(copy_read_only(found.row), found.tokens), size)
        while self.size > self.max_bytes:
            _, (_, freed) = self._rows.popitem(last=False)
            self.size -= freed
            self._evicted += 1

    def clear(self) -> None:
        """Remove all entries; the counters keep their values."""
        self._rows.clear()
        self.size = 0


def collect_arrays(row: Row) -> list[Array]:
    if not isinstance(row, VectorSet):
        return [row]
    sparse = [] if row.sparse is None else [row.sparse.indices, row.sparse.values]
    return [*(each for each in (row.dense, row.tokens, row.multi) if each is not None), *sparse]


def all_finite(arrays: list[Array]) -> bool:
    """Whether the arrays contain no NaN or infinity. A row that does is a failure and must be computed again."""
    return all(bool(np.isfinite(array).all()) for array in arrays)


def copy_read_only(row: Row) -> Row:
    """Return a read-only copy that shares no memory with the row's batch."""
    if not isinstance(row, VectorSet):
        return _copy_array(row)
    return VectorSet(
        dense=None if row.dense is None else _copy_array(row.dense),
        tokens=None if row.tokens is None else _copy_array(row.tokens),
        sparse=None
        if row.sparse is None
        else SparseVector(_copy_array(row.sparse.indices), _copy_array(row.sparse.values)),
        multi=None if row.multi is None else _copy_array(row.multi),
    )


def entry_size(key: Hashable, arrays: list[Array]) -> int:
    """The size of an entry in bytes."""
    return ENTRY_BYTES + _key_size(key) + sum(ARRAY_BYTES + array.nbytes for array in arrays)


def _copy_array(array: Array) -> Array:
    copy = np.array(array, order="C")
    copy.flags.writeable = False
    return copy


def _key_size(key: Hashable) -> int:
    parts = sum(map(_key_size, key)) if isinstance(key, tuple) else 0
    return sys.getsizeof(key) + parts
