"""File locks, hard links, and file-system errors as messages that name the next step."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from pathlib import Path

from shoal.errors import SourceError

FREE = "free some space"


def full_disk_advice(free_space: str = FREE) -> str:
    """Say what to do about a full disk; `free_space` is how to free space."""
    return f"the disk is full; {free_space}, or set SHOAL_HOME to a larger one"


def disk_error(error: OSError, what: str, free_space: str = FREE) -> SourceError:
    """Convert a file-system error while writing `what` to a SourceError that names the next step."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return SourceError(f"{what}: {full_disk_advice(free_space)}")
    return SourceError(f"{what}: {error.strerror or error} ({error.filename}); check the folder that SHOAL_HOME names")


def check_plain(path: Path) -> None:
    """Raise OSError unless `path` is a regular file: opening a named pipe may block forever, and a device has no
    end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = next((word for test, word in _KINDS if test(mode)), "a special file")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def link_or_copy(source: Path | str, target: Path | str) -> None:
    """Hard-link a file that is never written again, or copy it where links are refused: another disk, a file system
    without them, or a file owned by another user."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


def try_lock(lock: int) -> bool:
    """Lock an open file until it is closed. Returns False if another process holds the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def check_free_space(folder: Path, size: int) -> None:
    """Raise the OSError of a full disk if `size` bytes do not fit, before anything is written."""
    if size > shutil.disk_usage(folder).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
