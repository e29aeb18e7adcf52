"""The in-memory cache of rows: what it stores, evicts and rejects."""

from __future__ import annotations

import gc
import tracemalloc
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.cache import MemoryCache, collect_arrays, entry_size
from shoal.core.protocols import CacheCounts, CountedRow, Row, VectorSet
from shoal.types import Array, SparseVector
from tests.work import count_lines


def row(*numbers: float) -> Array:
    return np.array(numbers, dtype=np.float32)


def every_kind() -> VectorSet:
    return VectorSet(
        dense=row(1, 2),
        tokens=row(1, 2, 3, 4).reshape(2, 2),
        sparse=SparseVector(np.array([3, 7], dtype=np.int32), row(0.5, 0.25)),
        multi=row(5, 6).reshape(1, 2),
    )


def one_entry(numbers: int = 4) -> int:
    return entry_size(("k", 0), [np.zeros(numbers, np.float32)])


def test_stored_rows_come_back() -> None:
    """Row and tokens are returned for an equal key that is another object."""
    cache = MemoryCache(10_000)
    cache.put((b"ids", 0, (None, True)), CountedRow(row(1, 2), 7))
    found = cache.get((b"ids", 0, (None, True)))
    assert found is not None
    assert (found.row.tolist(), found.tokens) == ([1.0, 2.0], 7)  # type: ignore[union-attr]
    assert cache.get((b"ids", 1, (None, True))) is None


def test_it_keeps_copies_that_nobody_can_change() -> None:
    """A row is often a view of a whole batch: the cache must neither share its memory nor keep the batch alive."""
    cache = MemoryCache(10_000)
    batch = np.arange(8, dtype=np.float32).reshape(2, 4)
    cache.put("k", CountedRow(batch[1], 1))
    batch[:] = 0
    found = cache.get("k")
    assert found is not None
    assert isinstance(found.row, np.ndarray)
    assert found.row.tolist() == [4.0, 5.0, 6.0, 7.0]
    assert found.row.base is None
    with pytest.raises(ValueError, match="read-only"):
        found.row[0] = 1


def test_every_kind_of_vector_is_stored() -> None:
    """All arrays of an input come back bit for bit, and read-only."""
    cache = MemoryCache(10_000)
    cache.put("k", CountedRow(every_kind(), 3))
    found = cache.get("k")
    assert found is not None
    assert isinstance(found.row, VectorSet)
    cached, expected = collect_arrays(found.row), collect_arrays(every_kind())
    assert len(cached) == len(expected) == 5
    for one, other in zip(cached, expected, strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
        assert not one.flags.writeable


def test_missing_kinds_stay_none() -> None:
    """None is not an empty array."""
    cache = MemoryCache(10_000)
    cache.put("k", CountedRow(VectorSet(dense=row(1)), 1))
    found = cache.get("k")
    assert found is not None
    assert isinstance(found.row, VectorSet)
    assert (found.row.tokens, found.row.sparse, found.row.multi) == (None, None, None)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_with_nan_are_not_stored(bad: float) -> None:
    """A row with NaN in any of its arrays is not stored; an earlier row under that key stays."""
    cache = MemoryCache(10_000)
    cache.put("k", CountedRow(row(1), 1))
    cache.put("k", CountedRow(row(1, bad), 1))
    cache.put("s", CountedRow(VectorSet(dense=row(1), multi=row(1, bad).reshape(1, 2)), 1))
    found = cache.get("k")
    assert found is not None
    assert isinstance(found.row, np.ndarray)
    assert found.row.tolist() == [1.0]
    assert cache.get("s") is None


def test_the_least_recently_used_is_evicted() -> None:
    """The least recently used row is evicted first; reads and writes count as use."""
    cache = MemoryCache(3 * one_entry())
    for name in "abc":
        cache.put((name, 0), CountedRow(row(0, 0, 0, 0), 1))
    cache.get(("a", 0))
    cache.put(("b", 0), CountedRow(row(1, 1, 1, 1), 1))
    cache.put(("d", 0), CountedRow(row(0, 0, 0, 0), 1))
    assert [name for name in "abcd" if cache.get((name, 0)) is not None] == ["a", "b", "d"]
    assert cache.counts() == CacheCounts(hits=4, misses=1, evicted=1, memory_bytes=3 * one_entry())


def test_rows_larger_than_the_cache_are_not_stored() -> None:
    """A row larger than the cache is not stored and evicts nothing."""
    cache = MemoryCache(2 * one_entry())
    cache.put(("a", 0), CountedRow(row(0, 0, 0, 0), 1))
    cache.put(("b", 0), CountedRow(np.zeros(10_000, np.float32), 1))
    assert cache.get(("a", 0)) is not None
    assert cache.get(("b", 0)) is None
    assert cache.counts().evicted == 0
    nothing = MemoryCache(0)
    nothing.put("a", CountedRow(row(1), 1))
    assert (nothing.get("a"), len(nothing), nothing.size) == (None, 0, 0)


def test_what_is_evicted_stays_what_it_is() -> None:
    """A reader may keep using an evicted row."""
    cache = MemoryCache(one_entry())
    cache.put(("a", 0), CountedRow(row(1, 2, 3, 4), 1))
    found = cache.get(("a", 0))
    cache.put(("b", 0), CountedRow(row(0, 0, 0, 0), 1))
    assert found is not None
    assert found.row.tolist() == [1.0, 2.0, 3.0, 4.0]  # type: ignore[union-attr]


def test_cleared_it_holds_nothing() -> None:
    cache = MemoryCache(10_000)
    cache.put("a", CountedRow(row(1), 1))
    cache.clear()
    assert (len(cache), cache.size, cache.get("a")) == (0, 0, None)


Step = tuple[str, int, int]


@given(
    steps=st.lists(st.tuples(st.sampled_from(["get", "put"]), st.integers(0, 9), st.integers(1, 40)), max_size=80),
    entries=st.integers(0, 5),
)
def test_it_is_the_plain_model_of_an_lru(steps: list[Step], entries: int) -> None:
    """The cache has the same hits, bytes and counts as an ordered dictionary that is trimmed from its front."""
    limit = entries * one_entry(20)
    cache, model = MemoryCache(limit), OrderedDict[Any, tuple[int, int]]()
    hits = misses = evicted = 0
    for action, name, width in steps:
        key = ("k", name)
        if action == "get":
            found = cache.get(key)
            assert (found is not None) == (key in model)
            hits, misses = hits + (found is not None), misses + (found is None)
            if found is not None:
                assert len(found.row) == model[key][0]  # type: ignore[arg-type]
                model.move_to_end(key)
            continue
        size = entry_size(key, [np.zeros(width, np.float32)])
        cache.put(key, CountedRow(np.zeros(width, np.float32), 1))
        if size <= limit:
            model.pop(key, None)
            model[key] = (width, size)
            while sum(each for _, each in model.values()) > limit:
                model.popitem(last=False)
                evicted += 1
        assert cache.size == sum(each for _, each in model.values()) <= limit
        assert len(cache) == len(model)
    assert cache.counts() == CacheCounts(hits, misses, evicted, memory_bytes=cache.size)


@pytest.mark.parametrize("make", [lambda: np.zeros(384, np.float32), every_kind], ids=["dense", "every kind"])
def test_bytes_are_what_python_really_takes(make: Any) -> None:
    """The byte count is at least what is allocated, and at most half above it."""
    cache = MemoryCache(1 << 30)
    rows: list[Row] = [make() for _ in range(4000)]
    keys = [((np.arange(20, dtype=np.int64) + each).tobytes(), each, (None, True)) for each in range(4000)]
    gc.collect()
    tracemalloc.start()
    try:
        for key, each in zip(keys, rows, strict=True):
            cache.put((bytes(bytearray(key[0])), *key[1:]), CountedRow(each, 1))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= cache.size <= 1.5 * taken


def test_its_size_makes_it_no_slower() -> None:
    """A put into a full cache of 50,000 takes as many steps as into one of 500."""

    def lines(entries: int) -> int:
        cache = MemoryCache(entries * one_entry())
        found = CountedRow(row(0, 0, 0, 0), 1)
        for each in range(entries):
            cache.put(("k", each), found)

        def turn_over() -> None:
            for each in range(entries, entries + 100):
                cache.put(("k", each), found)
                cache.get(("k", each - 5))

        return count_lines(turn_over)

    assert lines(50_000) == lines(500)
