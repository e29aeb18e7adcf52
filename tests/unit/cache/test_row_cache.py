"""The caches of a server: which models have one, where it is stored, and cleanup."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shoal.cache import RowCaches
from shoal.config.settings import Settings
from shoal.core.cache import MemoryCache
from shoal.core.protocols import CountedRow, ModelFacts

FACTS = ModelFacts(source="s", backend="local", tasks=("embed",), space="5pace", revision="r1", precision="bf16")
ROW = CountedRow(np.ones(4, np.float32), 3)


def settings(memory: int = 0, disk: int = 0) -> Settings:
    return Settings(cache_mb=memory, cache_disk_mb=disk)


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_the_default_is_no_cache(tmp_path: Path) -> None:
    """No cache, thread or folder."""
    caches = RowCaches(tmp_path)
    assert caches.open("m", Settings(), FACTS, "f32") is None
    assert caches.counts() == {}
    await caches.aclose()
    assert entries(tmp_path) == []


async def test_memory_only(tmp_path: Path) -> None:
    """The setting bounds its bytes; it is freed with the model."""
    caches = RowCaches(tmp_path)
    cache = caches.open("m", settings(2), FACTS, "f32")
    assert isinstance(cache, MemoryCache)
    assert cache.max_bytes == 2 << 20
    cache.put("k", ROW)
    assert caches.counts()["m"].memory_bytes == cache.size > 0
    caches.close("m")
    caches.close("m")
    assert caches.counts() == {}
    again = caches.open("m", settings(2), FACTS, "f32")
    assert again is not None
    assert again.get("k") is None
    await caches.aclose()
    assert entries(tmp_path) == []


async def test_rows_on_disk_outlive_the_server(tmp_path: Path) -> None:
    """With or without a memory tier; pending rows are written before shutdown, and no thread remains."""
    for memory in (0, 1):
        caches = RowCaches(tmp_path)
        cache = caches.open("org/m", settings(memory, 1), FACTS, "f32")
        assert cache is not None
        cache.put(("k", memory), ROW)
        await caches.aclose()
        assert not [thread for thread in threading.enumerate() if "shoal-rows" in thread.name]
    assert entries(tmp_path / "rows") == ["org~m"]
    caches = RowCaches(tmp_path)
    cache = caches.open("org/m", settings(0, 1), FACTS, "f32")
    assert cache is not None
    assert caches._writer is not None
    caches._writer.submit(lambda: None).result()
    assert cache.get(("k", 0)) is not None
    assert cache.get(("k", 1)) is not None
    assert (caches.counts()["org/m"].hits, caches.counts()["org/m"].disk_bytes > 0) == (2, True)
    await caches.aclose()


@pytest.mark.parametrize(
    ("facts", "precision"),
    [
        (replace(FACTS, space="other"), "f32"),
        (replace(FACTS, revision="r2"), "f32"),
        (replace(FACTS, backend="triton"), "f32"),
        (replace(FACTS, answers="other"), "f32"),
        (FACTS, "bf16"),
    ],
    ids=["weights", "revision", "backend", "answers", "precision"],
)
async def test_rows_of_another_model_are_not_used(tmp_path: Path, facts: ModelFacts, precision: str) -> None:
    """For models with one name: every fact that affects the rows must match."""
    for each, weights, expected in ((FACTS, "f32", None), (facts, precision, None), (FACTS, "f32", ROW.tokens)):
        caches = RowCaches(tmp_path)
        cache = caches.open("m", settings(0, 1), each, weights)
        assert cache is not None
        assert caches._writer is not None
        caches._writer.submit(lambda: None).result()
        row = cache.get("k")
        assert (row.tokens if row is not None else None) == expected
        if each is FACTS and expected is None:
            cache.put("k", ROW)
        await caches.aclose()


async def test_a_remote_model_is_cached_in_memory_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The model behind a server may change: its rows stay in memory only, and the log says so."""
    unknown = ModelFacts(source="s", backend="tei", tasks=("embed",))
    caches = RowCaches(tmp_path)
    assert caches.open("m", settings(0, 1), unknown, "f32") is None
    assert isinstance(caches.open("m", settings(1, 1), unknown, "f32"), MemoryCache)
    assert "does not identify its model" in caplog.text
    scores = ModelFacts(source="s", backend="local", tasks=("rerank", "classify"))
    assert caches.open("m", settings(0, 1), scores, "f32") is None
    assert "it returns scores, and only vectors are cached" in caplog.text
    await caches.aclose()
    assert entries(tmp_path) == []


async def test_a_model_that_wakes_finds_its_files(tmp_path: Path) -> None:
    """It is reopened while the server runs, also if it was not closed."""
    caches = RowCaches(tmp_path)
    for number in range(3):
        cache = caches.open("m", settings(0, 1), FACTS, "f32")
        assert cache is not None
        assert caches._writer is not None
        caches._writer.submit(lambda: None).result()
        assert all(cache.get(("k", earlier)) is not None for earlier in range(number))
        cache.put(("k", number), ROW)
    await caches.aclose()
    assert len(entries(tmp_path / "rows" / "m")) == 1
