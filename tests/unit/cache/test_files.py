"""Rows on disk: persistent, bounded, shared by processes, and never a cause of an error."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.cache import files
from shoal.cache.files import DiskCache
from shoal.cache.records import LARGEST, MAGIC, encode_record
from shoal.core.cache import MemoryCache
from shoal.core.protocols import CountedRow, VectorSet
from shoal.downloads.disk import try_lock

MB = 1 << 20


@pytest.fixture
def writer() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def wait_for_writer(writer: ThreadPoolExecutor) -> None:
    """Wait until the writer has finished all submitted work."""
    writer.submit(lambda: None).result()


Make = Callable[..., DiskCache]


@pytest.fixture
def make(tmp_path: Path, writer: ThreadPoolExecutor) -> Make:
    def create(prefix: Hashable = "model", *, memory: int = 0, max_bytes: int = MB, folder: str = "rows") -> DiskCache:
        cache = DiskCache(tmp_path / folder, prefix, MemoryCache(memory), max_bytes=max_bytes, writer=writer)
        wait_for_writer(writer)
        return cache

    return create


def row(number: float, width: int = 8) -> CountedRow:
    return CountedRow(np.full(width, number, np.float32), int(number))


def read(cache: DiskCache, key: Hashable) -> float | None:
    counted = cache.get(key)
    if counted is None:
        return None
    assert isinstance(counted.row, np.ndarray)
    assert counted.tokens == int(counted.row[0])
    return float(counted.row[0])


def segments(cache: DiskCache) -> list[Path]:
    return sorted(cache.folder.glob("*.rows"))


def test_rows_survive_a_restart(make: Make, writer: ThreadPoolExecutor) -> None:
    """An empty memory tier, in another cache over the same folder; rows are read-only, as from memory."""
    first = make()
    for number in range(100):
        first.put(("k", number), row(number))
    first.put("set", CountedRow(VectorSet(dense=np.ones(2, np.float32)), 5))
    first.close()
    wait_for_writer(writer)
    second = make()
    assert [read(second, ("k", number)) for number in range(100)] == list(range(100))
    row_set = second.get("set")
    assert row_set is not None
    assert isinstance(row_set.row, VectorSet)
    assert read(second, ("k", 100)) is None
    counts = second.counts()
    assert (counts.hits, counts.misses, counts.disk_bytes) == (101, 1, segments(second)[0].stat().st_size)
    other = first.get(("k", 1))
    assert other is None  # the cache has closed its files


def test_the_prefix_is_part_of_every_key(make: Make, writer: ThreadPoolExecutor) -> None:
    """Rows of another revision in the same folder never match."""
    first = make(("model", "rev1", "f32"))
    first.put("k", row(1))
    first.close()
    wait_for_writer(writer)
    assert read(make(("model", "rev1", "bf16")), "k") is None
    assert read(make(("model", "rev1", "f32")), "k") == 1


def test_rows_read_from_disk_enter_memory(make: Make, writer: ThreadPoolExecutor) -> None:
    """The second read uses no file; a row evicted from memory is found on disk."""
    cache = make(memory=1200)
    for number in range(4):
        cache.put(("k", number), row(number))
    wait_for_writer(writer)
    assert cache.memory.counts().evicted == 2
    assert read(cache, ("k", 0)) == 0
    before = cache.memory.counts().hits
    assert read(cache, ("k", 0)) == 0
    assert cache.memory.counts().hits == before + 1
    assert cache.counts().hits == 2


def test_a_row_is_written_once(make: Make, writer: ThreadPoolExecutor) -> None:
    """Also if it is put again before the write."""
    cache = make()
    for _ in range(3):
        cache.put("k", row(1))
    wait_for_writer(writer)
    size = cache.counts().disk_bytes
    cache.put("k", row(1))
    wait_for_writer(writer)
    assert cache.counts().disk_bytes == size == len(MAGIC) + len(encode_record(bytes(16), row(1)))


@pytest.mark.parametrize(
    "found",
    [CountedRow(np.array([1, np.nan], np.float32), 1), CountedRow(np.zeros(LARGEST // 4 + 1, np.float32), 1)],
    ids=["NaN", "too large"],
)
def test_rows_that_are_not_written(make: Make, writer: ThreadPoolExecutor, found: CountedRow) -> None:
    """Errors, and rows that would block the loop too long on a read."""
    cache = make(memory=1)
    cache.put("k", found)
    wait_for_writer(writer)
    assert (cache.counts().disk_bytes, cache.get("k")) == (0, None)


def test_a_key_without_a_stable_form_stays_in_memory(make: Make, writer: ThreadPoolExecutor) -> None:
    cache = make(memory=MB)
    cache.put(("k", 1.5), row(1))
    wait_for_writer(writer)
    assert read(cache, ("k", 1.5)) == 1
    cache.put("other", row(2))
    wait_for_writer(writer)
    assert cache.get(("k", 2.5)) is None


def test_bytes_are_bounded_by_deleting_the_oldest(make: Make, writer: ThreadPoolExecutor) -> None:
    """The size stays near the limit; the newest rows are kept and correct."""
    cache = make(max_bytes=MB)
    for number in range(4000):
        cache.put(("k", number), row(number, 250))
        if number % 100 == 0:
            wait_for_writer(writer)
            assert sum(path.stat().st_size for path in segments(cache)) <= MB + 2000
    wait_for_writer(writer)
    rows = [read(cache, ("k", number)) for number in range(4000)]
    assert rows[0] is None
    assert rows[-1] == 3999
    assert all(each in (None, number) for number, each in enumerate(rows))
    present = [each is not None for each in rows]
    assert present == sorted(present), "the newest ones"
    assert MB * 0.7 < cache.counts().disk_bytes <= MB + 2000
    assert len(cache._index) == sum(present)


def test_a_restart_continues_the_last_segment(make: Make, writer: ThreadPoolExecutor) -> None:
    """Restarts do not add files."""
    for number in range(20):
        cache = make()
        cache.put(("k", number), row(number))
        cache.close()
        wait_for_writer(writer)
    assert len(segments(cache)) == 1
    assert [read(make(), ("k", number)) for number in range(20)] == list(range(20))


def write_segment(make: Make, writer: ThreadPoolExecutor, count: int = 10) -> Path:
    """Return a closed segment with `count` rows."""
    cache = make()
    for number in range(count):
        cache.put(("k", number), row(number))
    cache.close()
    wait_for_writer(writer)
    (path,) = segments(cache)
    return path


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_truncated_file_keeps_its_complete_records(make: Make, writer: ThreadPoolExecutor, cut: int) -> None:
    """As after a crash: complete records are kept, and later rows are appended after them."""
    path = write_segment(make, writer)
    os.truncate(path, path.stat().st_size - cut)
    cache = make()
    rows = [read(cache, ("k", number)) for number in range(10)]
    assert rows[0] == 0
    assert rows[9] is None
    cache.put("new", row(42))
    cache.close()
    wait_for_writer(writer)
    again = make()
    assert read(again, "new") == 42
    assert [read(again, ("k", number)) for number in range(10)] == rows


def test_only_the_changed_record_is_dropped(make: Make, writer: ThreadPoolExecutor) -> None:
    """It is a miss, is counted, and may be written again; other records stay valid."""
    path = write_segment(make, writer)
    content = bytearray(path.read_bytes())
    size = (len(content) - len(MAGIC)) // 10
    content[len(MAGIC) + 4 * size + size - 3] ^= 1
    path.write_bytes(content)
    cache = make()
    assert [read(cache, ("k", number)) for number in (3, 4, 5)] == [3, None, 5]
    assert cache.broken_records == 1
    cache.put(("k", 4), row(4))
    wait_for_writer(writer)
    assert read(cache, ("k", 4)) == 4


@pytest.mark.parametrize("content", [b"", MAGIC[:3]])
def test_a_half_created_file_becomes_a_segment(make: Make, writer: ThreadPoolExecutor, content: bytes) -> None:
    """As after a crash during its creation."""
    folder = make().folder
    (folder / "00000000000000000001-1.rows").write_bytes(content)
    cache = make()
    cache.put("k", row(1))
    cache.close()
    wait_for_writer(writer)
    assert read(make(), "k") == 1
    assert len(segments(cache)) == 1


FOREIGN_FILE = b"MZ" + b"\0" * 4000


@pytest.mark.parametrize("kind", ["file", "link", "folder", "pipe"])
def test_other_files_are_untouched(
    make: Make, writer: ThreadPoolExecutor, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Under any name they are not written, deleted or awaited; rows are cached in other files."""
    folder = make().folder
    path, victim = folder / "00000000000000000001-1.rows", tmp_path / "victim"
    victim.write_bytes(FOREIGN_FILE)
    if kind == "file":
        path.write_bytes(FOREIGN_FILE)
    elif kind == "link":
        path.symlink_to(victim)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    cache = make(max_bytes=1)
    for number in range(5000):
        cache.put(("k", number), row(number))
        wait_for_writer(writer)
    assert read(cache, ("k", 4999)) == 4999
    cache.close()
    wait_for_writer(writer)
    assert not caplog.records
    assert path.exists()
    assert victim.read_bytes() == FOREIGN_FILE
    assert kind != "file" or path.read_bytes() == FOREIGN_FILE


def test_a_file_truncated_or_deleted_while_open_is_a_miss(make: Make, writer: ThreadPoolExecutor) -> None:
    """It is a miss, whereas a mapped file would crash the process."""
    cache = make()
    for number in range(10):
        cache.put(("k", number), row(number))
    wait_for_writer(writer)
    (path,) = segments(cache)
    os.truncate(path, 100)
    assert [read(cache, ("k", number)) for number in range(10)][1:] == [None] * 9
    path.unlink()
    assert read(cache, ("k", 0)) == 0


def test_two_caches_share_a_folder(tmp_path: Path) -> None:
    """Each writes its own file and never deletes the file that the other writes; together they stay within bounds,
    except for the file that each has open.
    """
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        caches = [DiskCache(tmp_path, "model", MemoryCache(0), max_bytes=MB, writer=writer) for writer in (one, two)]
        for number in range(3000):
            caches[number % 2].put(("k", number), row(number, 250))
            if number % 50 == 0:
                wait_for_writer(one)
                wait_for_writer(two)
                assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= MB + 2 * (MB // 8) + 4000
        wait_for_writer(one)
        wait_for_writer(two)
        for at, cache in enumerate(caches):
            assert read(cache, ("k", 2998 + at)) == 2998 + at
            rows = [(number, read(cache, ("k", number))) for number in range(at, 3000, 2)]
            assert all(each in (None, number) for number, each in rows)
            assert any(each is not None for _, each in rows)


def test_processes_share_a_folder(tmp_path: Path) -> None:
    """Concurrent processes delete each other's finished files; every hit of a third one is correct."""
    program = textwrap.dedent("""
        import sys
        from concurrent.futures import ThreadPoolExecutor
        from pathlib import Path
        import numpy as np
        from shoal.core.cache import MemoryCache
        from shoal.core.protocols import CountedRow
        from shoal.cache.files import DiskCache

        folder, start = Path(sys.argv[1]), int(sys.argv[2])
        with ThreadPoolExecutor(1) as writer:
            cache = DiskCache(folder, "model", MemoryCache(0), max_bytes=1 << 20, writer=writer)
            for number in range(start, start + 3000):
                cache.put(("k", number), CountedRow(np.full(250, number, np.float32), number))
                if number % 200 == 0:
                    writer.submit(lambda: None).result()
            writer.submit(lambda: None).result()
            assert cache.get(("k", start + 2999)).tokens == start + 2999
            assert not cache._failed
            cache.close()
    """)
    running = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", program, str(tmp_path), str(start)])
        for start in (0, 1500, 10_000)
    ]
    assert [process.wait(timeout=50) for process in running] == [0, 0, 0]
    with ThreadPoolExecutor(1) as writer:
        cache = DiskCache(tmp_path, "model", MemoryCache(0), max_bytes=MB, writer=writer)
        wait_for_writer(writer)
        rows = {number: read(cache, ("k", number)) for number in (*range(4500), *range(10_000, 13_000))}
        hits = {number: each for number, each in rows.items() if each is not None}
        assert len(hits) > 300
        assert all(number == each for number, each in hits.items())
        assert cache.broken_records == 0


def test_a_segment_of_another_process_is_read_only(make: Make, writer: ThreadPoolExecutor) -> None:
    """It is read, but neither written nor deleted."""
    path = write_segment(make, writer)
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cache = make(max_bytes=1)
        assert read(cache, ("k", 3)) == 3
        for number in range(3000):
            cache.put(("n", number), row(number, 250))
        wait_for_writer(writer)
        assert path in segments(cache)
        assert len(segments(cache)) <= 3
    cache.close()


@pytest.mark.parametrize("deleted", [False, True])
def test_a_new_segment_that_another_process_takes_for_an_old_one(
    make: Make, writer: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    """Another process may lock, and delete, a file between its creation and its lock: another one is made."""
    cache, taken = make(), list[Path]()

    def lock(fd: int) -> bool:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if not taken:
            taken.append(path)
            if not deleted:
                return False
            path.unlink()
        return try_lock(fd)

    monkeypatch.setattr(files, "try_lock", lock)
    cache.put("k", row(1))
    wait_for_writer(writer)
    assert read(cache, "k") == 1
    assert [path for path in segments(cache) if path.stat().st_size] != taken
    cache.close()
    assert read(make(), "k") == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_disk_errors_stop_the_writer(
    make: Make,
    writer: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    """One log line; existing rows stay readable, and puts become free."""
    cache = make()
    cache.put("before", row(1))
    wait_for_writer(writer)

    def full(fd: int, data: Any) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        cache.put("lost", row(2))
        wait_for_writer(writer)
    with caplog.at_level(logging.WARNING):
        cache.put("later", row(3))
    wait_for_writer(writer)
    assert (read(cache, "before"), read(cache, "lost"), read(cache, "later")) == (1, None, None)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"rows are no longer cached in {cache.folder}: {os.strerror(code)}"]


def test_a_folder_that_cannot_be_created(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The model runs without rows on disk."""
    (tmp_path / "file").write_text("")
    cache = make(folder="file/rows", memory=MB)
    cache.put("k", row(1))
    assert read(cache, "k") == 1
    assert "rows are no longer cached" in caplog.text


def test_a_bug_stops_the_writer_and_is_logged(
    make: Make, writer: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> bytes:
        raise ZeroDivisionError

    cache = make()
    monkeypatch.setattr(files, "encode_record", broken)
    cache.put("k", row(1))
    wait_for_writer(writer)
    assert "ZeroDivisionError" in caplog.text
    cache.put("k", row(1))
    wait_for_writer(writer)
    assert read(cache, "k") is None


class Slow(ThreadPoolExecutor):
    """An executor that runs nothing before `go`."""

    def __init__(self) -> None:
        super().__init__(1)
        self.calls: list[Any] = []

    def submit(self, call: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls.append(lambda: call(*args))
        return Future()

    def go(self) -> None:
        while self.calls:
            self.calls.pop(0)()


def test_a_slow_writer_has_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows beyond the bound are dropped; once the writer has caught up, rows are written again. Before the files are
    scanned, a lookup misses and does not wait.
    """
    monkeypatch.setattr(files, "MOST_WAITING", 100 * 32)
    writer = Slow()
    cache = DiskCache(tmp_path, "model", MemoryCache(0), max_bytes=MB, writer=writer)
    for number in range(1000):
        cache.put(("k", number), row(number))
    assert cache.get(("k", 0)) is None
    assert len(cache._pending) == 100
    assert len(writer.calls) == 2
    writer.go()
    assert [read(cache, ("k", number)) for number in (0, 99, 100)] == [0, 99, None]
    cache.put(("k", 100), row(100))
    writer.go()
    assert read(cache, ("k", 100)) == 100
    cache.put("last", row(7))
    cache.close()
    cache.close()
    cache.put("too late", row(8))
    writer.go()
    assert not cache._pending
    writer.shutdown()
    with ThreadPoolExecutor(1) as fresh:
        again = DiskCache(tmp_path, "model", MemoryCache(0), max_bytes=MB, writer=fresh)
        wait_for_writer(fresh)
        assert (read(again, "last"), read(again, "too late")) == (7, None)


def test_closing_stops_the_scan(make: Make, writer: ThreadPoolExecutor) -> None:
    """It stops the scan of its files."""
    folder = write_segment(make, writer).parent
    slow = Slow()
    cache = DiskCache(folder, "model", MemoryCache(0), max_bytes=MB, writer=slow)
    cache.close()
    slow.go()
    slow.shutdown()
    assert cache._segments == {}


def test_file_descriptors_are_closed(make: Make, writer: ThreadPoolExecutor) -> None:
    """Those of deleted segments at once, all of them on close."""
    before = len(os.listdir("/proc/self/fd"))
    cache = make()
    for number in range(3000):
        cache.put(("k", number), row(number, 250))
    wait_for_writer(writer)
    assert len(os.listdir("/proc/self/fd")) - before == len(segments(cache)) <= 9
    cache.close()
    wait_for_writer(writer)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_the_loop_never_blocks(make: Make, writer: ThreadPoolExecutor) -> None:
    """Put and get on an event loop, with a guard that fails on blocking calls."""
    cache = make()
    cache.put("k", row(1))
    wait_for_writer(writer)
    assert read(cache, "k") == 1
    cache.close()
