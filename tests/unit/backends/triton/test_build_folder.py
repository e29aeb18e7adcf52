"""Folders that are built once: by one process, completely or not at all."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.backends.triton.build_folder import build_once
from shoal.downloads.disk import try_lock
from shoal.errors import Cancelled, SourceError


def present(folder: Path) -> bool:
    return (folder / "made").exists()


def make(folder: Path) -> None:
    (folder / "made").write_text("whole")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


def test_what_is_usable_is_left_alone(tmp_path: Path) -> None:
    """Nothing is built, and no lock is taken."""
    (tmp_path / "one").mkdir()
    make(tmp_path / "one")

    def never(folder: Path) -> None:
        raise AssertionError(folder)

    assert build_once(tmp_path / "one", never, usable=present, stop=threading.Event()) == tmp_path / "one"
    assert list(tmp_path.iterdir()) == [tmp_path / "one"]


def test_two_at_once_build_once(tmp_path: Path) -> None:
    """The second waits for the first and uses its result."""
    calls: list[Path] = []
    both = threading.Barrier(2)

    def build(folder: Path) -> None:
        calls.append(folder)
        make(folder)

    def work() -> Path:
        both.wait()
        return build_once(tmp_path / "deep" / "one", build, usable=present, stop=threading.Event())

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.submit(work), threads.submit(work)
        assert first.result() == second.result()
    assert len(calls) == 1
    assert names(tmp_path / "deep") == {"one"}


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    """Its error is raised, its partial folder is deleted, and the next build starts afresh."""

    def fail(folder: Path) -> None:
        make(folder)
        raise SourceError("no network")

    with pytest.raises(SourceError, match="no network"):
        build_once(tmp_path / "one", fail, usable=present, stop=threading.Event())
    assert names(tmp_path) == set()
    build_once(tmp_path / "one", make, usable=present, stop=threading.Event())
    assert names(tmp_path) == {"one"}


def test_what_is_unusable_or_left_over_is_replaced(tmp_path: Path) -> None:
    """A new folder replaces a damaged one, and the partial folder of a dead process is deleted."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "damaged").touch()
    (tmp_path / ".partial-one-dead").mkdir()
    build_once(tmp_path / "one", make, usable=present, stop=threading.Event())
    assert names(tmp_path) == {"one"}
    assert names(tmp_path / "one") == {"made"}


def test_waiting_for_another_can_be_stopped(tmp_path: Path) -> None:
    """While the other one goes on building."""
    lock = os.open(tmp_path / ".one.lock", os.O_RDWR | os.O_CREAT)
    assert try_lock(lock)
    stop = threading.Event()
    stop.set()
    with pytest.raises(Cancelled):
        build_once(tmp_path / "one", make, usable=present, stop=stop)
    os.close(lock)


@pytest.mark.parametrize(("number", "message"), [(errno.ENOSPC, "disk is full"), (errno.EACCES, "SHOAL_HOME names")])
def test_a_disk_that_refuses(tmp_path: Path, number: int, message: str) -> None:
    """The error has the next step."""

    def fail(folder: Path) -> None:
        raise OSError(number, os.strerror(number), str(folder))

    with pytest.raises(SourceError, match=message):
        build_once(tmp_path / "one", fail, usable=present, stop=threading.Event())
