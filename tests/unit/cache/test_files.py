"""Rows on disk: there after a restart, bounded, shared by processes, and never a reason for an error."""

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

MB = 1 << 20


@pytest.fixture
def writer() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def settled(writer: ThreadPoolExecutor) -> None:
    """Everything that was given to the writer until now is done."""
    writer.submit(lambda: None).result()


Make = Callable[..., DiskCache]


@pytest.fixture
def make(tmp_path: Path, writer: ThreadPoolExecutor) -> Make:
    def made(prefix: Hashable = "model", *, memory: int = 0, max_bytes: int = MB, folder: str = "rows") -> DiskCache:
        cache = DiskCache(tmp_path / folder, prefix, MemoryCache(memory), max_bytes=max_bytes, writer=writer)
        settled(writer)
        return cache

    return made


def row(number: float, width: int = 8) -> CountedRow:
    return CountedRow(np.full(width, number, np.float32), int(number))


def read(cache: DiskCache, key: Hashable) -> float | None:
    found = cache.get(key)
    if found is None:
        return None
    assert isinstance(found.row, np.ndarray)
    assert found.tokens == int(found.row[0])
    return float(found.row[0])


def segments(cache: DiskCache) -> list[Path]:
    return sorted(cache.folder.glob("*.rows"))


def test_rows_are_there_after_a_restart(make: Make, writer: ThreadPoolExecutor) -> None:
    """With an empty memory, in another cache over the same folder; read-only, as from memory."""
    first = make()
    for number in range(100):
        first.put(("k", number), row(number))
    first.put("set", CountedRow(VectorSet(dense=np.ones(2, np.float32)), 5))
    first.close()
    settled(writer)
    second = make()
    assert [read(second, ("k", number)) for number in range(100)] == list(range(100))
    found = second.get("set")
    assert found is not None
    assert isinstance(found.row, VectorSet)
    assert read(second, ("k", 100)) is None
    counts = second.counts()
    assert (counts.hits, counts.misses, counts.disk_bytes) == (101, 1, segments(second)[0].stat().st_size)
    other = first.get(("k", 1))
    assert other is None  # it has let go of its files


def test_the_prefix_is_part_of_every_key(make: Make, writer: ThreadPoolExecutor) -> None:
    """Another revision's rows in the same folder are nobody's hits."""
    first = make(("model", "rev1", "f32"))
    first.put("k", row(1))
    first.close()
    settled(writer)
    assert read(make(("model", "rev1", "bf16")), "k") is None
    assert read(make(("model", "rev1", "f32")), "k") == 1


def test_what_is_read_from_disk_goes_up_to_memory(make: Make, writer: ThreadPoolExecutor) -> None:
    """The second time no file is asked; a row in memory that was evicted there is found below."""
    cache = make(memory=1200)
    for number in range(4):
        cache.put(("k", number), row(number))
    settled(writer)
    assert cache.memory.counts().evicted == 2
    assert read(cache, ("k", 0)) == 0
    before = cache.memory.counts().hits
    assert read(cache, ("k", 0)) == 0
    assert cache.memory.counts().hits == before + 1
    assert cache.counts().hits == 2


def test_a_row_is_written_once(make: Make, writer: ThreadPoolExecutor) -> None:
    """Also when it is put again before the writer came to it."""
    cache = make()
    for _ in range(3):
        cache.put("k", row(1))
    settled(writer)
    size = cache.counts().disk_bytes
    cache.put("k", row(1))
    settled(writer)
    assert cache.counts().disk_bytes == size == len(MAGIC) + len(encode_record(bytes(16), row(1)))


@pytest.mark.parametrize(
    "found",
    [CountedRow(np.array([1, np.nan], np.float32), 1), CountedRow(np.zeros(LARGEST // 4 + 1, np.float32), 1)],
    ids=["NaN", "too large"],
)
def test_what_is_not_written(make: Make, writer: ThreadPoolExecutor, found: CountedRow) -> None:
    """An answer that is none, and one that would take the loop too long to read."""
    cache = make(memory=1)
    cache.put("k", found)
    settled(writer)
    assert (cache.counts().disk_bytes, cache.get("k")) == (0, None)


def test_a_key_without_a_stable_form_is_the_memory_s_alone(make: Make, writer: ThreadPoolExecutor) -> None:
    cache = make(memory=MB)
    cache.put(("k", 1.5), row(1))
    settled(writer)
    assert read(cache, ("k", 1.5)) == 1
    cache.put("other", row(2))
    settled(writer)
    assert cache.get(("k", 2.5)) is None


def test_its_bytes_are_bounded_by_throwing_the_oldest_away(make: Make, writer: ThreadPoolExecutor) -> None:
    """Never much more than was allowed; what is newest is there, and what is there is right."""
    cache = make(max_bytes=MB)
    for number in range(4000):
        cache.put(("k", number), row(number, 250))
        if number % 100 == 0:
            settled(writer)
            assert sum(path.stat().st_size for path in segments(cache)) <= MB + 2000
    settled(writer)
    found = [read(cache, ("k", number)) for number in range(4000)]
    assert found[0] is None
    assert found[-1] == 3999
    assert all(each in (None, number) for number, each in enumerate(found))
    present = [each is not None for each in found]
    assert present == sorted(present), "the newest ones"
    assert MB * 0.7 < cache.counts().disk_bytes <= MB + 2000
    assert len(cache._index) == sum(present)


def test_it_goes_on_where_it_was(make: Make, writer: ThreadPoolExecutor) -> None:
    """Many restarts make no many files."""
    for number in range(20):
        cache = make()
        cache.put(("k", number), row(number))
        cache.close()
        settled(writer)
    assert len(segments(cache)) == 1
    assert [read(make(), ("k", number)) for number in range(20)] == list(range(20))


def written(make: Make, writer: ThreadPoolExecutor, count: int = 10) -> Path:
    """A segment of `count` rows, and nobody who has it open."""
    cache = make()
    for number in range(count):
        cache.put(("k", number), row(number))
    cache.close()
    settled(writer)
    (path,) = segments(cache)
    return path


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_file_that_was_cut_off(make: Make, writer: ThreadPoolExecutor, cut: int) -> None:
    """As after a crash: what is whole is kept, and what is written later is found behind it."""
    path = written(make, writer)
    os.truncate(path, path.stat().st_size - cut)
    cache = make()
    found = [read(cache, ("k", number)) for number in range(10)]
    assert found[0] == 0
    assert found[9] is None
    cache.put("new", row(42))
    cache.close()
    settled(writer)
    again = make()
    assert read(again, "new") == 42
    assert [read(again, ("k", number)) for number in range(10)] == found


def test_a_changed_record_is_thrown_away_alone(make: Make, writer: ThreadPoolExecutor) -> None:
    """It is a miss, is counted, and may be written anew; its neighbours are there."""
    path = written(make, writer)
    content = bytearray(path.read_bytes())
    size = (len(content) - len(MAGIC)) // 10
    content[len(MAGIC) + 4 * size + size - 3] ^= 1
    path.write_bytes(content)
    cache = make()
    assert [read(cache, ("k", number)) for number in (3, 4, 5)] == [3, None, 5]
    assert cache.broken_records == 1
    cache.put(("k", 4), row(4))
    settled(writer)
    assert read(cache, ("k", 4)) == 4


@pytest.mark.parametrize("content", [b"", MAGIC[:3]])
def test_a_file_that_was_only_begun(make: Make, writer: ThreadPoolExecutor, content: bytes) -> None:
    """As after a crash: it is made a segment."""
    folder = make().folder
    (folder / "00000000000000000001-1.rows").write_bytes(content)
    cache = make()
    cache.put("k", row(1))
    cache.close()
    settled(writer)
    assert read(make(), "k") == 1
    assert len(segments(cache)) == 1


PRECIOUS = b"MZ" + b"\0" * 4000


@pytest.mark.parametrize("kind", ["file", "link", "folder", "pipe"])
def test_what_is_no_segment_is_left_alone(
    make: Make, writer: ThreadPoolExecutor, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it is called: neither written, nor thrown away, nor waited for; rows are cached beside it."""
    folder = make().folder
    path, victim = folder / "00000000000000000001-1.rows", tmp_path / "victim"
    victim.write_bytes(PRECIOUS)
    if kind == "file":
        path.write_bytes(PRECIOUS)
    elif kind == "link":
        path.symlink_to(victim)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    cache = make(max_bytes=1)
    for number in range(5000):
        cache.put(("k", number), row(number))
        settled(writer)
    assert read(cache, ("k", 4999)) == 4999
    cache.close()
    settled(writer)
    assert not caplog.records
    assert path.exists()
    assert victim.read_bytes() == PRECIOUS
    assert kind != "file" or path.read_bytes() == PRECIOUS


def test_a_file_that_shrinks_or_goes_while_it_is_open(make: Make, writer: ThreadPoolExecutor) -> None:
    """Whoever does that: a miss, where a mapped file would end the process."""
    cache = make()
    for number in range(10):
        cache.put(("k", number), row(number))
    settled(writer)
    (path,) = segments(cache)
    os.truncate(path, 100)
    assert [read(cache, ("k", number)) for number in range(10)][1:] == [None] * 9
    path.unlink()
    assert read(cache, ("k", 0)) == 0


def test_two_in_one_folder(tmp_path: Path) -> None:
    """Each writes a file of its own and throws away none that the other writes; together they stay within bounds,
    but for the file that each has open."""
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        caches = [DiskCache(tmp_path, "model", MemoryCache(0), max_bytes=MB, writer=writer) for writer in (one, two)]
        for number in range(3000):
            caches[number % 2].put(("k", number), row(number, 250))
            if number % 50 == 0:
                settled(one)
                settled(two)
                assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= MB + 2 * (MB // 8) + 4000
        settled(one)
        settled(two)
        for at, cache in enumerate(caches):
            assert read(cache, ("k", 2998 + at)) == 2998 + at
            found = [(number, read(cache, ("k", number))) for number in range(at, 3000, 2)]
            assert all(each in (None, number) for number, each in found)
            assert any(each is not None for _, each in found)


def test_processes_in_one_folder(tmp_path: Path) -> None:
    """Real ones, side by side, that throw away each other's finished files; every hit of a third one is right."""
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
        settled(writer)
        found = {number: read(cache, ("k", number)) for number in (*range(4500), *range(10_000, 13_000))}
        hits = {number: each for number, each in found.items() if each is not None}
        assert len(hits) > 300
        assert all(number == each for number, each in hits.items())
        assert cache.broken_records == 0


def test_a_segment_that_another_process_writes_is_left_to_it(make: Make, writer: ThreadPoolExecutor) -> None:
    """It is read, but neither written nor thrown away."""
    path = written(make, writer)
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cache = make(max_bytes=1)
        assert read(cache, ("k", 3)) == 3
        for number in range(3000):
            cache.put(("n", number), row(number, 250))
        settled(writer)
        assert path in segments(cache)
        assert len(segments(cache)) <= 3
    cache.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_disk_errors_stop_the_writer(
    make: Make,
    writer: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    """One line in the log; what is there is read on, and puts cost nothing any more."""
    cache = make()
    cache.put("before", row(1))
    settled(writer)

    def full(fd: int, data: Any) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        cache.put("lost", row(2))
        settled(writer)
    with caplog.at_level(logging.WARNING):
        cache.put("later", row(3))
    settled(writer)
    assert (read(cache, "before"), read(cache, "lost"), read(cache, "later")) == (1, None, None)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"rows are no longer cached in {cache.folder}: {os.strerror(code)}"]


def test_a_folder_that_cannot_be_made(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The model runs; nothing is kept on disk."""
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
    settled(writer)
    assert "ZeroDivisionError" in caplog.text
    cache.put("k", row(1))
    settled(writer)
    assert read(cache, "k") is None


class Slow(ThreadPoolExecutor):
    """Nothing that is submitted runs before `go`."""

    def __init__(self) -> None:
        super().__init__(1)
        self.calls: list[Any] = []

    def submit(self, call: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls.append(lambda: call(*args))
        return Future()

    def go(self) -> None:
        while self.calls:
            self.calls.pop(0)()


def test_a_writer_that_does_not_keep_up_fills_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows beyond the bound are not written; once it has caught up, they are again. Before the files were read, a
    look into them finds nothing, and does not wait."""
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
        settled(fresh)
        assert (read(again, "last"), read(again, "too late")) == (7, None)


def test_one_that_is_closed_before_it_was_read(make: Make, writer: ThreadPoolExecutor) -> None:
    """It does not read all of it for nobody."""
    folder = written(make, writer).parent
    slow = Slow()
    cache = DiskCache(folder, "model", MemoryCache(0), max_bytes=MB, writer=slow)
    cache.close()
    slow.go()
    slow.shutdown()
    assert cache._segments == {}


def test_descriptors_are_given_back(make: Make, writer: ThreadPoolExecutor) -> None:
    """Of thrown away segments at once, of all of them when it is closed."""
    before = len(os.listdir("/proc/self/fd"))
    cache = make()
    for number in range(3000):
        cache.put(("k", number), row(number, 250))
    settled(writer)
    assert len(os.listdir("/proc/self/fd")) - before == len(segments(cache)) <= 9
    cache.close()
    settled(writer)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_the_loop_never_waits_for_it(make: Make, writer: ThreadPoolExecutor) -> None:
    """Put and get on an event loop, under a guard that fails whatever blocks there."""
    cache = make()
    cache.put("k", row(1))
    settled(writer)
    assert read(cache, "k") == 1
    cache.close()
