"""The exchange of two folders."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.backends.triton import folder_exchange as module
from shoal.backends.triton.folder_exchange import exchange


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    return tmp_path / "new", tmp_path / "old"


def contents(*folders: Path) -> list[str]:
    return [(folder / "content").read_text() for folder in folders]


def answering(number: int) -> Callable[..., int]:
    """Return a renameat2 that fails with an errno."""

    def call(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    return call


def test_both_have_changed_places(pair: tuple[Path, Path]) -> None:
    """Through the system call."""
    exchange(*pair)
    assert contents(*pair) == ["old", "new"]


@pytest.mark.parametrize("call", [None, answering(errno.ENOSYS), answering(errno.EINVAL)], ids=["absent", "old", "nfs"])
def test_without_the_system_call(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, call: Callable[..., int] | None
) -> None:
    """Through renames, with the same result and no leftovers."""
    monkeypatch.setattr(module, "_renameat2", lambda: call)
    exchange(*pair)
    assert contents(*pair) == ["old", "new"]
    assert len(list(pair[0].parent.iterdir())) == 2


def test_an_error_of_the_system_is_raised(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without trying renames."""
    monkeypatch.setattr(module, "_renameat2", lambda: answering(errno.EACCES))
    with pytest.raises(PermissionError, match="old"):
        exchange(*pair)
    assert contents(*pair) == ["new", "old"]


def test_the_second_rename_fails(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the old folder moves back."""
    monkeypatch.setattr(module, "_renameat2", lambda: None)
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path == pair[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="Input/output error"):
        exchange(*pair)
    assert contents(*pair) == ["new", "old"]


def test_what_is_not_there_cannot_be_exchanged(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "one", tmp_path / "none")
