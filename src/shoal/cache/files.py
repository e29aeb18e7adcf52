"""A disk cache of computed rows, below the memory cache, that survives restarts.

    <folder>/<nanoseconds>-<process>.rows     a segment of records, in the format of `shoal.cache.records`

Segments are append-only. The one process that holds a file's lock writes it, in a thread; the event loop reads a record
with one `pread` at a known offset. diskcache and other SQLite libraries lock and commit on every call, and LMDB and the
like share one writer between processes: with both, a reader on the loop would wait for another's disk I/O.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from hashlib import blake2b
from pathlib import Path

from shoal.cache.records import DIGEST_BYTES, LARGEST, MAGIC, decode_record, encode_record, key_bytes, read_records
from shoal.core.cache import MemoryCache, all_finite, collect_arrays, copy_read_only
from shoal.core.protocols import CacheCounts, CountedRow
from shoal.downloads.disk import try_lock

SUFFIX = ".rows"
MOST_WAITING = 64 << 20
"""Maximum bytes queued for the writer; further rows are not written, so that a slow disk cannot fill the memory."""
SEGMENTS = 8
SMALLEST_SEGMENT = 1 << 16
"""A cache evicts whole segments: an eighth of its size each, but at least this many bytes."""

_NO_SEGMENT = frozenset({errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO})
"""Errors of opening a missing file, a link, a folder or a socket."""

_log = logging.getLogger("shoal")


class _Segment:
    """A file of records. Its descriptor closes with the last reference, so that no reader uses a number that has been
    reused for another file."""

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self.path = path
        self.fd = fd
        self.size = size
        self.digests: list[bytes] = []

    def __del__(self) -> None:
        os.close(self.fd)


class DiskCache:
    """A cache that backs `memory` with about `max_bytes` of files in `folder`; rows found on disk are copied to
    `memory`.

    `prefix` holds what a row depends on besides its key: model, revision, precision. `writer` opens, writes and deletes
    files, one call at a time; until it has read the existing files, `get` does not find their rows. Eviction removes
    the oldest segment, except those that another process writes. Several processes may share a folder, and each sees
    the others' rows that existed when it started. A record with a wrong checksum counts as missing. Disk errors are
    logged once and stop further writes; they never fail a request. Each row on disk takes about 170 bytes of memory.
    """

    def __init__(
        self, folder: Path, prefix: Hashable, memory: MemoryCache, *, max_bytes: int, writer: Executor
    ) -> None:
        self.folder = folder
        self.memory = memory
        self.max_bytes = max_bytes
        self.broken_records = 0
        self._prefix = blake2b(key_bytes(prefix), digest_size=DIGEST_BYTES).digest()
        self._segment_bytes = max(max_bytes // SEGMENTS, SMALLEST_SEGMENT)
        self._writer = writer
        self._segments: dict[int, _Segment] = {}
        self._index: dict[bytes, int] = {}
        self._pending: deque[tuple[bytes, CountedRow, int]] = deque()
        self._queued = 0  # bytes, incremented only by the loop
        self._drained = 0  # bytes, incremented by the writer; the difference is pending
        self._is_scheduled = False
        self._active: int | None = None
        self._next = 0
        self._failed = False
        self._closed = False
        self._hits = 0
        self._misses = 0
        writer.submit(self._run_guarded, self._open)

    def counts(self) -> CacheCounts:
        memory = self.memory.counts()
        disk = sum(segment.size for segment in list(self._segments.values()))
        return CacheCounts(self._hits, self._misses, memory.evicted, memory.memory_bytes, disk)

    def get(self, key: Hashable) -> CountedRow | None:
        """Implement Cache.get."""
        found = self.memory.get(key) or self._read(key)
        if found is None:
            self._misses += 1
        else:
            self._hits += 1
        return found

    def put(self, key: Hashable, found: CountedRow) -> None:
        """Implement Cache.put. Returns at once; the writer stores the row later."""
        self.memory.put(key, found)
        arrays = collect_arrays(found.row)
        size = sum(array.nbytes for array in arrays)
        if size > LARGEST or not all_finite(arrays):
            return
        digest = self._digest(key)
        if digest is None or digest in self._index or self._failed or self._closed:
            return
        if self._queued - self._drained < MOST_WAITING:
            self._queued += size
            self._pending.append((digest, CountedRow(copy_read_only(found.row), found.tokens), size))
            if not self._is_scheduled:
                self._is_scheduled = True
                self._writer.submit(self._run_guarded, self._flush)

    def close(self) -> None:
        """Accept no more rows, and close the files once pending rows are written."""
        if not self._closed:
            self._closed = True
            self._writer.submit(self._run_guarded, self._close_segments)

    def _digest(self, key: Hashable) -> bytes | None:
        try:
            return blake2b(key_bytes(key), digest_size=DIGEST_BYTES, key=self._prefix).digest()
        except TypeError:  # keys of other types are cached only in memory
            return None

    # -- runs on the event loop

    def _read(self, key: Hashable) -> CountedRow | None:
        if not self._index:
            return None
        digest = self._digest(key)
        place = self._index.get(digest) if digest is not None else None
        if digest is None or place is None:
            return None
        number, offset, size = _unpack_place(place)
        segment = self._segments.get(number)
        if segment is None:
            return None
        found = None
        with contextlib.suppress(OSError):
            found = decode_record(os.pread(segment.fd, size, offset), digest)
        if found is None:
            self.broken_records += 1
            self._index.pop(digest, None)
            return None
        self.memory.put(key, found)
        return found

    # -- runs on the writer's thread

    def _run_guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            self._failed = True
            self._pending.clear()
            _log.warning("rows are no longer cached in %s: %s", self.folder, error.strerror or error)
        except Exception:  # a bug must not silently stop the shared writer for other models
            self._failed = True
            self._pending.clear()
            _log.exception("rows are no longer cached in %s", self.folder)

    def _open(self) -> None:
        """Index all records, and continue with the newest segment if nobody writes it and it has room."""
        self.folder.mkdir(parents=True, exist_ok=True)
        opened = [
            (path, fd) for path in sorted(self.folder.glob(f"*{SUFFIX}")) if (fd := _open_segment(path)) is not None
        ]
        segments = [_Segment(path, fd, 0) for path, fd in opened]
        for segment in segments:
            if self._closed:
                return
            self._load_segment(segment, last=segment is segments[-1])

    def _load_segment(self, segment: _Segment, *, last: bool) -> None:
        fd, number = segment.fd, self._next_number()
        owned = last and try_lock(fd)  # before reading: nobody may extend or delete it meanwhile
        found = os.fstat(fd)
        if not found.st_nlink:
            return
        segment.size, end = found.st_size, len(MAGIC)
        for digest, offset, size in read_records(fd, segment.size):
            self._index[digest] = _pack_place(number, offset, size)
            segment.digests.append(digest)
            end = offset + size
        self._segments[number] = segment
        if owned:
            self._active = number
            if end < segment.size:  # a truncated record would hide all later ones
                os.ftruncate(fd, end)
            if end == len(MAGIC):
                os.ftruncate(fd, 0)
                os.write(fd, MAGIC)
            segment.size = end

    def _flush(self) -> None:
        self._is_scheduled = False
        while self._pending and not self._failed:
            segment, number = self._get_writable_segment()
            written: dict[bytes, tuple[int, int]] = {}
            pieces: list[bytes] = []
            end = segment.size
            while self._pending and end < self._segment_bytes:
                digest, found, size = self._pending.popleft()
                self._drained += size
                if digest in self._index or digest in written:
                    continue
                record = encode_record(digest, found)
                written[digest] = (end, len(record))
                pieces.append(record)
                end += len(record)
            data = memoryview(b"".join(pieces))
            while data:
                data = data[os.write(segment.fd, data) :]
            segment.size = end
            for digest, (offset, length) in written.items():
                segment.digests.append(digest)
                self._index[digest] = _pack_place(number, offset, length)

    def _get_writable_segment(self) -> tuple[_Segment, int]:
        """Return the active segment, or a new one if it is full."""
        if self._active is not None:
            segment = self._segments[self._active]
            if segment.size < self._segment_bytes:
                return segment, self._active
            self._seal(self._active)
        self._make_room()
        segment = self._create_segment()
        self._active = self._next_number()
        self._segments[self._active] = segment
        return segment, self._active

    def _create_segment(self) -> _Segment:
        while True:
            path = self.folder / f"{time.time_ns():020d}-{os.getpid()}{SUFFIX}"
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            if try_lock(fd) and os.fstat(fd).st_nlink:
                os.write(fd, MAGIC)
                return _Segment(path, fd, len(MAGIC))
            os.close(fd)  # before it was locked, a process that needs room took it for one that nobody writes

    def _seal(self, number: int) -> None:
        """Stop writing to a segment, and release its lock so that any process may delete it."""
        fcntl.flock(self._segments[number].fd, fcntl.LOCK_UN)
        self._active = None

    def _make_room(self) -> None:
        """Delete the oldest segments until a new one fits, and forget those that another process deleted."""
        sizes = {
            path: size for path in sorted(self.folder.glob(f"*{SUFFIX}")) if (size := _segment_size(path)) is not None
        }
        total = sum(sizes.values())
        for path, size in list(sizes.items()):
            if total + self._segment_bytes <= self.max_bytes:
                break
            if _delete_segment(path):
                total -= size
                del sizes[path]
        for number, segment in list(self._segments.items()):
            if segment.path not in sizes:
                self._drop_segment(number, segment)

    def _drop_segment(self, number: int, segment: _Segment) -> None:
        for digest in segment.digests:
            place = self._index.get(digest)
            if place is not None and _unpack_place(place)[0] == number:
                self._index.pop(digest, None)
        self._segments.pop(number, None)

    def _close_segments(self) -> None:
        self._index.clear()
        self._segments.clear()
        self._active = None

    def _next_number(self) -> int:
        self._next += 1
        return self._next


def _pack_place(number: int, offset: int, size: int) -> int:
    """Pack a record's location into one integer, a third of the size of a tuple."""
    return number << 80 | offset << 32 | size


def _unpack_place(place: int) -> tuple[int, int, int]:
    return place >> 80, place >> 32 & 0xFFFFFFFFFFFF, place & 0xFFFFFFFF


def _open_segment(path: Path) -> int | None:
    """Open a segment to read and write; return None if it is missing or not a segment, and leave such a file
    untouched."""
    try:
        # Neither block on a pipe nor follow a link to a foreign file.
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_SEGMENT:
            return None
        raise
    if stat.S_ISREG(os.fstat(fd).st_mode) and MAGIC.startswith(os.pread(fd, len(MAGIC), 0)):
        return fd
    os.close(fd)
    return None


def _segment_size(path: Path) -> int | None:
    """Return the bytes of a segment; None if it is missing or not a segment."""
    fd = _open_segment(path)
    if fd is None:
        return None
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _delete_segment(path: Path) -> bool:
    """Delete a segment. Returns False if another process writes it."""
    fd = _open_segment(path)
    if fd is None:
        return True
    try:
        if not try_lock(fd):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)
