"""Files and batches on disk. Every function blocks: call them in a thread.

    <folder>/lock                    held by the process that uses the folder
    <folder>/file-ID/                file.json, content
    <folder>/batch_ID/               batch.json; output.jsonl and errors.jsonl while it runs
    <folder>/new-ID, old-ID          being written or deleted: removed at the next start

A folder gets its final name, and a JSON file its final content, by one rename, after what it replaces is on disk. So
after a crash each object is there as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import msgspec

from shoal.batches.lines import recover_ids
from shoal.batches.objects import Batch, StoredFile
from shoal.decoding import json_decoder
from shoal.downloads.disk import link_or_copy, try_lock
from shoal.errors import BodyTooLarge, Unavailable

OUTPUT, ERRORS = "output.jsonl", "errors.jsonl"

_file_decoder = json_decoder(StoredFile)
_batch_decoder = json_decoder(Batch)


class DiskFull(BodyTooLarge):
    """The files of all batches together would exceed their limit."""


class Store:
    """The files and batches in `folder`. `files` and `batches` hold their state by id, once `open` has returned True.
    Threads add and remove entries: copy them before a loop.

    `used` counts the bytes of all contents, of which there may be `max_bytes`.
    """

    def __init__(self, folder: Path, max_bytes: int, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.folder = folder
        self.files: dict[str, StoredFile] = {}
        self.batches: dict[str, Batch] = {}
        self.used = 0
        self._max_bytes = max_bytes
        self._clock_ns = clock_ns
        self._last_ns = 0
        self._counting = threading.Lock()
        self._saving = threading.Lock()
        self._lock: int | None = None

    def exists(self) -> bool:
        return self.folder.is_dir()

    def open(self) -> bool:
        """Take the folder, and read what it holds. Returns False if another process has it. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):  # of another user, who chose who may read it
            self.folder.chmod(0o700)
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not try_lock(lock):
            os.close(lock)
            return False
        self._lock = lock
        try:
            self._load()
        except OSError:
            self.close()
            raise
        return True

    def _load(self) -> None:
        self.files, self.batches, self.used = {}, {}, 0
        batches = []
        for each in list(self.folder.iterdir()):
            if each.name.startswith(("new-", "old-")):
                shutil.rmtree(each, ignore_errors=True)
            elif each.name.startswith("file-"):
                self._load_file(each)
            elif each.name.startswith("batch_"):
                batches.append(each)
        for each in batches:  # after the files, by which they know what was published
            self._load_batch(each)
        times = [each.created_ns for each in self.files.values()] + [each.created_ns for each in self.batches.values()]
        self._last_ns = max(times, default=0)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def next_ns(self) -> int:
        """Return the time in nanoseconds since 1970, later than that of every object so far."""
        with self._counting:
            self._last_ns = max(self._clock_ns(), self._last_ns + 1)
            return self._last_ns

    def reserve(self, size: int) -> None:
        """Count `size` more bytes; fewer, if it is negative. Raises DiskFull."""
        with self._counting:
            if size > 0 and self.used + size > self._max_bytes:
                raise DiskFull(
                    f"The files of batches would take more than {self._max_bytes >> 20} MB; delete some with "
                    "DELETE /v1/files/{id}, or raise batch_disk_mb."
                )
            self.used += size

    def new_file(self) -> NewFile:
        return NewFile(self)

    def add_batch(self, batch: Batch) -> None:
        """Store a new batch. Raises OSError."""
        with self._building() as folder:
            _write(folder / "batch.json", msgspec.json.encode(batch))
            self._name(folder, batch.id)
            self.batches[batch.id] = batch

    def save_batch(self, batch: Batch) -> None:
        """Store the changed state of a batch. Raises OSError."""
        path = self.folder / batch.id / "batch.json"
        temporary = path.with_suffix(".new")
        with self._saving:
            _write(temporary, msgspec.json.encode(batch))
            os.replace(temporary, path)
            _sync_folder(path.parent)

    def remove(self, name: str) -> None:
        """Delete a file or a batch. Raises OSError."""
        old = self.folder / f"old-{uuid4().hex}"
        self._move(self.folder / name, old)
        removed = self.files.pop(name, None)
        self.batches.pop(name, None)
        if removed is not None:
            self.reserve(-removed.bytes)
        shutil.rmtree(old, ignore_errors=True)

    def content(self, file_id: str) -> Path:
        return self.folder / file_id / "content"

    def recover_results(self, batch: Batch) -> set[str]:
        """Return the ids of the finished requests, and set the counts of the batch by them."""
        paths = [self.folder / batch.id / name for name in (OUTPUT, ERRORS)]
        size = sum(map(_size, paths))
        completed, failed = (list(recover_ids(each)) for each in paths)
        self.reserve(sum(map(_size, paths)) - size)  # what was cut off
        batch.completed, batch.failed = len(completed), len(failed)
        return {*completed, *failed}

    def append_results(self, batch: Batch, results: Iterable[tuple[bool, bytes]]) -> None:
        """Append lines, each with whether it is a success. Raises DiskFull and OSError, after which the last line may
        be incomplete: `recover_results` cuts it off.
        """
        joined = {True: bytearray(), False: bytearray()}
        for ok, line in results:
            joined[ok] += line
        for ok, data in joined.items():
            if data:
                path = self.folder / batch.id / (OUTPUT if ok else ERRORS)
                size = _size(path)
                self.reserve(len(data))
                try:
                    with path.open("ab", buffering=0) as file:
                        _write_all(file.fileno(), data)
                except OSError:
                    self.reserve(_size(path) - size - len(data))
                    raise

    def publish(self, batch: Batch, name: str, file_id: str) -> str | None:
        """Make a file of the results of a batch, unless that was done before. Returns its id, or None if there are no
        results. Raises OSError."""
        source = self.folder / batch.id / name
        if file_id in self.files:
            return file_id
        if not source.exists() or not source.stat().st_size:
            return None
        with self._building() as folder:
            link_or_copy(source, folder / "content")
            with (folder / "content").open("rb") as file:
                os.fsync(file.fileno())
            created = self.next_ns()
            stored = StoredFile(
                id=file_id,
                owner=batch.owner,
                bytes=source.stat().st_size,
                created_ns=created,
                expires_at=created // 10**9 + batch.output_seconds,
                filename=f"{batch.id}_{name}",
                purpose="batch_output",
            )
            self.finish_file(folder, stored)
        return file_id

    def remove_results(self, batch: Batch) -> None:
        """Remove the results from the folder of a batch, after they were published."""
        for name in (OUTPUT, ERRORS):
            (self.folder / batch.id / name).unlink(missing_ok=True)

    def new_folder(self) -> Path:
        folder = self.folder / f"new-{uuid4().hex}"
        folder.mkdir()
        return folder

    def finish_file(self, folder: Path, stored: StoredFile) -> None:
        _write(folder / "file.json", msgspec.json.encode(stored))
        self._name(folder, stored.id)
        self.files[stored.id] = stored

    @contextlib.contextmanager
    def _building(self) -> Iterator[Path]:
        """A new folder for the block to fill and name; removed if that fails."""
        folder = self.new_folder()
        try:
            yield folder
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _name(self, folder: Path, name: str) -> None:
        _sync_folder(folder)
        self._move(folder, self.folder / name)

    def _move(self, source: Path, target: Path) -> None:
        """Rename a folder. Raises OSError, after which it has its old name: else the next start would find what the
        client was told had failed."""
        os.rename(source, target)
        try:
            _sync_folder(self.folder)
        except OSError:
            os.rename(target, source)
            raise

    def _load_file(self, folder: Path) -> None:
        stored: StoredFile | None = _read(folder / "file.json", _file_decoder)
        if stored is not None and stored.id == folder.name:
            self.files[stored.id] = stored
            self.used += stored.bytes

    def _load_batch(self, folder: Path) -> None:
        batch: Batch | None = _read(folder / "batch.json", _batch_decoder)
        if batch is None or batch.id != folder.name:
            return
        self.batches[batch.id] = batch
        for name, published in ((OUTPUT, batch.output_id), (ERRORS, batch.errors_id)):
            if batch.has_ended:
                (folder / name).unlink(missing_ok=True)
            elif published not in self.files:  # else that file counts them
                self.used += _size(folder / name)


class NewFile:
    """A file while it is written. End it by `discard`, after `keep` or instead of it. Nothing is on disk before the
    first call."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._folder: Path | None = None
        self._file: BinaryIO | None = None
        self.size = 0
        self._has_ended = False
        self._using = threading.Lock()  # a request that is cancelled leaves its thread behind

    def write(self, data: bytes) -> None:
        """Append. Raises DiskFull and OSError."""
        with self._using:
            if not self._has_ended:
                _, file = self._open()
                self._store.reserve(len(data))
                self.size += len(data)
                file.write(data)

    def keep(self, *, owner: str, filename: str, purpose: str, seconds: int) -> StoredFile:
        """Store the file under a new id, for so many seconds. Raises OSError."""
        with self._using:
            folder, file = self._open()
            file.flush()
            os.fsync(file.fileno())
            file.close()
            created = self._store.next_ns()
            stored = StoredFile(
                id=f"file-{uuid4().hex}",
                owner=owner,
                bytes=self.size,
                created_ns=created,
                expires_at=created // 10**9 + seconds,
                filename=filename,
                purpose=purpose,
            )
            self._store.finish_file(folder, stored)
            self._has_ended = True
            return stored

    def discard(self) -> None:
        """Remove the file, unless it was kept."""
        with self._using:
            if self._has_ended:
                return
            self._has_ended = True
            self._store.reserve(-self.size)
            if self._file is not None:
                with contextlib.suppress(OSError):  # a full disk: closing writes what is left in the buffer
                    self._file.close()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _open(self) -> tuple[Path, BinaryIO]:
        self._folder = self._folder or self._store.new_folder()
        self._file = self._file or (self._folder / "content").open("wb")
        return self._folder, self._file


def to_unavailable(error: OSError, folder: Path) -> Unavailable:
    """Return the error for a client: whether a disk is full, or cannot be used."""
    full = error.errno in {errno.ENOSPC, errno.EDQUOT}
    reason = "its disk is full" if full else error.strerror or str(error)
    return Unavailable(f"The server cannot store files of batches: {reason}; see the folder {folder.name!r} in `home`.")


def _write(path: Path, data: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        _write_all(file.fileno(), data)
        os.fsync(file.fileno())


def _write_all(descriptor: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, decoder: msgspec.json.Decoder[Any]) -> Any:
    """Decode a file; None if it is missing or of another version."""
    try:
        return decoder.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
