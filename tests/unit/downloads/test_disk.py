"""Errors of the file system, in words."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shoal.downloads.disk import check_free_space, disk_error, full_disk_advice


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(number: int) -> None:
    """Room, or another disk; how room is made is the caller's to say."""
    error = OSError(number, os.strerror(number))
    assert disk_error(error, "a model").message == (
        "a model: the disk is full; free some space, or set SHOAL_HOME to a larger one"
    )
    assert disk_error(error, "a model", "sweep").message == f"a model: {full_disk_advice('sweep')}"


def test_any_other_refusal() -> None:
    """What the system said and of which file, and whose folder it is."""
    error = disk_error(PermissionError(errno.EACCES, "Permission denied", "/shoal/x"), "a model")
    assert error.message == "a model: Permission denied (/shoal/x); check the folder that SHOAL_HOME names"


def test_room_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits just so passes, one byte more is the error of a full disk."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100})())
    check_free_space(tmp_path, 100)
    with pytest.raises(OSError, match="No space left") as caught:
        check_free_space(tmp_path, 101)
    assert "the disk is full" in disk_error(caught.value, "a model").message
