"""The staging folder for entries, and its lock."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.backends.triton.staging import LOCK, staging
from shoal.errors import Unavailable


def test_it_is_beside_the_repository_and_goes(tmp_path: Path) -> None:
    """Outside the repository, hidden, on the same disk; only the lock remains."""
    repository = tmp_path / "models"
    with staging(repository, 1) as partial:
        assert partial.parent == tmp_path
        assert partial.name.startswith(".models.shoal-partial-")
        (partial / "file").write_text("")
    assert [path.name for path in tmp_path.iterdir()] == ["models"]
    assert [path.name for path in repository.iterdir()] == [LOCK]


def test_what_a_dead_writer_left_is_deleted(tmp_path: Path) -> None:
    """In both places, and nothing with a similar name."""
    repository = tmp_path / "models"
    deleted = [tmp_path / ".models.shoal-partial-abc", repository / ".shoal-partial-abc"]
    stays = [tmp_path / ".other.shoal-partial-abc", repository / "shoal-partial-abc", tmp_path / "models.old"]
    for folder in (*deleted, *stays):
        (folder / "1").mkdir(parents=True)
    link = tmp_path / ".models.shoal-partial-link"
    link.symlink_to(stays[0])
    with staging(repository, 1):
        assert not any(folder.exists() for folder in deleted)
    assert all((folder / "1").is_dir() for folder in (*stays, link))


def test_what_a_dead_writer_had_taken_aside_is_put_back(tmp_path: Path) -> None:
    """Without an atomic exchange, a writer may die while the old folder is moved aside."""
    repository = tmp_path / "models"
    left = tmp_path / ".models.shoal-partial-abc"
    for folder in (left / "lost.old", left / "replaced.old", repository / "replaced"):
        (folder / "1").mkdir(parents=True)
        (folder / "said").write_text(str(folder.parent == repository))
    with staging(repository, 1):
        assert (repository / "lost" / "said").read_text() == "False"
        assert (repository / "replaced" / "said").read_text() == "True"
    assert not left.exists()


def test_it_is_inside_where_beside_is_another_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a mounted volume: a rename cannot cross disks."""
    repository = tmp_path / "models"
    stat = Path.stat

    def mounted(path: Path, **options: Any) -> Any:
        found = stat(path, **options)
        return os.stat_result((*found[:2], found.st_dev + 1, *found[3:10])) if path == tmp_path else found

    repository.mkdir()
    monkeypatch.setattr(Path, "stat", mounted)
    with staging(repository, 1) as partial:
        assert partial.parent == repository
        assert partial.name.startswith(".shoal-partial-")
    assert [path.name for path in repository.iterdir()] == [LOCK]


def test_it_is_inside_where_beside_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder around the repository may be neither writable nor readable."""
    repository = tmp_path / "models"
    repository.mkdir()
    mkdtemp, scandir = tempfile.mkdtemp, os.scandir

    def refused(what: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if (named.get("dir") or arguments[0]) == tmp_path:
                raise PermissionError(13, "Permission denied")
            return what(*arguments, **named)

        return call

    monkeypatch.setattr(tempfile, "mkdtemp", refused(mkdtemp))
    monkeypatch.setattr(os, "scandir", refused(scandir))
    with staging(repository, 1) as partial:
        assert partial.parent == repository


def test_nobody_can_write_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the system's error is raised."""

    def refused(**_: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    with pytest.raises(PermissionError), staging(tmp_path / "models", 1):
        pass


def test_a_second_writer_waits(tmp_path: Path) -> None:
    """Meanwhile it does not delete the first one's folder."""
    order: list[str] = []
    entered = threading.Event()

    def second() -> None:
        entered.set()
        with staging(tmp_path / "models", 30):
            order.append("second")

    with staging(tmp_path / "models", 1) as partial:
        thread = threading.Thread(target=second)
        thread.start()
        entered.wait()
        assert partial.is_dir()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_second_writer_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the reason and the time to retry."""
    times = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(times)))
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    repository = tmp_path / "models"
    repository.mkdir()
    with (repository / LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match="for 3 s: try again") as caught, staging(repository, 3):
            pass
    assert caught.value.retry_after == 3
    assert len(pauses) == 2


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    """Nothing outside the repository is created or opened."""
    repository = tmp_path / "models"
    repository.mkdir()
    (repository / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"), staging(repository, 1):
        pass
    assert not (tmp_path / "elsewhere").exists()
