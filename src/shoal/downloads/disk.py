"""What this machine's file system says no to, as errors that say the next step; and the locks of its files."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from pathlib import Path

from shoal.errors import SourceError

FREE = "free some space"


def full_disk_advice(room: str = FREE) -> str:
    """What to do about a full disk; `room`: how some is made."""
    return f"the disk is full; {room}, or set SHOAL_HOME to a larger one"


def disk_error(error: OSError, what: str, room: str = FREE) -> SourceError:
    """The next step for an error of this machine's file system while `what` was written."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return SourceError(f"{what}: {full_disk_advice(room)}")
    return SourceError(f"{what}: {error.strerror or error} ({error.filename}); check the folder that SHOAL_HOME names")


def check_plain(path: Path) -> None:
    """Raise OSError for what is no plain file: to open a named pipe may block for ever, and a device has no end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = next((word for test, word in _KINDS if test(mode)), "no plain file")
        raise OSError(errno.EINVAL, f"it is {kind}, where a plain file belongs", str(path))


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def try_lock(lock: int) -> bool:
    """Take the lock of an open file, held until it is closed; False when another process has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def check_free_space(folder: Path, size: int) -> None:
    """Raise the OSError of a full disk, before anything is written, where `size` bytes do not fit."""
    if size > shutil.disk_usage(folder).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
