"""Rows that were computed before, in memory: bounded by their bytes, the one that was not asked for longest goes first.

Pure: no files, no clock, no loop. What survives a restart lies over this one (`shoal.cache`).
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
"""What an entry takes without its key, and an array without its numbers: tracemalloc says 245 and 110 (CPython 3.11,
numpy 2), to which a table that has just grown adds."""


class MemoryCache:
    """Cache of at most `max_bytes`: arrays, keys and what Python needs around them are counted.

    A row that is larger than all of it, or holds NaN or infinity, is not kept. Every operation takes the same time
    however much is held.
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
        """As Cache.get. What it answers is read-only, and stays what it is when it is evicted."""
        found = self._rows.get(key)
        if found is None:
            self._misses += 1
            return None
        self._hits += 1
        self._rows.move_to_end(key)
        return found[0]

    def put(self, key: Hashable, found: CountedRow) -> None:
        """As Cache.put."""
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
        """Hold nothing; what was counted stays."""
        self._rows.clear()
        self.size = 0


def collect_arrays(row: Row) -> list[Array]:
    if not isinstance(row, VectorSet):
        return [row]
    sparse = [] if row.sparse is None else [row.sparse.indices, row.sparse.values]
    return [*(each for each in (row.dense, row.tokens, row.multi) if each is not None), *sparse]


def all_finite(arrays: list[Array]) -> bool:
    """No NaN and no infinity in them: an answer that holds one is a failure, and is to be tried anew."""
    return all(bool(np.isfinite(array).all()) for array in arrays)


def copy_read_only(row: Row) -> Row:
    """A read-only copy, which shares no memory with the batch that the row came in."""
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
    """Bytes of an entry."""
    return ENTRY_BYTES + _key_size(key) + sum(ARRAY_BYTES + array.nbytes for array in arrays)


def _copy_array(array: Array) -> Array:
    copy = np.array(array, order="C")
    copy.flags.writeable = False
    return copy


def _key_size(key: Hashable) -> int:
    parts = sum(map(_key_size, key)) if isinstance(key, tuple) else 0
    return sys.getsizeof(key) + parts
