"""Files and batches on disk: what a crash leaves at every step, locks and the limit of space."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.batches import store as module
from shoal.batches.lines import encode_failure
from shoal.batches.objects import StoredFile
from shoal.batches.store import ERRORS, OUTPUT, DiskFull, Store
from tests.unit.batches.kit import new_batch

STEPS = ("replace", "rename", "fsync", "link", "write")


class Crash(BaseException):
    """The process dies here."""


class CrashingOs:
    """The module `os`, which dies before or after its n-th step that changes a disk."""

    def __init__(self, step: int, *, after: bool) -> None:
        self.left = step
        self.after = after

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._counted(real) if name in STEPS else real

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.left -= 1
            if self.left == 0 and not self.after:
                raise Crash
            result = real(*arguments)
            if self.left == 0:
                raise Crash
            return result

        return call


class FailingOs:
    """The module `os`, whose n-th fsync fails."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, descriptor: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.EIO, "broken")
        os.fsync(descriptor)


class FullOs:
    """The module `os` over a disk with this many bytes left."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, descriptor: int, data: memoryview) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, "full")
        written = os.write(descriptor, data[: self.left])
        self.left -= written
        return written


def opened(folder: Path, max_bytes: int = 1 << 20, **changes: Any) -> Store:
    store = Store(folder, max_bytes, **changes)
    assert store.open()
    return store


def add_file(store: Store, content: bytes = b"abc\n") -> StoredFile:
    new = store.new_file()
    try:
        new.write(content)
        return new.keep(owner="me", filename="in", purpose="batch", seconds=100)
    finally:
        new.discard()


def result(custom_id: str) -> bytes:
    return encode_failure("id", custom_id, "c", "m")


def life(store: Store, done: list[str]) -> None:
    """Do everything once, and note each finished step."""
    stored = add_file(store)
    done.append("file")
    batch = new_batch()
    store.add_batch(batch)
    done.append("batch")
    batch.status = "in_progress"
    store.save_batch(batch)
    done.append("saved")
    store.append_results(batch, [(True, result("a")), (False, result("b"))])
    done.append("results")
    batch.output_file_id = store.publish(batch, OUTPUT, batch.output_id)
    done.append("output")
    batch.error_file_id = store.publish(batch, ERRORS, batch.errors_id)
    batch.status = "completed"
    store.save_batch(batch)
    store.remove_results(batch)
    done.append("completed")
    store.remove(stored.id)
    done.append("removed")


def check(store: Store, done: list[str]) -> None:
    """Check that what was done is there, and that nothing is there in part."""
    inputs = [each for each in store.files.values() if each.purpose == "batch"]
    assert len(inputs) <= 1
    if "file" in done and "completed" not in done:
        assert inputs
    for each in store.files.values():
        assert store.content(each.id).stat().st_size == each.bytes
    batch = store.batches.get("batch_1")
    assert batch is not None or "batch" not in done
    if batch is not None:
        assert batch.status in {"validating", "in_progress", "completed"}
        if "saved" in done:
            assert batch.status != "validating"
        if batch.status == "completed":
            assert {batch.output_file_id, batch.error_file_id} == {"file-out", "file-err"}
            assert {"file-out", "file-err"} <= set(store.files)
        else:
            found = store.recover_results(batch)
            assert found <= {"a", "b"}
            assert batch.completed + batch.failed == len(found)
            assert found == {"a", "b"} or "results" not in done
    assert not [each for each in store.folder.iterdir() if each.name.startswith(("new-", "old-"))]
    contents = sum(each.bytes for each in store.files.values())
    assert store.used >= contents


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """After each step that changes the disk, another process finds objects that are whole, and all that was done."""
    crashes = 0
    for step in range(1, 200):
        folder = tmp_path / f"{step}"
        store, done = opened(folder), list[str]()
        with monkeypatch.context() as patch:
            patch.setattr(module, "os", CrashingOs(step, after=after))
            try:
                life(store, done)
            except Crash:
                crashes += 1
        store.close()
        again = opened(folder)
        check(again, done)
        again.close()
        shutil.rmtree(folder)
        if done[-1:] == ["removed"] and crashes:
            break
    assert crashes > 25


def test_a_failed_fsync_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not stored or deleted is as before, also for the next process, and leaves nothing behind."""
    for at in range(1, 50):
        store, done = opened(tmp_path / f"{at}"), list[str]()
        with monkeypatch.context() as patch:
            patch.setattr(module, "os", FailingOs(at))
            try:
                life(store, done)
            except OSError:
                assert [each.name for each in store.folder.iterdir() if each.name.startswith(("new-", "old-"))] == []
        listed = sorted(store.files), sorted(store.batches), store.used
        store.close()
        again = opened(store.folder)
        assert (sorted(again.files), sorted(again.batches), again.used) == listed
        again.close()
        if "removed" in done:
            break
    assert at > 15


def refuse_link(source: Path, target: Path) -> None:
    raise OSError(errno.EPERM, "no links")


@pytest.mark.parametrize("links", [True, False])
def test_publishing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    """A batch that stopped between its files and its end keeps the files, and counts them once, also where results are
    copied for want of hard links."""
    if not links:
        monkeypatch.setattr(os, "link", refuse_link)
    store = opened(tmp_path)
    batch = new_batch()
    store.add_batch(batch)
    store.append_results(batch, [(True, result("a"))])
    assert store.publish(batch, OUTPUT, batch.output_id) == "file-out"
    assert store.publish(batch, ERRORS, batch.errors_id) is None
    used = store.used
    store.close()
    store = opened(tmp_path)
    assert store.used == used == len(result("a"))
    assert store.publish(store.batches["batch_1"], OUTPUT, batch.output_id) == "file-out"
    store.close()


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are copied there."""
    monkeypatch.setattr(os, "link", refuse_link)
    store = opened(tmp_path)
    batch = new_batch()
    store.add_batch(batch)
    store.append_results(batch, [(True, result("a"))])
    store.publish(batch, OUTPUT, batch.output_id)
    assert store.content("file-out").read_bytes() == result("a")
    store.close()


def test_a_full_disk_while_results_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try removes its copy: it would fill the disk for good."""
    monkeypatch.setattr(os, "link", refuse_link)

    def copy(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(shutil, "copyfile", copy)
    store = opened(tmp_path)
    batch = new_batch()
    store.add_batch(batch)
    store.append_results(batch, [(True, result("a"))])
    with pytest.raises(OSError, match="full"):
        store.publish(batch, OUTPUT, batch.output_id)
    assert {each.name for each in tmp_path.iterdir()} == {"batch_1", "lock"}
    store.close()


def test_one_process_has_the_folder(tmp_path: Path) -> None:
    first, second = opened(tmp_path), Store(tmp_path, 1)
    assert not second.open()
    first.close()
    assert second.open()
    second.close()


def test_only_its_user_may_read_it(tmp_path: Path) -> None:
    """Also a folder that an earlier version left open."""
    folder = tmp_path / "batches"
    folder.mkdir(mode=0o755)
    store = Store(folder, 1000)
    assert store.open()
    assert folder.stat().st_mode & 0o777 == 0o700
    store.close()


def test_space_is_limited(tmp_path: Path) -> None:
    """Files and results share it; a file that is refused, deleted or not kept gives its space back."""
    store = opened(tmp_path, max_bytes=10)
    first = add_file(store, b"12345678")
    with pytest.raises(DiskFull, match="batch_disk_mb"):
        add_file(store, b"123")
    assert store.used == 8
    store.new_file().discard()
    batch = new_batch()
    store.add_batch(batch)
    with pytest.raises(DiskFull):
        store.append_results(batch, [(True, b"123")])
    store.remove(first.id)
    assert (store.used, store.files) == (0, {})
    add_file(store, b"1234567890")
    store.close()


@pytest.mark.parametrize("left", [0, 10, len(result("a")) + 10])
def test_a_failed_write_takes_only_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """Half of a line gives its space back when the next start cuts it off."""
    store = opened(tmp_path)
    batch = new_batch()
    store.add_batch(batch)
    store.append_results(batch, [(True, result("0"))])
    before = store.used
    with monkeypatch.context() as patch:
        patch.setattr(module, "os", FullOs(left))
        with pytest.raises(OSError, match="full"):
            store.append_results(batch, [(True, result("a") + result("b"))])
    assert store.used == before + left
    store.close()
    store = opened(tmp_path)
    assert store.used == before + left
    assert store.recover_results(batch) == ({"0", "a"} if left > len(result("a")) else {"0"})
    assert store.used == before + left // len(result("a")) * len(result("a"))
    store.close()


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    """What is not Shoal's, or of another version, is neither listed nor removed."""
    (tmp_path / "file-x").mkdir(parents=True)
    (tmp_path / "batch_x").mkdir()
    (tmp_path / "batch_x" / "batch.json").write_text('{"id": 7}')
    (tmp_path / "notes").write_text("mine")
    store = opened(tmp_path)
    assert (store.files, store.batches) == ({}, {})
    assert {each.name for each in tmp_path.iterdir()} == {"file-x", "batch_x", "notes", "lock"}
    store.close()


def test_times_are_in_order(tmp_path: Path) -> None:
    """Objects made in the same instant, or after the clock was set back, keep their order."""
    now = iter([5, 5, 3, 9])
    store = opened(tmp_path, clock_ns=lambda: next(now))
    assert [store.next_ns() for _ in range(4)] == [5, 6, 7, 9]
    store.close()
