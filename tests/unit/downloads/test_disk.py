"""Error messages for the file system."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shoal.downloads.disk import check_free_space, disk_error, full_disk_advice


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(number: int) -> None:
    """The error asks for space or another disk; the caller says how to free space."""
    error = OSError(number, os.strerror(number))
    assert disk_error(error, "a model").message == (
        "a model: the disk is full; free some space, or set SHOAL_HOME to a larger one"
    )
    assert disk_error(error, "a model", "sweep").message == f"a model: {full_disk_advice('sweep')}"


def test_any_other_error() -> None:
    """The system's error, the file, and the owner of the folder."""
    error = disk_error(PermissionError(errno.EACCES, "Permission denied", "/shoal/x"), "a model")
    assert error.message == "a model: Permission denied (/shoal/x); check the folder that SHOAL_HOME names"


def test_free_space_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exact fit passes; one byte more is the error of a full disk."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100})())
    check_free_space(tmp_path, 100)
    with pytest.raises(OSError, match="No space left") as caught:
        check_free_space(tmp_path, 101)
    assert "the disk is full" in disk_error(caught.value, "a model").message
